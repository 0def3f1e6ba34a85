"""The filters min_p, top_k and top_p, and the random draw.

Probabilities become integer weights before they are summed. Integer sums do not depend on the order, so a
parallel scan on a GPU equals a loop on a CPU, cumulative sums never decrease, and a token of weight zero can
never be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_SCALE = 2.0**50
"""The weight of probability 1. Sums stay exact in float64; only probabilities below 1e-15 round to zero."""

_CANDIDATES = 1024  # tokens that top_p tries on the CPU before it sorts the vocabulary


def rank(logits: Tensor, width: int) -> Tensor:
    """The ids of each row's `width` largest logits, best first; ties go to the lower id.

    `topk` promises no order among ties, so it gets 64-bit keys of (value, id), which have none.
    """
    vocab = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0: they must compare equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the same order as the floats
    reverse_ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | reverse_ids  # [rows, vocab]
    if width * 4 < vocab:
        best = keys.topk(width, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values[:, :width]
    return (vocab - 1) - (best & 0xFFFFFFFF)  # [rows, width]


def weigh(logits: Tensor) -> Tensor:
    """Softmax as integers that sum to about `WEIGHT_SCALE`. A row with a NaN gets zero weights."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32).nan_to_num_(nan=0.0)
    return probs.mul_(WEIGHT_SCALE).long()


def scale(logits: Tensor, peak: Tensor, temperature: Tensor) -> None:
    """In place: subtract each row's `peak`, then divide by the temperature. This order cannot overflow."""
    logits.sub_(peak[:, None]).div_(temperature[:, None])


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> None:
    """In place, on scaled logits: drop tokens less than min_p times as likely as the most likely one."""
    logits.masked_fill_(logits < log_min_p[:, None], -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor, top_p: Tensor, widest: int) -> None:
    """In place: keep exactly `top_k` tokens per row, and of those the nucleus of mass `top_p`.

    The mass is a fraction of the kept tokens' total. The caller passes `widest`, the largest `top_k`, so that
    the host need not wait for the device.
    """
    ids = rank(logits, widest)  # [rows, widest]
    values = logits.gather(1, ids)
    beyond = torch.arange(widest, device=logits.device) >= top_k[:, None]
    values.masked_fill_(beyond, -torch.inf)
    weights = weigh(values)
    values.masked_fill_(~_nucleus(weights, top_p[:, None] * weights.sum(dim=-1, keepdim=True)), -torch.inf)
    logits.fill_(-torch.inf).scatter_(1, ids, values)


def keep_top_p(logits: Tensor, top_p: Tensor) -> None:
    """In place: keep the fewest most likely tokens, at least one, whose mass reaches `top_p`.

    On the CPU a full sort is expensive and reading a tensor is free, so the best `_CANDIDATES` tokens are
    tried first. Sums are exact, so the result is the same.
    """
    all_weights = weigh(logits)  # [rows, vocab]
    wanted = top_p[:, None] * all_weights.sum(dim=-1, keepdim=True)  # [rows, 1] float64
    vocab = logits.shape[-1]
    narrow = logits.device.type == "cpu" and vocab > _CANDIDATES * 4
    ids = rank(logits, _CANDIDATES if narrow else vocab)
    weights = all_weights.gather(1, ids)
    if narrow and bool((weights.sum(dim=-1, keepdim=True) < wanted).any()):
        ids = rank(logits, vocab)
        weights = all_weights.gather(1, ids)
    values = logits.gather(1, ids).masked_fill_(~_nucleus(weights, wanted), -torch.inf)
    logits.fill_(-torch.inf).scatter_(1, ids, values)


def _nucleus(weights: Tensor, wanted: Tensor) -> Tensor:
    """Mask of the nucleus in weights ranked best first: the fewest, at least one, that sum to `wanted`."""
    before = weights.cumsum(dim=-1) - weights
    keep = before < wanted
    keep[:, 0] = True
    return keep


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token id per row by inverting the cumulative distribution at `uniform`, in [0, 1).

    The target is at most the total minus one, so the drawn token always has weight. A row without any weight
    gives token 0; the caller recognises such rows by their peak.
    """
    sums = weigh(logits).cumsum(dim=-1)  # [rows, vocab]
    total = sums[:, -1:].contiguous()
    target = torch.minimum((uniform[:, None] * total).long(), total - 1)  # [rows, 1]
    found = torch.searchsorted(sums, target, right=True)  # the first sum above the target
    return found.squeeze(1).clamp_(max=logits.shape[-1] - 1)
