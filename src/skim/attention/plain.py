"""Attention written out: scores, mask, softmax. The twin every faster path is compared with.

Partial results carry the log of their softmax denominator, so that attention over pieces of the keys
can be merged into attention over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from skim.attention.step import AttentionCall


class Partial(NamedTuple):
    """Attention over some of the keys."""

    out: torch.Tensor  # [heads, queries, value_dim], zero where nothing was visible
    lse: torch.Tensor  # [heads, queries] float32, -inf where nothing was visible


def visible(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys each query may read: at its own or earlier positions, inside the window. [queries, keys]"""
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attend_plain(
    query: torch.Tensor,  # [heads, queries, key_dim]
    key: torch.Tensor,  # [kv_heads, keys, key_dim]
    value: torch.Tensor,  # [kv_heads, keys, value_dim]
    call: AttentionCall,
    mask: torch.Tensor | None = None,  # [queries, keys], True where visible
) -> Partial:
    """Attention over the given keys, sinks not included (see `merge`)."""
    heads, queries, _ = query.shape
    kv_heads = key.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads * queries, -1)
    scores = (
        torch.matmul(grouped, key.transpose(1, 2)).float() * call.scale
    )  # [kv_heads, group * queries, keys]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores.view(heads, queries, -1).masked_fill(~mask, float("-inf")).view(scores.shape)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(torch.float32).min))
    out = torch.matmul(weights.to(value.dtype), value)
    return Partial(out.reshape(heads, queries, -1), lse.reshape(heads, queries))


def merge(parts: Sequence[Partial], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over all pieces together. [heads, queries, value_dim]

    A sink is a key with a score and no value, so it only scales the result down.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0].out
    logs = [part.lse for part in parts]
    if sinks is not None:
        logs.append(sinks.float()[:, None].expand_as(parts[0].lse))
    total = torch.logsumexp(torch.stack(logs), dim=0).clamp_min(torch.finfo(torch.float32).min)
    out = torch.zeros_like(parts[0].out, dtype=torch.float32)
    for part in parts:
        out.addcmul_(part.out.float(), torch.exp(part.lse - total)[..., None])
    return out.to(parts[0].out.dtype)
