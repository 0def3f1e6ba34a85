"""Calls that generate nothing: plans, rankings and embeddings.

Their work runs in slices between the engine's steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skim.errors import SkimError
from skim.server.errors import ApiError, from_skim, too_late
from skim.server.logs import RequestLog
from skim.server.service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Work(Generic[T]):
    """Work on `tokens` prompt tokens. `start` gives it to the engine; cancelling the future ends it."""

    tokens: int
    start: Callable[[], Future[T]]


class Task(Generic[T]):
    """One HTTP call in progress. It counts as a sequence, and its prompt tokens as waiting until it ends."""

    sequences = 1

    def __init__(self, service: Service, log: RequestLog) -> None:
        self.tokens = 0
        """Prompt tokens, once they are known."""
        self._service = service
        self._log = log
        self._interruption: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

    async def run(self, kind: str, make: Callable[[], Work[T]]) -> T:
        """Make the work off the event loop, have the engine do it, and wait.

        A client that disconnects, the request timeout and the end of a drain cancel it. The `kind` is a label
        in the metrics.
        """
        service, loop = self._service, asyncio.get_running_loop()
        used = time.perf_counter() - self._log.started_at
        service.enter(self)
        started = time.perf_counter()
        try:
            async with asyncio.timeout_at(loop.time() + service.config.request_timeout - used):
                work = await service.off_loop(make, self._log.size)
                service.capacity.take_tokens(work.tokens)
                self.tokens = work.tokens
                result = await self._result(work)
        except TimeoutError:
            raise too_late(service.config.request_timeout) from None
        finally:
            service.capacity.release_tokens(self.tokens, of=self.tokens)
            service.release(self)
        seconds = time.perf_counter() - started
        self._log.fields.update(prompt_tokens=self.tokens, task_ms=round(seconds * 1e3, 3))
        service.metrics.task(kind, seconds, self.tokens)
        return result

    async def _result(self, work: Work[T]) -> T:
        future = asyncio.wrap_future(work.start())
        try:
            either: set[asyncio.Future[Any]] = {future, self._interruption}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise self._interruption.result()
            return future.result()
        except SkimError as error:
            raise from_skim(error) from error
        finally:
            future.cancel()

    def interrupt(self, error: ApiError) -> None:
        """End the work, and the call with `error`."""
        if not self._interruption.done():
            self._interruption.set_result(error)
