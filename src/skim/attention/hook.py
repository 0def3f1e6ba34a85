"""The one place where transformers and Skim meet.

`register()` adds an attention function and a mask function under the name `skim`. A forward is then
`model(..., skim_step=step)`: every attention layer hands its new queries, keys and values to the step,
and no mask is ever built, because the step knows which keys each query may read.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from skim.attention.step import Attention, AttentionCall
from skim.errors import ModelError

NAME = "skim"
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
"""Keywords of transformers' call that do not change what is computed; any other one might."""


def register() -> None:
    """Make `attn_implementation="skim"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


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
    """What transformers calls in every attention layer; the result is [1, tokens, query_heads, value_dim]."""
    name = type(module).__name__
    if skim_step is None:
        raise ModelError(
            f"unsupported architecture: {name} was called without a step, or does not pass it on"
        )
    if attention_mask is not None:
        raise ModelError(f"unsupported architecture: {name} brings an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"unsupported architecture: {name} is not causal")
    unknown = sorted(key for key, value in others.items() if value is not None and key not in HARMLESS)
    if unknown:
        raise ModelError(f"unsupported architecture: {name} asks for {', '.join(unknown)} in its attention")
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = skim_step.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call
    )
    return out[None], None


mask_windows: ContextVar[set[int] | None] = ContextVar("mask_windows", default=None)
"""Where the windows of the masks a forward asks for are written down, if anybody wants to know."""


def mask(
    *_: Any, config: Any = None, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any
) -> None:
    """Visibility is decided by positions in the step; a mask that means more than that is refused."""
    windows = mask_windows.get()
    if windows is not None and local_size:
        windows.add(local_size)
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise ModelError("unsupported architecture: its attention mask is more than causal")
    if getattr(config, "attention_chunk_size", None):
        raise ModelError("unsupported architecture: chunked local attention")
