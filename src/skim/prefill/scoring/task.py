"""Scorers say how much each prefill block matters to the question; one file each.

To add one: a class with a `name` and a `score` that follows `Scorer`, in a file of its own. A scorer may
raise: the request is then prefilled densely, and the failure is counted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np

from skim.attention.blocksparse.policy import Policy


@dataclass(frozen=True)
class ScoringTask:
    """What a scorer is asked."""

    tokens: tuple[int, ...]  # the whole prompt
    question: range  # the prompt tokens that ask
    block_size: int  # tokens in a prefill block; the last one may be shorter
    candidates: tuple[int, ...] | None = None  # the blocks to score; None for all
    policy: Policy | None = None  # which blocks of keys a full pass reads; None for all

    @property
    def blocks(self) -> int:
        """Number of prefill blocks of the prompt."""
        return -(-len(self.tokens) // self.block_size)

    @cached_property
    def ids(self) -> np.ndarray:
        """The tokens as an array, which is made once: at 128K tokens that takes milliseconds."""
        return np.fromiter(self.tokens, dtype=np.int64, count=len(self.tokens))

    @property
    def wanted(self) -> np.ndarray:
        """The blocks to score, in order, each once."""
        if self.candidates is None:
            return np.arange(self.blocks)
        return np.unique(np.array(self.candidates, dtype=np.int64))

    def only(self, candidates: Iterable[int]) -> ScoringTask:
        """The same task for some blocks."""
        task = replace(self, candidates=tuple(candidates))
        vars(task)["ids"] = self.ids
        return task

    def context_tokens(self, block: int) -> int:
        """How many tokens of a block are not the question's."""
        start, end = block * self.block_size, min((block + 1) * self.block_size, len(self.tokens))
        return end - start - max(0, min(end, self.question.stop) - max(start, self.question.start))

    def places(self, *, question: bool) -> np.ndarray:
        """The tokens of the blocks to score, in order, with or without the question's."""
        start = self.wanted * self.block_size
        found = (start[:, None] + np.arange(self.block_size)).reshape(-1)
        found = found[found < len(self.tokens)]
        if question:
            return found
        return found[(found < self.question.start) | (found >= self.question.stop)]


T = TypeVar("T")


def outcome_of(work: Generator[None, None, T]) -> T:
    """What comes of work in slices, where nobody has anything to do in between."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


class Scorer(Protocol):
    """Scores the blocks of a prompt, in slices.

    `score` yields between slices of its work, so that the engine can run decode steps in between, and
    returns one finite number of at least 0 for each block; blocks that are not candidates get 0.0. Only
    the order of scores and their shares of the sum mean anything: scales differ between scorers.
    """

    name: str

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]: ...
