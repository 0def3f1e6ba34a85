"""Threads for slow work on texts: parsing, templates, tokenizers. Small texts never wait for large ones.

Work is sized by the body of its request, which bounds all text in it. Each thread has a largest size. A text
that fits a smaller thread also fits the larger ones, so it only waits for texts of about its own size.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skim.server.errors import ApiError

T = TypeVar("T")

SMALL = 64 * 1024
LANES: tuple[int | None, ...] = (SMALL, 1024 * 1024, None)
"""The largest work of each thread, in bytes; None takes all."""
BYTES_PER_SECOND = 1024 * 1024
"""Smaller work overtakes work of this size if it arrives within a second; of twice the size, within two."""


@dataclass(eq=False)
class Job:
    """Work in the queue."""

    work: Callable[[], Any]
    size: int
    arrived: float
    result: Future[Any] = field(default_factory=Future)

    @property
    def turn(self) -> float:
        """Its place in the queue, the lowest first. It never changes, so nothing waits for ever."""
        return self.arrived + self.size / BYTES_PER_SECOND


def choose(waiting: Sequence[Job], largest: int | None) -> Job | None:
    """The next job for a thread; None if no waiting job fits it."""
    fitting = (job for job in waiting if largest is None or job.size <= largest)
    return min(fitting, key=lambda job: job.turn, default=None)


class TextQueue:
    """Runs jobs in a thread per lane, the smallest first, with aging. Refuses more than `limit` bytes."""

    def __init__(self, limit: int, lanes: Sequence[int | None] = LANES) -> None:
        self._limit = limit
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._closed = False
        for number, largest in enumerate(lanes):
            name = f"skim-text-{number}"
            threading.Thread(target=self._serve, args=(largest,), name=name, daemon=True).start()

    async def run(self, work: Callable[[], T], size: int, *, admitted: bool = False) -> T:
        """The result of `work`. If the caller is cancelled before its turn, it does not run.

        Work for a request that was `admitted` before is never refused.
        """
        job = Job(work, size, time.monotonic())
        with self._changed:
            if not admitted:
                self._admit(size)
            self._waiting.append(job)
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(job.result)  # type: ignore[no-any-return]
        finally:
            with self._changed:
                if job in self._waiting:
                    self._waiting.remove(job)

    def close(self) -> None:
        """End the threads once they are idle. Waiting work is dropped."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.result.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _admit(self, size: int) -> None:
        """Refuse work that the queue has no room for. Small texts do not count against large ones."""
        is_small = size <= SMALL
        queued = sum(job.size for job in self._waiting if (job.size <= SMALL) == is_small)
        if queued and queued + size > self._limit:
            raise ApiError(
                429,
                f"{queued} bytes of other requests wait to be tokenized, and the limit is {self._limit} "
                "(--max-queued-text); try again later",
                code="queue_full",
                reason="queue_full",
                retry_after=1,
            )

    def _serve(self, largest: int | None) -> None:
        while (job := self._next(largest)) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                job.result.set_result(job.work())
            except BaseException as error:
                job.result.set_exception(error)
            del job  # its text may be large

    def _next(self, largest: int | None) -> Job | None:
        with self._changed:
            while not self._closed:
                if (job := choose(self._waiting, largest)) is not None:
                    self._waiting.remove(job)
                    return job
                self._changed.wait()
        return None
