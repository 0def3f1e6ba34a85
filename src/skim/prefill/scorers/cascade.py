"""Two scorers in sequence: a cheap one narrows the prompt, a better one ranks the rest.

Shared words find the neighbourhood of an answer at almost no cost and rarely miss it. A model then finds
which of these blocks has the answer, and reads only a part of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scorers import attention, lexical
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.scorer import Scorer, ScoringTask
from skim.registry import Declaration

FINE_TOKENS = 8192
FINE_SHARE = 0.4
BLEND = 0.25
_GOLDEN = (math.sqrt(5) - 1) / 2

SCORER = Declaration(
    help="shared words and embeddings, then attention over the best of them",
    model="drafter",
    order=10,
)


def make(models: Models) -> Scorer:
    cheap = SumScorer(lexical.make(models), EmbeddingScorer(models.target.module))
    return CascadeScorer(cheap, attention.make(models))


class CascadeScorer:
    """`cheap` scores all blocks, then `fine` the best of them: `fine_tokens` tokens, or `fine_share` of the
    prompt if that is less.

    Blocks that the fine scorer read score above all others. They are ordered by their share of the fine
    scores plus `blend` times their share of the cheap ones (0.0: by the fine scorer alone). The others keep
    the cheap scorer's order.
    """

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
        """The blocks to read, ascending. Blocks of equal scores are spread over the prompt."""
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
    """Adds each scorer's shares of its sum: the cascade's cheap half."""

    def __init__(self, *scorers: Scorer) -> None:
        self._scorers = scorers

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        total = [0.0] * task.blocks
        for scores in (yield from _together([scorer.score(task) for scorer in self._scorers])):
            total = [a + b for a, b in zip(total, _shares(scores), strict=True)]
        return total


def _together(
    works: Sequence[Generator[None, None, list[float]]],
) -> Generator[None, None, list[list[float]]]:
    """Run sliced generators in turns and return their results: a GPU computes for one while the host compares
    words for another."""
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
    finally:  # if one fails, the others free their tensors
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
