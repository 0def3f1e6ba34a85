"""The budget of a request: the most tokens to keep, and the part of it that is for scores."""

from __future__ import annotations

from collections.abc import Iterable

from skim.config import AUTO_MASS, AUTO_RATIO, PrefillConfig
from skim.prefill.select import Budget

SCORED_BESIDE_PINNED = 512
"""Tokens of a budget that pinned tokens never take, if they are no more than half of it."""


def budget_of(config: PrefillConfig) -> Budget:
    """The most to keep of a prompt."""
    if config.keep_tokens is not None:
        return Budget(tokens=config.keep_tokens)
    if config.keep_mass is not None:
        return Budget(mass=config.keep_mass)
    if config.keep_ratio is not None:
        return Budget(ratio=config.keep_ratio)
    return Budget(ratio=AUTO_RATIO, mass=AUTO_MASS)


def beside_pinned(config: PrefillConfig, count: int, block_size: int, question: Iterable[range]) -> int:
    """Tokens of the budget that are kept for scores, however many of the prompt's `count` are pinned.

    A transcript of an agent pins a block or two for every message, which may fill a budget. Half of
    it, or `SCORED_BESIDE_PINNED` if that is less, is kept for scores nevertheless, to the nearest block. The
    question and both ends of the prompt come before that: a long question does not exceed the budget.
    """
    if config.keep_mass is not None:
        return 0
    allowed = budget_of(config).allowed(count)
    ends = range(min(config.head_tokens, count)), range(max(0, count - config.tail_tokens), count)
    blocks = {
        block
        for run in (*question, *ends)
        for block in range(run.start // block_size, -(-run.stop // block_size))
    }
    half = min(allowed // 2, SCORED_BESIDE_PINNED, allowed - len(blocks) * block_size)
    return max(0, round(half / block_size) * block_size)
