"""Progress on stderr during long work: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

DELAY = 1.0
"""Seconds before `progress` shows anything."""


@contextlib.contextmanager
def progress(label: str, total: int | None = None, done: Callable[[], int] | None = None) -> Iterator[None]:
    """While the body runs: a bar or the elapsed time on a terminal, one line elsewhere. Silent if quick.

    Another thread calls `done` for the number of `total` tokens that are processed.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(ended, label, total, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def byte_bar(label: str, total: int, enabled: bool) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes the number of further bytes. Without a terminal: one line."""
    if enabled and sys.stderr.isatty():
        with _bar(label, "B", total=total, unit_scale=True, unit_divisor=1024) as bar:
            yield bar.update
        return
    if enabled:
        print(f"{label} ...", file=sys.stderr, flush=True)
    yield lambda _: None


@contextlib.contextmanager
def task_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, total) tasks. Without a terminal: a line for every tenth."""
    if not sys.stderr.isatty():
        yield partial(tell_tenths, label, "tasks")
        return
    with _bar(label, "task", leave=False) as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move


def tell_tenths(label: str, unit: str, done: int, total: int) -> None:
    """Print a line for each further tenth. Call it once for each of the `total`."""
    if done * 10 // total > (done - 1) * 10 // total:
        print(f"{label}: {done} of {total} {unit}", file=sys.stderr, flush=True)


def counted(items: Iterable[T], label: str, unit: str) -> Iterable[T]:
    """The items, counted by a bar as they are taken. Without a terminal: nothing."""
    found: Iterable[T] = _bar(label, unit, iterable=items, disable=None)
    return found


def _bar(label: str, unit: str, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(desc=label, unit=unit, file=sys.stderr, **options)


def _show(ended: threading.Event, label: str, total: int | None, done: Callable[[], int] | None) -> None:
    started = time.time()
    if ended.wait(DELAY):
        return
    if not sys.stderr.isatty():
        print(f"{label} ...", file=sys.stderr, flush=True)
        return
    form = None if total else "{desc} ... {elapsed}"
    with _bar(label, "tok", total=total, bar_format=form, leave=False) as bar:
        bar.start_t = started  # rates and times count from the beginning, not from when the bar appears
        while not ended.wait(0.2):
            if total and done is not None:
                bar.n = min(done(), total)
            bar.refresh()
