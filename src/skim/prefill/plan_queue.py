"""The queue of prompts to plan. One slice runs between two steps, so decode rows never wait for a plan.

Plans take turns: the shortest prompt first, and a quarter of the time to the oldest. So a short prompt waits
for about a slice of a long one, and no plan ends later than after four times the work that was there before
it, its own included.

A piece of work may need a model that is not on the device. It announces the model by yielding the word of its
scorer's declaration, `target` or `drafter`, and `none` when it needs it no longer. Whoever runs the queue
decides which announced work may go on.
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

Work = Generator[str | None, None, Any]
"""Runs in slices. Yields None, or a model that it needs for the following slices."""

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
    work: Work
    finish: Finish
    fail: Fail
    begin: Begin | None
    begun_at: float | None = None
    wants: str | None = None  # the model that it announced; None before that
    admitted: bool = False  # True once it ran with that model


def runnable(entries: Collection[Entry]) -> list[Entry]:
    """The entries that need not wait for another one to end: one that must be alone, while another such entry
    is in progress."""
    busy = any(one.alone and one.begun_at is not None for one in entries)
    return [one for one in entries if one.begun_at is not None or not (one.alone and busy)]


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
        work: Work,
        finish: Finish,
        fail: Fail,
        *,
        tokens: int,
        scorer: str | None = None,
        begin: Begin | None = None,
        wants: str | None = None,
    ) -> None:
        """Queue work on `tokens` that uses this scorer; without one, it takes memory of its own.

        Work that announces no model itself needs the one that `wants` names.
        It may raise a `SkimError`, and no other exception. Either `finish` or `fail` is called once,
        unless the entry is dropped.
        """
        declared = scorers().get(scorer) if scorer is not None else None
        alone = scorer is None or (declared is not None and declared.grows)
        self._entries[key] = Entry(key, tokens, alone, work, finish, fail, begin, wants=wants)

    def drop(self, key: int) -> None:
        """Remove an entry from the queue, if it is there, and free its tensors."""
        if (entry := self._entries.pop(key, None)) is not None:
            entry.work.close()

    def fail_all(self, error: SkimError) -> None:
        """Empty the queue and fail every entry."""
        while self._entries:
            self._entries.popitem()[1].fail(error)

    # -- models

    @property
    def undecided(self) -> bool:
        """True if an entry that could run now has not announced whether it needs a model."""
        return any(one.wants is None for one in runnable(self._entries.values()))

    def waiting_for(self, model: str) -> frozenset[int]:
        """Keys of the entries that need this model and could run if it were there."""
        return frozenset(one.key for one in runnable(self._entries.values()) if one.wants == model)

    def running(self, model: str) -> frozenset[int]:
        """Keys of the entries that have begun to use this model."""
        entries = list(self._entries.values())  # another thread may ask
        return frozenset(one.key for one in entries if one.admitted and one.wants == model)

    def refuse(self, keys: Collection[int], error: SkimError) -> None:
        """These entries do not get their model. A plan becomes dense, other work fails with the error."""
        for key in keys:
            entry = self._entries[key]
            entry.wants = "none"
            self._run(entry, lambda entry=entry: entry.work.throw(error))  # type: ignore[misc]

    # -- slices

    def advance(self, may_run: Callable[[Entry], bool] = lambda _: True) -> bool:
        """Run one slice of one entry that may run; False if there is none."""
        able = [one for one in runnable(self._entries.values()) if may_run(one)]
        if not able:
            return False
        shortest, oldest = min(able, key=lambda one: one.tokens), able[0]  # in order of arrival
        if oldest.key != self._oldest or oldest is shortest:
            self._oldest, self._owed = oldest.key, 0.0
        entry = oldest if self._owed > 0 else shortest
        began = self._clock()
        if entry.begun_at is None:
            entry.begun_at = began
            if entry.begin is not None:
                entry.begin()
        entry.admitted = entry.wants is not None
        self._planner.handed_over = False
        self._run(entry, lambda: next(entry.work))
        spent = self._clock() - began
        self._owed += -spent if entry is oldest else spent * OLDEST_SHARE / (1 - OLDEST_SHARE)
        return True

    def _run(self, entry: Entry, step: Callable[[], str | None]) -> None:
        """Run a slice, and note the model that it announces or hand over its result."""
        try:
            with torch.inference_mode():
                announced = step()
        except StopIteration as done:
            del self._entries[entry.key]
            entry.finish(done.value, self._clock() if entry.begun_at is None else entry.begun_at)
        except SkimError as error:
            del self._entries[entry.key]
            entry.fail(error)
        else:
            if announced is not None:
                entry.wants, entry.admitted = announced, False
