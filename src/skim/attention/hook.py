"""The interface between transformers and Skim.

`register()` adds an attention function under the name `skim`. A forward is then `model(..., skim_step=step)`:
every attention layer passes its new queries, keys and values to the step. No mask is built, because the step
knows which keys each query may read. The name `skim-probe` adds a mask function that refuses masks which mean
more than causal or sliding-window attention; it runs once, when a model is loaded.

In a layer compiled by torch, the same call is an opaque operator. It takes the step from `note_step`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import ReferenceType, ref

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from skim.attention.step import Attention, AttentionCall
from skim.errors import UnsupportedModelError

FEW_TOKENS = 32  # layers are compiled separately for at most so many
NAME = "skim"
PROBE = "skim-probe"
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of transformers' call that do not change the result; any other keyword might."""


def register() -> None:
    """Register `attn_implementation="skim"` with transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(PROBE, attention)
    AttentionMaskInterface.register(PROBE, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, query_heads, tokens, key_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, key_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    skim_step: Attention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer. [1, tokens, query_heads, value_dim]"""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    new = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if torch.compiler.is_compiling():
        _compile_apart(query.shape[2])
        return attend_opaque(*new, module.skim_layer, scale, sliding_window, softcap, s_aux)[None], None
    name = type(module).__name__
    if skim_step is None:
        raise UnsupportedModelError(
            f"unsupported architecture: {name} was called without a step, or does not pass it on"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(f"unsupported architecture: {name} builds its own attention mask")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"unsupported architecture: {name} is not causal")
    unknown = sorted(key for key, value in others.items() if value is not None and key not in HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"unsupported architecture: {name} passes {', '.join(unknown)} to its attention"
        )
    call = AttentionCall(scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return skim_step.attend(layer, *new, call)[None], None


def _compile_apart(tokens: int) -> None:
    """Compile a layer separately for few tokens: the comparison becomes a guard of the compiled code."""
    if tokens <= FEW_TOKENS:
        return


_running: ContextVar[ReferenceType[Attention]] = ContextVar("skim_step")


def note_step(kwargs: dict[str, Any]) -> None:
    """Make a forward's step known to compiled layers; call it before the forward, with its keywords."""
    step = kwargs.get("skim_step")
    if step is not None:  # None if the model runs with another attention function
        _running.set(ref(step))  # weak: a strong reference would outlive the pool


@torch.library.custom_op("skim::attend", mutates_args=())
def attend_opaque(
    query: torch.Tensor,  # [tokens, query_heads, key_dim]
    key: torch.Tensor,  # [tokens, kv_heads, key_dim]
    value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    layer: torch.Tensor,  # on the host; a plain int would be a constant, and every layer compiled separately
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    call = AttentionCall(scale, window, softcap, sinks)
    step = _running.get()()
    assert step is not None
    return step.attend(int(layer), query, key, value, call).contiguous()


@attend_opaque.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])  # type: ignore[no-any-return]


mask_windows: ContextVar[set[int] | None] = ContextVar("mask_windows", default=None)
"""Collects the sliding windows of the masks that a forward requests; None if not collected."""


def mask(
    *_: Any, config: Any = None, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any
) -> None:
    """Build no mask: the step decides visibility by position. Refuse masks that mean more than that."""
    windows = mask_windows.get()
    if windows is not None and local_size:
        windows.add(local_size)
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise UnsupportedModelError("unsupported architecture: its attention mask is more than causal")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError("unsupported architecture: chunked local attention")
