"""Shapes: models with random weights, built from a config on the device, to measure speed without a download.

A shape's output is meaningless, but it is as fast as the real model. Its inputs are token ids, so its
tokenizer has one word per id.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skim.attention import hook
from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError, first_line
from skim.memory.budget import free_bytes, in_words
from skim.models import probe
from skim.models.dtype import pick_dtype
from skim.models.load import LoadedModel, use_device
from skim.models.numbers import check_numbers
from skim.models.offload import HostLayers
from skim.models.quantized.build import build_module
from skim.models.quantized.format import CodedWeight

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "gemma-3-4b": {  # without the vision tower
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
SYNTAX = f"{', '.join(SHAPES)}, or the path of a transformers config.json"


def build_shape(
    shape: str, config: ModelConfig, *, seed: int = 0, tokenizer_of: LoadedModel | None = None
) -> LoadedModel:
    """Build a shape with random weights, in the dtype and on the device of `config`.

    `max_model_len` may exceed the shape's context window: random weights are not trained for one. The shape
    has the tokenizer of `tokenizer_of` if its vocabulary is large enough for it. Like `load`, the work runs
    in a short-lived thread.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="skim-shape") as thread:
        return thread.submit(_build, shape, config, seed, tokenizer_of).result()


def _build(shape: str, config: ModelConfig, seed: int, tokenizer_of: LoadedModel | None) -> LoadedModel:
    device = use_device(config)
    dtype = pick_dtype(config.dtype, device)
    model_config = shape_config(shape)
    text_config = model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ModelError(
            f"shape {shape}: its config has no max_position_embeddings, so its context window is unknown"
        )
    if config.max_model_len is not None and config.max_model_len > positions:
        positions = text_config.max_position_embeddings = config.max_model_len
    probe.refuse_batch_dependent_rope(text_config, shape)
    if device.type == "cpu":  # allocation does not fail on a CPU: the system would kill the process
        _check_fits(shape, model_config, dtype, config.quantization)
    host = HostLayers.wanted(config, device, int(text_config.num_hidden_layers))
    if config.quantization in ("auto", "none") and host is None:
        module = _random_module(shape, model_config, device, dtype, seed)
    else:
        empty = _random_module(shape, model_config, torch.device("meta"), dtype, 0)
        weights = _RandomWeights(empty, device, seed)
        make = partial(_random_module, shape, model_config, torch.device("cpu"), dtype, seed)
        module = build_module(make, weights, shape, device, dtype, config.quantization, host)
        if host is not None:
            host.finish(module, shape)
    vocab = int(text_config.vocab_size)
    shared = tokenizer_of is not None and tokenizer_of.vocab_size <= vocab
    return LoadedModel(
        name=shape,
        path=Path(os.devnull) / shape,  # a path that cannot exist: a shape has no directory
        module=module,
        tokenizer=tokenizer_of.tokenizer if tokenizer_of is not None and shared else word_tokenizer(vocab),
        device=device,
        dtype=dtype,
        max_positions=positions,
        vocab_size=vocab,
        eos_token_ids=frozenset(),
        layers=probe.probe_layers(module, shape),
        host_layers=host,
    )


def shape_config(shape: str) -> Any:
    """Return the transformers config of a named shape or a config file."""
    from transformers import AutoConfig

    if shape in SHAPES:
        settings = dict(SHAPES[shape])
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    path = Path(shape).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"unknown shape {shape!r}: there is no such file or directory; give {SYNTAX}")
    check_numbers(file, f"shape {shape}", "correct it")
    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a family's config code may raise anything
        raise ModelError(
            f"shape {shape}: not a config that transformers knows: {first_line(error)}; give {SYNTAX}"
        ) from error


_SHARES = {"int4": 4.5 / 32, "int8": 8.5 / 32, "fp8": 8.5 / 32}  # of the bytes in float32, about


def _check_fits(shape: str, model_config: Any, dtype: torch.dtype, quantization: str) -> None:
    weights = list(_random_module(shape, model_config, torch.device("meta"), dtype, 0).parameters())
    size, free = sum(int(one.nbytes) for one in weights), free_bytes(torch.device("cpu"))
    if quantization in _SHARES:
        size = int(_SHARES[quantization] * 4 * sum(one.numel() for one in weights))
    if size > free:
        raise ModelError(
            f"shape {shape}: its weights take {in_words(size)} in {dtype}, but only {in_words(free)} of "
            "memory is free; use a smaller shape, or quantization int4"
        )


class _RandomWeights:
    """Random weights for a module, one at a time. The same seed gives the same weights."""

    def __init__(self, empty: Any, device: torch.device, seed: int) -> None:
        self._places = dict(empty.state_dict())
        self._numbers = {name: number for number, name in enumerate(self._places)}
        self._tied = set(empty.all_tied_weights_keys)
        self._device, self._seed = device, seed

    def names(self) -> set[str]:
        return set(self._places) - self._tied

    def is_coded(self, name: str) -> bool:
        return False

    def coded(self, name: str) -> CodedWeight:
        raise KeyError(name)

    def plain(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if place.ndim < 2:  # of norms and biases, as transformers begins
            return torch.full_like(place, name.endswith("weight"), device=self._device)
        draw = torch.Generator(self._device).manual_seed(self._seed * 100_003 + self._numbers[name])
        value = torch.empty_like(place, device=self._device)
        return value.normal_(0.0, 0.02, generator=draw)


def _random_module(shape: str, model_config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build the module directly on its device, without a copy elsewhere."""
    from transformers import AutoModelForCausalLM

    hook.register()
    torch.manual_seed(seed)
    try:
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, attn_implementation=hook.NAME, trust_remote_code=False
            )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"shape {shape}: it does not fit {device} in {dtype}; use a smaller shape"
        ) from error
    except Exception as error:
        raise ModelError(f"shape {shape}: it cannot be built: {first_line(error)}") from error
    return module.eval().requires_grad_(False)


def word_tokenizer(vocab_size: int) -> Any:
    """A tokenizer with one word per id, `w0` to `w<n-1>`, so that ids have a text that can be scored."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
