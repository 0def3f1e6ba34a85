"""Work that cannot be done in slices: it gets a thread, so that the engine's thread can run steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_WAIT_SECONDS = 0.002  # of each slice: without a wait, the engine's thread would only poll


def in_thread(work: Callable[[], T]) -> Generator[None, None, T]:
    """Run `work` in a thread and yield until it ends. It must not compute with torch.

    OpenMP keeps a worker pool for every thread that has computed.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="skim-scoring", daemon=True).start()
    while True:
        try:
            return result.result(timeout=_WAIT_SECONDS)
        except TimeoutError:
            if result.done():  # the work raised it
                raise
        yield
