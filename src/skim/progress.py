"""Progress during long work: bars on a terminal, plain lines on stderr or in a log elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

DELAY = 1.0
"""Seconds before `progress` shows anything."""
BETWEEN = 5.0
"""Seconds between two lines of a byte count."""

_say: Callable[[str], object] | None = None


def say_with(function: Callable[[str], object] | None) -> None:
    """Send all progress of this process to `function` as lines; None shows it on stderr again."""
    global _say
    _say = function


def say(line: str) -> None:
    """A line of progress."""
    if _say is not None:
        _say(line)
    else:
        print(line, file=sys.stderr, flush=True)


def has_bars() -> bool:
    """True if progress is shown as bars on a terminal, false if as lines."""
    return _say is None and sys.stderr.isatty()


class ByteLines:
    """Counts bytes, and says how many at most every `BETWEEN` seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.done = 0
        self._next = time.monotonic() + BETWEEN

    def advance(self, count: float, total: float | None) -> None:
        self.done += int(count)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BETWEEN
        share = f" of {total / 1e6:,.0f} MB ({self.done / total:.0%})" if total else " MB"
        say(f"{self.label}: {self.done / 1e6:,.0f}{share}")


def download_bar(label: str, enabled: bool) -> Any:
    """A subclass of tqdm for a library that downloads: its byte bar becomes lines, or nothing.

    None, the library's own bars, on a terminal.
    """
    from tqdm.auto import tqdm

    if enabled and has_bars():
        return None

    class Lines(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO()})
            self._lines = ByteLines(label) if enabled and options.get("unit") == "B" else None

        def update(self, n: float | None = 1) -> bool | None:
            if self._lines is not None:
                self._lines.advance(n or 0, self.total)
            return bool(super().update(n))

    return Lines


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
    """Yields a function that takes the number of further bytes. Without a terminal: a line now and then."""
    if not enabled:
        yield lambda _: None
    elif has_bars():
        with _bar(label, "B", total=total, unit_scale=True, unit_divisor=1024) as bar:
            yield bar.update
    else:
        say(f"{label} ...")
        lines = ByteLines(label)
        yield lambda count: lines.advance(count, total)


@contextlib.contextmanager
def task_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, total) tasks. Without a terminal: a line for every tenth."""
    if not has_bars():
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
        say(f"{label}: {done} of {total} {unit}")


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
    if not has_bars():
        say(f"{label} ...")
        return
    form = None if total else "{desc} ... {elapsed}"
    with _bar(label, "tok", total=total, bar_format=form, leave=False) as bar:
        bar.start_t = started  # rates and times count from the beginning, not from when the bar appears
        while not ended.wait(0.2):
            if total and done is not None:
                bar.n = min(done(), total)
            bar.refresh()
