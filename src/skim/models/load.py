"""A prepared directory becomes a running module whose attention is ours.

What each layer stores per token is not read from the config, where every family spells it differently:
one tiny forward records the keys and values the layers actually hand over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skim.attention import hook
from skim.attention.step import AttentionCall
from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError
from skim.memory.pool import LayerShape


@dataclass(frozen=True)
class LoadedModel:
    """Everything the engine needs of a model."""

    name: str
    path: Path
    module: Any  # the transformers module
    tokenizer: Any  # the transformers tokenizer
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    layers: tuple[LayerShape, ...]


class ShapeProbe:
    """Stands in for a step and writes down what each layer would store."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ModelError(f"unsupported architecture: layer {layer} attends more than once")
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def load(path: Path, config: ModelConfig) -> LoadedModel:
    """Load a prepared transformers directory. Only safetensors are read and no code of the model's is run.

    The work is done in a thread that ends with it. OpenMP keeps a pool of workers for every thread that ever
    computed; a second pool on the same cores makes each later forward up to twice as slow on the CPU.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="skim-load") as thread:
        return thread.submit(_load, path, config).result()


def _load(path: Path, config: ModelConfig) -> LoadedModel:
    from transformers import AutoConfig, AutoTokenizer

    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{config.model}: cannot read its config.json: {first_line(error)}") from error
    refuse_batch_dependent_rope(model_config, config.model)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    module = build(path, config.model, model_config, device, dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{config.model}: cannot read its tokenizer: {first_line(error)}") from error
    text_config = model_config.get_text_config()
    return LoadedModel(
        name=config.model,
        path=path,
        module=module,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_positions=int(text_config.max_position_embeddings),
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=find_eos(module, tokenizer),
        layers=probe_layers(module, config.model),
    )


def build(path: Path, name: str, model_config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The module with our attention, weights in place."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hook.register()
    showed = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            attn_implementation=hook.NAME,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except ValueError as error:
        raise ModelError(
            f"{name}: unsupported architecture {model_config.model_type!r}: {first_line(error)}"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{name}: cannot load its weights: {first_line(error)}; Skim reads whole safetensors files only, "
            "so fetch them again"
        ) from error
    finally:
        if showed:
            hf_logging.enable_progress_bar()
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ModelError(
            f"{name}: its weight files lack {len(wrong)} tensors or have them in another shape, first "
            f"{wrong[0]}; they do not belong to its config.json"
        )
    return module.to(device)


@torch.inference_mode()
def probe_layers(module: Any, name: str) -> tuple[LayerShape, ...]:
    """What each layer stores for a token; refuses a model some of whose state would not live in the pool."""
    probe = ShapeProbe()
    token = torch.zeros(1, 1, dtype=torch.long, device=module.device)
    try:
        module(input_ids=token, position_ids=token, use_cache=False, skim_step=probe)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{name}: unsupported architecture {module.config.model_type!r}: {first_line(error)}"
        ) from error
    count = int(module.config.get_text_config().num_hidden_layers)
    if sorted(probe.layers) != list(range(count)):
        raise ModelError(
            f"{name}: unsupported architecture {module.config.model_type!r}: {len(probe.layers)} of its "
            f"{count} layers are attention layers Skim can serve; recurrent and hybrid models are not"
        )
    return tuple(probe.layers[layer] for layer in range(count))


def refuse_batch_dependent_rope(model_config: Any, name: str) -> None:
    """transformers chooses these rotary frequencies by the largest position in the whole batch.

    A request's keys would then depend on its neighbours, and a shared prefix could mix two sets of them.
    """
    text_config = model_config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in (entry.get("rope_type") for entry in kinds):
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f"{name}: unsupported architecture: its rotary embedding of type {kind!r} depends on what "
                "else is in the batch"
            )


def find_eos(module: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a reply: the generation config may name several, the tokenizer one more."""
    found: set[int] = set()
    for source in (module.generation_config.eos_token_id, module.config.eos_token_id, tokenizer.eos_token_id):
        found.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return frozenset(found)


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {wanted!r} was asked for, but torch finds no CUDA device; use device='cpu'"
        )
    return torch.device(wanted)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return getattr(torch, wanted)  # type: ignore[no-any-return]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
