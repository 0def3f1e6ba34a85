"""The contract of a scorer: a task in, one score per prompt block out.

A prompt block is a run of `block_size` prompt tokens that is kept or skipped whole. A scorer may raise: the
request is then prefilled densely, and the failure is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from skim.attention.blocksparse.policy import Policy
from skim.errors import SkimError
from skim.prefill.plan import DenseReason

if TYPE_CHECKING:  # `skim --help` imports this module and must not import torch
    from skim.memory.store import LayerShape


SLICE_SECONDS = 0.06  # of a GPU, between two yields, without a target for the time of steps


class ScoringError(SkimError):
    """A scorer cannot score this prompt. The request is then prefilled densely, and the failure counted."""

    def __init__(self, message: str, reason: DenseReason = DenseReason.SCORER_FAILED) -> None:
        super().__init__(message)
        self.reason = reason
        """The label in the metrics."""


class ScoringModel(Protocol):
    """The parts of a loaded model that a scorer may use."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...  # its directory, which may hold a calibration
    @property
    def module(self) -> Any: ...  # the transformers module
    @property
    def tokenizer(self) -> Any: ...
    @property
    def layers(self) -> Sequence[LayerShape]: ...


@dataclass(frozen=True)
class ScoringTask:
    """A prompt to score."""

    tokens: tuple[int, ...]  # the whole prompt
    question: tuple[range, ...]  # the prompt tokens of the question: ordered, disjoint, maybe none
    block_size: int  # tokens in a prompt block; the last block may be shorter
    candidates: tuple[int, ...] | None = None  # the blocks to score; None for all
    policy: Policy | None = None  # block-sparse attention of a full pass; None for dense
    scoring_budget: float = 1.0  # most of the time that skimming saves, for scoring; 1 for no limit
    hops: int = 1  # looks at the prompt: after the first, links in the best passages are followed
    slice_seconds: float = SLICE_SECONDS  # of a GPU, between two yields
    hand_over: Callable[[], None] = lambda: None
    """Called before a yield that leaves work to the device or to another thread, or waits for it."""
    on_second_look: Callable[[int], None] = lambda blocks: None
    """Called with the number of blocks that a scorer read a second time."""

    @property
    def blocks(self) -> int:
        """Number of blocks of the prompt."""
        return -(-len(self.tokens) // self.block_size)

    @cached_property
    def ids(self) -> np.ndarray:
        """The tokens as an array. Cached: making it takes milliseconds at 128K tokens."""
        return np.fromiter(self.tokens, dtype=np.int64, count=len(self.tokens))

    @cached_property
    def question_runs(self) -> list[np.ndarray]:
        """The question's tokens, place by place."""
        return [self.ids[run.start : run.stop] for run in self.question]

    @cached_property
    def question_ids(self) -> np.ndarray:
        """The question's tokens, its places joined in order."""
        return np.concatenate([self.ids[:0], *self.question_runs])

    @cached_property
    def is_question(self) -> np.ndarray:
        """True for each prompt token of the question."""
        found = np.zeros(len(self.tokens), dtype=bool)
        for run in self.question:
            found[run.start : run.stop] = True
        return found

    @property
    def wanted(self) -> np.ndarray:
        """The blocks to score, ascending, each once."""
        if self.candidates is None:
            return np.arange(self.blocks)
        return np.unique(np.array(self.candidates, dtype=np.int64))

    def with_ids(self, ids: np.ndarray) -> ScoringTask:
        """The same task, which has this array of its tokens."""
        vars(self)["ids"] = ids
        return self

    def scheduled(self, slice_seconds: float, hand_over: Callable[[], None]) -> ScoringTask:
        """The same task in slices of this length."""
        return replace(self, slice_seconds=slice_seconds, hand_over=hand_over).with_ids(self.ids)

    def only(self, candidates: Iterable[int]) -> ScoringTask:
        """The same task with other candidates."""
        task = replace(self, candidates=tuple(candidates))
        vars(task).update(ids=self.ids, is_question=self.is_question)
        return task

    @cached_property
    def context_counts(self) -> np.ndarray:
        """Number of tokens in each block, without the question's. [blocks]"""
        found: np.ndarray = np.full(self.blocks, self.block_size)
        found[-1:] = len(self.tokens) - (self.blocks - 1) * self.block_size
        asked = np.concatenate([np.arange(0), *(np.arange(run.start, run.stop) for run in self.question)])
        found -= np.bincount(asked // self.block_size, minlength=self.blocks)
        return found

    @cached_property
    def places(self) -> np.ndarray:
        """Indices of the tokens in the blocks to score, ascending."""
        if self.candidates is None:
            return np.arange(len(self.tokens))
        start = self.wanted * self.block_size
        found = (start[:, None] + np.arange(self.block_size)).reshape(-1)
        return found[found < len(self.tokens)]

    @cached_property
    def context_places(self) -> np.ndarray:
        """The same without the question's tokens."""
        return np.extract(~self.is_question[self.places], self.places)

    @cached_property
    def context_blocks(self) -> np.ndarray:
        """The blocks to score that have other tokens than the question's, ascending."""
        wanted = self.wanted
        return np.extract(self.context_counts[wanted] > 0, wanted)


class Scorer(Protocol):
    """Scores the blocks of a prompt, in slices.

    `score` yields between slices of its work, so that the engine can run decode steps in between, and while a
    GPU computes. It returns
    one finite number of at least 0 for each block; blocks that are not candidates get 0.0. Only the order
    of scores and their shares of the sum matter: scales differ between scorers. A scorer does not know its
    name, which is that of its file.
    """

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]: ...


T = TypeVar("T")


def handing_over(work: Generator[None, None, T], task: ScoringTask) -> Generator[None, None, T]:
    """Run sliced work that hands over to the device, or to another thread, with every slice."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        task.hand_over()
        yield


def run_to_completion(work: Generator[Any, None, T]) -> T:
    """Run a sliced generator to completion and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def together(works: Sequence[Generator[None, None, Any]]) -> Generator[None, None, list[Any]]:
    """Run sliced generators in turn; return their results. The host works on one while a GPU computes."""
    found: dict[int, Any] = {}
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
