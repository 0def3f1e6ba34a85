"""Scorers say how much each prefill block matters to the question; one file each.

To add one: a class with a `name` and a `score` that follows `Scorer`, in a file of its own. A scorer may
raise: the request is then prefilled densely, and the failure is counted.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ScoringTask:
    """What a scorer is asked."""

    tokens: tuple[int, ...]  # the whole prompt
    question: range  # the prompt tokens that ask
    block_size: int  # tokens in a prefill block; the last one may be shorter
    candidates: tuple[int, ...] | None = None  # the blocks to score; None for all

    @property
    def blocks(self) -> int:
        """Number of prefill blocks of the prompt."""
        return -(-len(self.tokens) // self.block_size)


class Scorer(Protocol):
    """Scores the blocks of a prompt, in slices.

    `score` yields between slices of its work, so that the engine can run decode steps in between, and
    returns one finite number of at least 0 for each block; blocks that are not candidates get 0.0. Only
    the order of scores and their shares of the sum mean anything: scales differ between scorers.
    """

    name: str

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]: ...
