"""Load a prepared directory as a transformers module with Skim's attention."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from skim.attention import hook
from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError, UnsupportedModelError, first_line, shown
from skim.memory.budget import cap_gpu_memory, in_words
from skim.memory.store import LayerShape
from skim.models import probe
from skim.models.dtype import pick_dtype
from skim.models.generation import sampling_defaults
from skim.models.numbers import check_numbers
from skim.models.offload import HostLayers, check_offload, layers_of
from skim.models.overflow import check_converted
from skim.models.quantized.build import Mismatch, build_module, quantize_module
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.remedy import remedy
from skim.models.residency import Residency
from skim.models.sizes import WeightStats, weights_of
from skim.models.storages import own

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Everything the engine needs from a model."""

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
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the model's generation config sets."""
    host_layers: HostLayers | None = None
    """The layers, if some of them may be in host memory."""

    @property
    def layers_on_host(self) -> int:
        """Layers that come to the device in every forward."""
        return 0 if self.host_layers is None else self.host_layers.count

    @cached_property
    def weights(self) -> WeightStats:
        return weights_of(self.module)

    @cached_property
    def residency(self) -> Residency:
        """Where the weights are. All engines that share the model share it."""
        return Residency(self.name, self.module, self.device, self.host_layers)


def load(path: Path, config: ModelConfig) -> LoadedModel:
    """Load a prepared transformers directory. Only safetensors are read, and no remote code is run.

    The work runs in a short-lived thread. OpenMP keeps a worker pool for every thread that has computed; a
    second pool on the same cores makes each later forward up to twice as slow on the CPU.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="skim-load") as thread:
        return thread.submit(_load, path, config).result()


def _load(path: Path, config: ModelConfig) -> LoadedModel:
    from transformers import AutoConfig, AutoTokenizer

    name = config.model
    device = use_device(config)
    dtype = pick_dtype(config.dtype, device)
    check_numbers(path / "config.json", name, remedy(path))
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        text_config = model_config.get_text_config()
    except Exception as error:  # a family's config code may raise anything
        if unknown := _unknown_type(path):
            raise UnsupportedModelError(
                f"{name}: unsupported architecture {unknown!r}, which transformers does not know"
            ) from error
        raise ModelError(
            f"{name}: cannot read its config.json: {first_line(error)}; {remedy(path)}"
        ) from error
    max_positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 1:
        raise UnsupportedModelError(
            f"{name}: unsupported architecture {model_config.model_type!r}: its config.json has no "
            "max_position_embeddings, so its context window is unknown"
        )
    probe.refuse_batch_dependent_rope(text_config, name)
    host = HostLayers.wanted(config, device, int(text_config.num_hidden_layers))
    module = build(path, name, model_config, device, dtype, config.quantization, host)
    own(module)  # transformers maps files; mapped weights could not be parked
    if config.quantization not in ("auto", "none"):
        _warn_if_larger(path, name, config.quantization, weights_of(module))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{name}: cannot read its tokenizer: {first_line(error)}; {remedy(path)}") from error
    return LoadedModel(
        name=name,
        path=path,
        module=module,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_positions=max_positions,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=find_eos(module, tokenizer),
        layers=probe.probe_layers(module, name),
        sampling_defaults=sampling_defaults(path) if config.generation_config == "auto" else {},
        host_layers=host,
    )


def _warn_if_larger(path: Path, name: str, quantization: str, weights: WeightStats) -> None:
    """A format can take more memory than the file's own, if the file is quantized already."""
    stored = sum(one.stat().st_size for one in path.glob("*.safetensors"))
    if weights.bytes > stored:
        log.warning(
            "%s takes %s in %s and %s in its file, which has fewer bits; leave the quantization at auto",
            name,
            in_words(weights.bytes),
            quantization,
            in_words(stored),
        )


def _unknown_type(path: Path) -> str | None:
    """The `model_type` in config.json, if transformers does not know it."""
    from transformers import CONFIG_MAPPING

    try:
        named = json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return named if isinstance(named, str) and named not in CONFIG_MAPPING else None


def build(
    path: Path,
    name: str,
    model_config: Any,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    host: HostLayers | None = None,
) -> Any:
    """Build the module with Skim's attention and load its weights, as codes if they are or become codes.

    With `host`, its layers come to the device one by one, and leave it.
    """
    module = _build(path, name, model_config, device, dtype, quantization, host)
    if host is not None:
        host.finish(module, name)
    return module


def _build(
    path: Path,
    name: str,
    model_config: Any,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    host: HostLayers | None,
) -> Any:
    checkpoint = None
    if getattr(model_config, "quantization_config", None) or quantization not in ("auto", "none"):
        checkpoint = Checkpoint(path, name)
    if hasattr(model_config, "quantization_config"):
        del model_config.quantization_config  # transformers would run the code of that quantization
    if checkpoint is None or (checkpoint.format is None and quantization in ("auto", "none")):
        module = _build_plain(path, name, model_config, dtype)
        if host is None:
            module = module.to(device)  # which checks faster
        check_converted(module, path, name, dtype)
        return _move(module, device, host)
    try:
        return _build_coded(path, name, model_config, device, dtype, checkpoint, quantization, host)
    except Mismatch:  # transformers renames or merges weights of this family while it loads them
        log.warning(
            "%s: transformers merges or renames its weights, so all are loaded in %s first%s",
            name,
            dtype,
            "" if quantization in ("auto", "none") else "; those that are merged are not quantized",
        )
    coded = checkpoint if checkpoint.format is not None else None
    module = _build_plain(path, name, model_config, dtype, coded)
    check_converted(module, path, name, dtype)
    if quantization in ("auto", "none"):
        return _move(module, device, host)
    return quantize_module(module, device, quantization, host)


def _move(module: Any, device: torch.device, host: HostLayers | None) -> Any:
    """Move a module with its weights to the device, layer by layer with `host`."""
    if host is not None:
        for layer in layers_of(module):
            host.add(layer.to(device))
    return module.to(device)


def _build_coded(
    path: Path,
    name: str,
    model_config: Any,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    quantization: str,
    host: HostLayers | None,
) -> Any:
    """Build the module one weight at a time. Raise a `Mismatch` if the files' names are not the module's."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    hook.register()

    def make() -> Any:
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=hook.NAME, trust_remote_code=False
        )

    try:
        module = build_module(make, checkpoint, name, device, dtype, quantization, host)
    except ModelError:
        raise
    except Exception as error:  # a family's model code may raise anything
        raise _unfit(name, model_config, error) from error
    with contextlib.suppress(OSError):  # as transformers does: not every model has the file
        module.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return module


def _unfit(name: str, model_config: Any, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: unsupported architecture {model_config.model_type!r}, or weights that do not fit its "
        f"config.json: {first_line(error)}"
    )


def _build_plain(
    path: Path, name: str, model_config: Any, dtype: torch.dtype, coded: Checkpoint | None = None
) -> Any:
    """Build the module on the CPU with transformers' own loading. Weights of `coded` are restored for it."""
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hook.register()
    showed = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        kind: Any = AutoModelForCausalLM
        if coded is not None:  # the auto class takes no state dict
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
        module, report = kind.from_pretrained(
            path if coded is None else None,
            config=model_config,
            state_dict=None if coded is None else coded.restored(dtype),
            attn_implementation=hook.NAME,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{name}: cannot load its weights: {first_line(error)}; Skim reads complete safetensors files "
            f"only; {remedy(path)}"
        ) from error
    except Exception as error:  # a family's model code may raise anything
        raise _unfit(name, model_config, error) from error
    finally:
        if showed:
            hf_logging.enable_progress_bar()
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        saved = model_config.architectures or []
        head = module.get_output_embeddings()
        names = {name for name, part in module.named_modules() if part is head}
        headless = names.issuperset(name.rpartition(".")[0] for name in wrong)
        if saved and type(module).__name__ not in saved and headless:
            raise UnsupportedModelError(
                f"{name}: it was saved as a {saved[0]} and lacks {wrong[0]}, so it cannot generate text"
            )
        raise ModelError(
            f"{name}: its weight files lack {len(wrong)} tensors or have them in another shape, first "
            f"{wrong[0]}; the files do not match its config.json; {remedy(path)}"
        )
    return module


def find_eos(module: Any, tokenizer: Any) -> frozenset[int]:
    """Return all tokens that end a reply: the generation config may list several, the tokenizer another."""
    found: set[int] = set()
    sources = (module.generation_config, module.config, module.config.get_text_config(), tokenizer)
    for source in (getattr(owner, "eos_token_id", None) for owner in sources):
        found.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return frozenset(found)


def check_device(config: ModelConfig) -> torch.device:
    """The device of these settings. Raises ConfigError if it is not there, or if they need a GPU and it is
    none."""
    device = pick_device(config.device)
    if config.cap_bytes is not None and device.type != "cuda":
        raise ConfigError(
            f"memory_cap {shown(config.memory_cap)} limits the memory of a GPU, and the device is {device}; "
            "leave it out, or set kv_memory",
            fields="memory_cap",
        )
    check_offload(config, device)
    return device


def use_device(config: ModelConfig) -> torch.device:
    """The device of these settings, with its memory capped as they say: a cap is the whole process's, so that
    of an earlier model is replaced or lifted."""
    device = check_device(config)
    if device.type == "cuda":
        cap_gpu_memory(device, config.cap_bytes)
    return device


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {wanted!r} was requested, but torch finds no CUDA device; set device to cpu or auto",
            fields="device",
        )
    device = torch.device(wanted)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {wanted!r} was requested, but torch finds {torch.cuda.device_count()} CUDA devices; "
            "count from cuda:0",
            fields="device",
        )
    return device
