"""The budget of a request: the most tokens to keep, and the least to keep for their scores."""

from __future__ import annotations

from collections.abc import Iterable

from skim.config import AUTO_MASS, AUTO_RATIO, PrefillConfig
from skim.prefill.select import Budget

SCORED_BESIDE_PINNED = 512
"""Tokens of a fixed budget that pinned tokens never take, if they are no more than half of it."""


def budget_of(config: PrefillConfig) -> Budget:
    """The most to keep of a prompt."""
    if config.keep_tokens is not None:
        return Budget(tokens=config.keep_tokens)
    if config.keep_mass is not None:
        return Budget(mass=config.keep_mass)
    if config.keep_ratio is not None:
        return Budget(ratio=config.keep_ratio)
    return Budget(ratio=AUTO_RATIO, mass=AUTO_MASS)


def least_scored(config: PrefillConfig, count: int, block_size: int, question: Iterable[range]) -> int:
    """The least number of tokens to keep for their scores, however many of the prompt's `count` are pinned.

    A transcript of an agent pins a block or two for every message, which may fill a fixed budget. Half of
    it, or `SCORED_BESIDE_PINNED` if that is less, is kept for scores nevertheless, to the nearest block. The
    question and both ends of the prompt come before that: a long question does not exceed the budget.
    """
    if config.keep_tokens is None and config.keep_ratio is None:
        return config.min_scored_tokens
    allowed = budget_of(config).allowed(count)
    ends = range(min(config.head_tokens, count)), range(max(0, count - config.tail_tokens), count)
    blocks = {
        block
        for run in (*question, *ends)
        for block in range(run.start // block_size, -(-run.stop // block_size))
    }
    half = min(allowed // 2, SCORED_BESIDE_PINNED, allowed - len(blocks) * block_size)
    return max(config.min_scored_tokens, round(half / block_size) * block_size)
