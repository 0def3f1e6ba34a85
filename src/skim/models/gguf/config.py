"""Convert a GGUF file's settings to a transformers config.

A setting that would change the result and has no counterpart in transformers raises an error that names it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skim.errors import ModelError
from skim.models.gguf.file import GGUFFile


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to transformers."""

    model_type: str
    class_name: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Config entries that GGUF files do not contain."""
    rotary_interleaved: bool = False
    """Rotary pairs are neighbouring query and key rows; transformers pairs the two halves of a head."""
    norm_offset: bool = False
    """Norm weights in the file include the 1 that transformers adds."""
    sliding_period: int = 0
    """Every n-th layer has full attention, the others a sliding window. 0: all layers have full attention."""
    largest_depth: int = 0
    """Layers of the one model size whose queries are scaled by hidden size / heads, not by the head size."""


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {"hidden_act": "silu"}, rotary_interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu"}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu", "attention_bias": False}),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _GEMMA, norm_offset=True, sliding_period=2, largest_depth=46
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA, norm_offset=True, sliding_period=6, largest_depth=62
    ),
}
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"}


class Settings:
    """The metadata under the architecture's prefix. Tracks the keys not yet read, to refuse unknown ones."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._path = file.path
        self._prefix = prefix + "."
        start = len(self._prefix)
        self._left = {key[start:]: v for key, v in file.metadata.items() if key.startswith(self._prefix)}

    def get(self, key: str, default: Any = None) -> Any:
        """Take a setting. A per-layer list of equal values counts as that value."""
        value = self._left.pop(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Take a positive number. Rounds float32: 9.999999747378752e-06 becomes 1e-05."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(key, value)
        return float(f"{value:.7g}")

    def refusal(self, key: str, value: object) -> ModelError:
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(
            f"{self._path}: {self._prefix}{key} {shown}, which Skim cannot convert; "
            "use a safetensors directory of this model"
        )

    def refuse_unread(self) -> None:
        for key, value in self._left.items():
            if key not in _HARMLESS and value and value != "none":
                raise self.refusal(key, value)


def build_config(file: GGUFFile, arch: Architecture, settings: Settings) -> dict[str, Any]:
    """Build the model's config.json, without special token ids."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(
            f"{file.path} has no tensor 'token_embd.weight'; give the GGUF file of a whole language model"
        )
    hidden, heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := settings.count(key, head_dim)) != head_dim:
            raise settings.refusal(key, value)
    layers, context = settings.count("block_count"), settings.count("context_length")
    if layers > len(file.tensors):
        raise file.broken(f"it claims {layers} layers but has {len(file.tensors)} tensors")
    config = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "dtype": "float32",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, settings, head_dim),
    } | arch.extra
    window = settings.get("attention.sliding_window")
    if arch.sliding_period:
        config |= _sliding(arch, settings, config, window)
    elif arch.model_type == "llama":
        config |= _llama_flavour(file, window)
        window = config.get("sliding_window", window)
    if window and window < context and "sliding_window" not in config:
        raise settings.refusal("attention.sliding_window", window)
    return config


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a config file in transformers' format."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _llama_flavour(file: GGUFFile, window: int | None) -> dict[str, Any]:
    """Tell Mistral from Llama: GGUF calls both llama. Only the sliding window and the biases differ."""
    if "mistral" in str(file.metadata.get("general.name", "")).lower():
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window or None,
        }
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def _sliding(
    arch: Architecture, settings: Settings, config: dict[str, Any], window: int | None
) -> dict[str, Any]:
    """Gemma's extra settings: sliding layers, softcaps, the query scale, two rotary bases."""
    if not window:
        raise settings.refusal("attention.sliding_window", window)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    period = settings.count("attention.sliding_window_pattern", arch.sliding_period)
    scale = (
        head_dim if layers != arch.largest_depth else config["hidden_size"] // config["num_attention_heads"]
    )
    two_caps = arch.model_type == "gemma2"
    extra = {
        "sliding_window": window,
        "layer_types": [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
        ],
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": settings.get("attn_logit_softcapping", 50.0 if two_caps else None),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0 if two_caps else None),
    }
    if not two_caps:
        local = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base_swa", 10_000.0)}
        extra["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return extra


def _rope(file: GGUFFile, settings: Settings, head_dim: int) -> dict[str, Any]:
    theta = settings.real("rope.freq_base", 10_000.0)
    linear = settings.get("rope.scale_linear")
    kind = settings.get("rope.scaling.type", "linear" if linear and linear != 1 else "none")
    factor = settings.real("rope.scaling.factor", linear or 1.0)
    original = settings.get("rope.scaling.original_context_length")
    rope = {"rope_type": "default", "rope_theta": theta}
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise settings.refusal("rope.scaling.type", f"{kind} beside the tensor rope_freqs.weight")
        return rope | _llama3_rope(file, theta, head_dim)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and isinstance(original, int):
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": settings.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind != "none":
        raise settings.refusal("rope.scaling.type", f"{kind} (factor {factor}, original context {original})")
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3 scaling. The file has only the resulting divisors: accept them if the rule reproduces them."""
    found = [float(value) for value in file.tensor("rope_freqs.weight")]
    factor, low, high, original = max(found), 1.0, 4.0, 8192
    expected = []
    for i in range(head_dim // 2):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - blend) / factor + blend))
    close = len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=False)
    )
    if not close:
        raise ModelError(
            f"{file.path}: the tensor 'rope_freqs.weight' does not follow Llama 3's scaling rule, which "
            "Skim cannot convert; use a safetensors directory of this model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
