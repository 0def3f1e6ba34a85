"""Which tokens may be drawn, and the draw.

Probabilities become whole-number weights before they are summed. Whole numbers add up the same in any order,
so a parallel scan on a GPU gives the same sums as a loop on a CPU, sums never step backwards, and a token of
weight zero can never be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_SCALE = 2.0**50
"""The weight of probability 1: sums stay exact in float64, and what rounds to zero is below 1e-15."""

_NARROW = 1024


def rank(logits: Tensor, width: int) -> Tensor:
    """The ids of the `width` largest logits of each row, best first, the lower id first among equals.

    `topk` promises no order among equals. A 64-bit key of (value, id) has no equals.
    """
    vocab = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0: they must compare equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, in the order of the floats
    reverse_ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | reverse_ids  # [rows, vocab]
    if width * 4 < vocab:
        best = keys.topk(width, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values[:, :width]
    return (vocab - 1) - (best & 0xFFFFFFFF)  # [rows, width]


def weigh(logits: Tensor) -> Tensor:
    """Softmax as whole numbers that sum to about `WEIGHT_SCALE`; a row with a NaN in it weighs nothing."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32).nan_to_num_(nan=0.0)
    return probs.mul_(WEIGHT_SCALE).long()


def scale(logits: Tensor, peak: Tensor, temperature: Tensor) -> None:
    """In place: logits less their row's `peak`, over the temperature. In this order nothing overflows."""
    logits.sub_(peak[:, None]).div_(temperature[:, None])


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> None:
    """In place, on scaled logits: drop tokens less than min_p times as likely as the likeliest."""
    logits.masked_fill_(logits < log_min_p[:, None], -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor, top_p: Tensor, widest: int) -> None:
    """In place: keep exactly `top_k` tokens a row, and of those the nucleus of mass `top_p`.

    `widest` is the largest of `top_k`, known to the caller without asking the device. The mass is measured
    among the `top_k` kept.
    """
    ids = rank(logits, widest)  # [rows, widest]
    values = logits.gather(1, ids)
    beyond = torch.arange(widest, device=logits.device) >= top_k[:, None]
    values.masked_fill_(beyond, -torch.inf)
    weights = weigh(values)
    values.masked_fill_(~_nucleus(weights, top_p[:, None] * weights.sum(dim=-1, keepdim=True)), -torch.inf)
    logits.fill_(-torch.inf).scatter_(1, ids, values)


def keep_top_p(logits: Tensor, top_p: Tensor) -> None:
    """In place: keep the shortest run of likeliest tokens, at least one, whose mass reaches `top_p`.

    On the CPU, where a full sort is dear and asking is free, the best `_NARROW` tokens are tried first; the
    sums are exact, so the answer is the same.
    """
    all_weights = weigh(logits)  # [rows, vocab]
    wanted = top_p[:, None] * all_weights.sum(dim=-1, keepdim=True)  # [rows, 1] float64
    vocab = logits.shape[-1]
    narrow = logits.device.type == "cpu" and vocab > _NARROW * 4
    ids = rank(logits, _NARROW if narrow else vocab)
    weights = all_weights.gather(1, ids)
    if narrow and bool((weights.sum(dim=-1, keepdim=True) < wanted).any()):
        ids = rank(logits, vocab)
        weights = all_weights.gather(1, ids)
    values = logits.gather(1, ids).masked_fill_(~_nucleus(weights, wanted), -torch.inf)
    logits.fill_(-torch.inf).scatter_(1, ids, values)


def _nucleus(weights: Tensor, wanted: Tensor) -> Tensor:
    """Of weights ranked best first: the first, and those before which less than `wanted` was gathered."""
    before = weights.cumsum(dim=-1) - weights
    keep = before < wanted
    keep[:, 0] = True
    return keep


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token id a row: the inverse of the cumulative distribution, in vocabulary order, at `uniform` in
    [0, 1).

    The target is at most one below the total, so the token found always has weight. A row that weighs nothing
    gives token 0; the caller knows such rows by their peak.
    """
    sums = weigh(logits).cumsum(dim=-1)  # [rows, vocab]
    total = sums[:, -1:].contiguous()
    target = torch.minimum((uniform[:, None] * total).long(), total - 1)  # [rows, 1]
    found = torch.searchsorted(sums, target, right=True)  # the first whose sum exceeds the target
    return found.squeeze(1).clamp_(max=logits.shape[-1] - 1)
