"""The queue of prompts to plan. One slice runs between two steps, so decode rows never wait for a plan."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from skim.errors import SkimError
from skim.prefill.planner import Planner
from skim.prefill.reading import Planned
from skim.prefill.request import Request

Finish = Callable[[Planned, float], None]
"""Receives the result, and the time at which planning began."""

Fail = Callable[[SkimError], None]
Begin = Callable[[], None]
"""Called before the first slice."""


@dataclass
class _Entry:
    """One prompt in the queue, and the callbacks for its result."""

    work: Generator[None, None, Planned]
    finish: Finish
    fail: Fail
    begin: Begin | None
    begun_at: float = 0.0


class PlanQueue:
    """Plans prompts one after the other, in order of arrival."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._entries: dict[int, _Entry] = {}  # by request id; negative for plans without a request
        self._unnamed = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        request: Request,
        finish: Finish,
        fail: Fail,
        *,
        begin: Begin | None = None,
        request_id: int | None = None,
    ) -> None:
        """Queue a prompt; either `finish` or `fail` is called once, unless the request is dropped."""
        key = next(self._unnamed) if request_id is None else request_id
        self._entries[key] = _Entry(self._planner.plan(request), finish, fail, begin)

    def drop(self, request_id: int) -> None:
        """Remove a request from the queue, if it is there."""
        self._entries.pop(request_id, None)

    def fail_all(self, error: SkimError) -> None:
        """Empty the queue and fail every entry."""
        while self._entries:
            self._entries.popitem()[1].fail(error)

    def advance(self) -> bool:
        """Run one slice of the first entry; False if the queue is empty."""
        key = next(iter(self._entries), None)
        if key is None:
            return False
        entry = self._entries[key]
        if not entry.begun_at:
            entry.begun_at = time.perf_counter()
            if entry.begin is not None:
                entry.begin()
        try:
            with torch.inference_mode():
                next(entry.work)
        except StopIteration as done:
            del self._entries[key]
            entry.finish(done.value, entry.begun_at)
        except SkimError as error:
            del self._entries[key]
            entry.fail(error)
        return True
