"""Probe a model's attention layers with one tiny forward.

Every family's config spells head sizes and sliding windows differently, so they are not read from there: a
probe stands in for the step and records the calls of the layers. The same forward detects models that keep
state outside the KV pool; they are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from skim.attention import hook
from skim.attention.step import AttentionCall
from skim.errors import ModelError, UnsupportedModelError, first_line
from skim.memory.store import LayerShape

TOKENS = (5, 9, 5)  # two equal tokens with another between


class ShapeProbe:
    """Stands in for a step: records the shape of each layer's keys and values. Attention returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        if layer in self.layers:
            raise UnsupportedModelError(f"unsupported architecture: layer {layer} attends more than once")
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], call.window)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@torch.inference_mode()
def probe_layers(module: Any, name: str) -> tuple[LayerShape, ...]:
    """Return the shape of each layer's keys and values. Refuse models that Skim would serve wrongly."""
    probe = ShapeProbe()
    text_config = module.config.get_text_config()
    unsupported = f"{name}: unsupported architecture {module.config.model_type!r}:"
    tokens = torch.tensor([TOKENS], device=module.device) % text_config.vocab_size
    windows: set[int] = set()
    recording = hook.mask_windows.set(windows)
    try:
        module.set_attn_implementation(hook.PROBE)
        # All at one position: when attention returns zeros, equal tokens must have equal logits.
        logits = module(
            input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False, skim_step=probe
        ).logits[0]
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(f"{unsupported} {first_line(error)}") from error
    finally:
        hook.mask_windows.reset(recording)
        module.set_attn_implementation(hook.NAME)

    count = int(text_config.num_hidden_layers)
    if sorted(probe.layers) != list(range(count)):
        raise UnsupportedModelError(
            f"{unsupported} {len(probe.layers)} of its {count} layers are attention layers that Skim can "
            "serve; recurrent and hybrid models are not supported"
        )
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{name}: its logits are not finite in {logits.dtype}; its weights are damaged, or too large for "
            "float16: use another copy, or another dtype"
        )
    rounding = min(32 * torch.finfo(logits.dtype).eps, 0.05) * float(logits.abs().max())
    if not torch.allclose(logits[0], logits[2], rtol=0.0, atol=rounding):
        raise UnsupportedModelError(f"{unsupported} it remembers earlier tokens outside its attention layers")
    passed = {shape.window for shape in probe.layers.values()}
    ignored = {window for window in windows - passed if window < text_config.max_position_embeddings}
    if ignored:
        raise UnsupportedModelError(
            f"{unsupported} its sliding window of {min(ignored)} tokens is not passed to its attention"
        )
    return tuple(probe.layers[layer] for layer in range(count))


def refuse_batch_dependent_rope(text_config: Any, name: str) -> None:
    """Refuse rotary embeddings whose frequencies depend on the largest position in the batch.

    A request's keys would depend on its neighbours, and a shared prefix could mix two sets of frequencies.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in (entry.get("rope_type") for entry in kinds):
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{name}: unsupported architecture: its rotary embedding of type {kind!r} depends on the "
                "other requests in the batch"
            )
