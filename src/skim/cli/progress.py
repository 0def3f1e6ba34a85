"""Signs of life on stderr while something takes longer than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

DELAY = 1.0
"""Seconds of silence: what is faster needs no sign."""


@contextlib.contextmanager
def progress(label: str, total: int | None = None, done: Callable[[], int] | None = None) -> Iterator[None]:
    """While the body runs: a bar or the time gone by on a terminal, one plain line elsewhere.

    `done` is asked from another thread how many of `total` tokens are through.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(ended, label, total, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(ended: threading.Event, label: str, total: int | None, done: Callable[[], int] | None) -> None:
    started = time.time()
    if ended.wait(DELAY):
        return
    if not sys.stderr.isatty():
        print(f"{label} ...", file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    form = None if total else "{desc} ... {elapsed}"
    with tqdm(total=total, desc=label, unit="tok", bar_format=form, leave=False, file=sys.stderr) as bar:
        bar.start_t = started  # rates and times count from the beginning, not from the first sign
        while not ended.wait(0.2):
            if total and done is not None:
                bar.n = min(done(), total)
            bar.refresh()
