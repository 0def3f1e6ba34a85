"""Two scorers, one after the other: a cheap one narrows, a better one ranks what is left.

Words find the neighbourhood of an answer at almost no cost, and seldom miss it altogether; which of the
blocks found is the answer is what a model sees. So the model reads a part of the prompt only.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scoring.task import Scorer, ScoringTask

FINE_TOKENS = 8192
FINE_SHARE = 0.4
BLEND = 0.25
_GOLDEN = (math.sqrt(5) - 1) / 2


class CascadeScorer:
    """`cheap` over everything, then `fine` over the best `fine_tokens` tokens, or `fine_share` of the prompt
    if that is less.

    Blocks that the fine scorer has read score above all others and are ordered by the sum of two shares:
    of the fine scores, and `blend` times of the cheap ones (0.0: by the fine scorer alone). The others keep
    the cheap scorer's order.
    """

    name = "cascade"

    def __init__(
        self,
        cheap: Scorer,
        fine: Scorer,
        *,
        fine_tokens: int = FINE_TOKENS,
        fine_share: float = FINE_SHARE,
        blend: float = BLEND,
    ) -> None:
        self._cheap = cheap
        self._fine = fine
        self._fine_tokens = fine_tokens
        self._fine_share = fine_share
        self._blend = blend

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        cheap = yield from self._cheap.score(task)
        chosen = self._narrow(task, cheap)
        fine = yield from self._fine.score(task.only(chosen))
        scores = [0.0] * task.blocks
        for block, a, b in zip(
            chosen,
            _shares([fine[block] for block in chosen]),
            _shares([cheap[b] for b in chosen]),
            strict=True,
        ):
            scores[block] = a + self._blend * b
        return _rest_below(scores, chosen, cheap)

    def _narrow(self, task: ScoringTask, cheap: Sequence[float]) -> list[int]:
        """The blocks to read, in order. Among equals, such as all without a shared word, spread evenly."""
        left = min(self._fine_tokens, math.ceil(self._fine_share * len(task.tokens)))
        blocks = task.wanted
        chosen: list[int] = []
        for block in blocks[np.lexsort((blocks * _GOLDEN % 1.0, -np.array(cheap)[blocks]))].tolist():
            size = task.context_tokens(block)
            if size == 0:
                continue
            left -= size
            if left < 0 and chosen:
                break
            chosen.append(block)
        return sorted(chosen)


class SumScorer:
    """Several scorers in one, for the cascade's cheap half: shares of their scores, added."""

    def __init__(self, *scorers: Scorer) -> None:
        self.name = "+".join(scorer.name for scorer in scorers)
        self._scorers = scorers

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        total = [0.0] * task.blocks
        for scores in (yield from _together([scorer.score(task) for scorer in self._scorers])):
            total = [a + b for a, b in zip(total, _shares(scores), strict=True)]
        return total


def _together(
    works: Sequence[Generator[None, None, list[float]]],
) -> Generator[None, None, list[list[float]]]:
    """What each of them gives. They take turns, so that a GPU computes for one while words are compared for
    the other."""
    found: dict[int, list[float]] = {}
    try:
        while len(found) < len(works):
            for turn, work in enumerate(works):
                if turn not in found:
                    try:
                        next(work)
                        yield
                    except StopIteration as end:
                        found[turn] = end.value
    finally:  # if one fails, the others need not keep what they have computed
        for work in works:
            work.close()
    return [found[turn] for turn in range(len(works))]


def _shares(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total if total > 0 else 0.0 for value in values]


def _rest_below(scores: list[float], ranked: Sequence[int], cheap: Sequence[float]) -> list[float]:
    """Ranked blocks above 0 and above all others, which keep the order of their cheap scores."""
    if not ranked:
        return list(cheap)
    if min(scores[block] for block in ranked) <= 0:
        for block in ranked:
            scores[block] += 1e-9
    ceiling = min(scores[block] for block in ranked) / 2
    rest = set(range(len(scores))) - set(ranked)
    top = max((cheap[block] for block in rest), default=0.0)
    for block in rest:
        scores[block] = ceiling * cheap[block] / top if top > 0 else 0.0
    return scores
