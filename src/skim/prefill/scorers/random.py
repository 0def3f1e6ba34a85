"""Random scores: the control in every evaluation of a scorer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator

from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.scorer import Scorer, ScoringTask
from skim.registry import Declaration

SCORER = Declaration(help="random numbers, as a control", order=1000)


_SLICE = 1 << 20  # tokens between two yields


def make(models: Models) -> Scorer:
    return RandomScorer()


class RandomScorer:
    """Uniform scores in [0, 1), a function of the seed and the prompt.

    They depend on the prompt so that the control does not keep the same places of every prompt.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        prompt = hashlib.sha256()
        for first in range(0, len(task.ids), _SLICE):
            prompt.update(task.ids[first : first + _SLICE].tobytes())
            yield
        draw = random.Random(f"{self._seed}:{prompt.hexdigest()}")
        scores = [draw.random() for _ in range(task.blocks)]
        if task.candidates is not None:
            candidates = set(task.candidates)
            scores = [score if block in candidates else 0.0 for block, score in enumerate(scores)]
        yield
        return scores
