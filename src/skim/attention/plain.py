"""Attention with explicit scores, mask and softmax: the reference for every faster path.

Partial results carry the log of their softmax denominator, so that attention over pieces of the keys can be
merged into attention over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from skim.attention.step import AttentionCall


class Partial(NamedTuple):
    """Attention over one or more separate pieces of the keys."""

    out: torch.Tensor  # [pieces, heads, queries, value_dim], zero where nothing was visible
    lse: torch.Tensor  # [pieces, heads, queries] float32, -inf where nothing was visible


def visible(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """True for keys at the query's own or earlier positions, inside the sliding window. [queries, keys]"""
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
    """Attention over the given keys, without sinks (see `merge`)."""
    heads, queries, _ = query.shape
    kv_heads = key.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads * queries, -1) * call.scale  # else float16 overflows
    scores = torch.matmul(grouped, key.transpose(1, 2)).float()  # [kv_heads, group * queries, keys]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores.view(heads, queries, -1).masked_fill(~mask, float("-inf")).view(scores.shape)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(torch.float32).min))
    out = torch.matmul(weights.to(value.dtype), value)
    return Partial(out.reshape(1, heads, queries, -1), lse.reshape(1, heads, queries))


def merge(parts: Sequence[Partial], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over all pieces together. [heads, queries, value_dim]

    A sink is a key with a score and no value, so it only scales the result down.
    """
    logs = [part.lse for part in parts]
    if sinks is not None:
        logs.append(sinks.float()[None, :, None].expand_as(logs[0][:1]))
    elif len(parts) == 1 and parts[0].out.shape[0] == 1:
        return parts[0].out[0]
    weights = torch.softmax(torch.cat(logs), dim=0)  # every query sees at least itself
    outs = torch.cat([part.out for part in parts])
    return (outs * weights[: outs.shape[0], ..., None]).sum(dim=0).to(outs.dtype)
