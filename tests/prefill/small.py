"""A small model with the parts that scorers use, and helpers that run scorers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from skim.models.probe import probe_layers
from skim.prefill.scoring.scorer import Scorer, ScoringTask
from tests import tiny


@dataclass(frozen=True)
class Model:
    """The parts of a model that scorers use."""

    module: Any
    name: str = "tiny"
    path: Path = Path("nowhere")

    @cached_property
    def tokenizer(self) -> Any:
        return tiny.tokenizer()

    @cached_property
    def layers(self) -> Any:
        return probe_layers(self.module, "tiny")


def decode(runs: Sequence[np.ndarray]) -> list[str]:
    """Tokens are bytes, and bytes are characters."""
    return [bytes(token for token in run.tolist() if token < 256).decode("latin-1") for run in runs]


def drive(scorer: Scorer, task: ScoringTask) -> list[float]:
    return finish(scorer.score(task))[0]


def finish(work: Generator[None, None, list[float]]) -> tuple[list[float], int]:
    """The scores, and the number of yields."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, slices
        slices += 1


def ordered(scores: Sequence[float]) -> list[int]:
    """Block indices, best score first, ties in order."""
    return sorted(range(len(scores)), key=lambda block: -scores[block])


class Fixed:
    """A scorer with fixed scores. Records its tasks."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = scores
        self.asked: list[ScoringTask] = []

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        self.asked.append(task)
        yield
        wanted = range(task.blocks) if task.candidates is None else task.candidates
        return [score if block in wanted else 0.0 for block, score in enumerate(self.scores)]
