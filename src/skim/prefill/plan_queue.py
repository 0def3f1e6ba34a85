"""The queue of prompts to plan. One slice runs between two steps, so decode rows never wait for a plan.

Plans take turns: the shortest prompt first, and a quarter of the time to the oldest. So a short prompt waits
for about a slice of a long one, and no plan ends later than after four times the work that was there before
it, its own included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

import torch

from skim.errors import SkimError
from skim.prefill.planner import Planner
from skim.prefill.request import Request
from skim.registry import scorers

Finish = Callable[[Any, float], None]
"""Receives the result, and the time at which the work began."""

Fail = Callable[[SkimError], None]
Begin = Callable[[], None]
"""Called before the first slice."""

OLDEST_SHARE = 0.25  # of the time, while a shorter prompt is there


@dataclass
class Entry:
    """One piece of sliced work in the queue, and the callbacks for its result."""

    key: int
    tokens: int
    alone: bool  # True if its scorer's memory grows with the prompt: one such entry is in progress at a time
    work: Generator[None, None, Any]
    finish: Finish
    fail: Fail
    begin: Begin | None
    begun_at: float | None = None


def shortest_and_oldest(entries: Collection[Entry]) -> tuple[Entry, Entry]:
    """Of the entries that may run now, the one with the shortest prompt, and the oldest.

    `entries` are in order of arrival. One that must be alone waits while another such entry is in progress.
    """
    busy = any(one.alone and one.begun_at is not None for one in entries)
    able = [one for one in entries if one.begun_at is not None or not (one.alone and busy)]
    return min(able, key=lambda one: one.tokens), able[0]


class PlanQueue:
    """Plans prompts and ranks documents, in turns. `clock` returns seconds."""

    def __init__(self, planner: Planner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._planner = planner
        self._clock = clock
        self._entries: dict[int, Entry] = {}
        self._owed = 0.0  # seconds that the oldest entry should have had, beyond those that it had
        self._oldest: int | None = None  # its key: an ended entry's prompt and tensors must be free

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, key: int, request: Request, finish: Finish, fail: Fail, *, begin: Begin | None = None
    ) -> None:
        """Queue a prompt to plan. The key is that of a request, or another number of the same series."""
        work, tokens = self._planner.plan(request), len(request.prompt_token_ids)
        self.add_work(key, work, finish, fail, tokens=tokens, scorer=request.prefill.scorer, begin=begin)

    def add_work(
        self,
        key: int,
        work: Generator[None, None, Any],
        finish: Finish,
        fail: Fail,
        *,
        tokens: int,
        scorer: str | None = None,
        begin: Begin | None = None,
    ) -> None:
        """Queue work on `tokens` that uses this scorer; without one, it takes memory of its own.

        It may raise a `SkimError`, and no other exception. Either `finish` or `fail` is called once,
        unless the entry is dropped.
        """
        declared = scorers().get(scorer) if scorer is not None else None
        alone = scorer is None or (declared is not None and declared.grows)
        self._entries[key] = Entry(key, tokens, alone, work, finish, fail, begin)

    def drop(self, key: int) -> None:
        """Remove an entry from the queue, if it is there, and free its tensors."""
        if (entry := self._entries.pop(key, None)) is not None:
            entry.work.close()

    def fail_all(self, error: SkimError) -> None:
        """Empty the queue and fail every entry."""
        while self._entries:
            self._entries.popitem()[1].fail(error)

    def advance(self) -> bool:
        """Run one slice of one entry; False if the queue is empty."""
        if not self._entries:
            return False
        shortest, oldest = shortest_and_oldest(self._entries.values())
        if oldest.key != self._oldest or oldest is shortest:
            self._oldest, self._owed = oldest.key, 0.0
        entry = oldest if self._owed > 0 else shortest
        began = self._clock()
        if entry.begun_at is None:
            entry.begun_at = began
            if entry.begin is not None:
                entry.begin()
        self._planner.handed_over = False
        try:
            with torch.inference_mode():
                next(entry.work)
        except StopIteration as done:
            del self._entries[entry.key]
            entry.finish(done.value, entry.begun_at)
        except SkimError as error:
            del self._entries[entry.key]
            entry.fail(error)
        spent = self._clock() - began
        self._owed += -spent if entry is oldest else spent * OLDEST_SHARE / (1 - OLDEST_SHARE)
        return True
