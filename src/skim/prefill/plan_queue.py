"""Plans in the making: a slice between two steps, so that rows which decode do not wait for a whole one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from skim.errors import SkimError
from skim.prefill.planner import Planned, Planner, SparseTask


@dataclass
class _Planning:
    """A plan in the making, and who is told of it."""

    work: Generator[None, None, Planned]
    finish: Callable[[Planned, float], None]
    fail: Callable[[SkimError], None]
    begun_at: float = 0.0


class PlanQueue:
    """Plans are made one after the other, in the order of arrival."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._waiting: dict[int, _Planning] = {}  # by request; plans that are for none have keys below zero
        self._keys = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        task: SparseTask,
        finish: Callable[[Planned, float], None],
        fail: Callable[[SkimError], None],
        request: int | None = None,
    ) -> None:
        """`finish` gets the plan, and when it was begun."""
        key = next(self._keys) if request is None else request
        self._waiting[key] = _Planning(self._planner.plan(task), finish, fail)

    def drop(self, request: int) -> None:
        """Nobody wants the request's plan any more, if it has one in the making."""
        self._waiting.pop(request, None)

    def end(self, error: SkimError) -> None:
        """No more plans are made; who waits for one is told why."""
        while self._waiting:
            self._waiting.popitem()[1].fail(error)

    def advance(self) -> bool:
        """One slice of the first plan; False if there is none."""
        key = next(iter(self._waiting), None)
        if key is None:
            return False
        planning = self._waiting[key]
        planning.begun_at = planning.begun_at or time.perf_counter()
        try:
            with torch.inference_mode():
                next(planning.work)
        except StopIteration as done:
            del self._waiting[key]
            planning.finish(done.value, planning.begun_at)
        except SkimError as error:
            del self._waiting[key]
            planning.fail(error)
        return True
