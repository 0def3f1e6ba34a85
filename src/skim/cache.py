"""The model cache. A directory in it is either complete or absent.

It is built under a temporary name beside its final one and renamed when complete. The builder holds a file
lock on the temporary directory. The lock ends with the process, so the next build finds and removes the
leftovers of a killed one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from skim.errors import ModelError

_PREFIX = ".building-"


def root() -> Path:
    """`$SKIM_CACHE`, or `skim` in the user's cache directory. It need not exist yet."""
    chosen = os.environ.get("SKIM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skim"


def publish(target: Path, build: Callable[[Path], None]) -> Path:
    """Make the directory `target` by running `build` on an empty one, all or nothing.

    If `target` exists, or another process finishes it first, that one is kept and returned. If `build` fails
    or is interrupted, neither `target` nor a temporary directory remains.
    """
    if target.is_dir():
        return target
    with staging(target.parent) as temporary:
        inner = temporary / "made"
        inner.mkdir()
        build(inner)
        try:
            os.rename(inner, target)
        except OSError:
            if not target.is_dir():
                raise
    return target


@contextlib.contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """An empty temporary directory in `parent`, so that a rename out of it stays on one filesystem.

    It is always removed on exit. A failed write to disk raises a ModelError.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        temporary, lock = _locked_directory(parent)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise ModelError(
            f"cannot write to the model cache {parent}: {error.strerror or error}; "
            "free some space there or set SKIM_CACHE to a writable directory"
        ) from error


def sweep(parent: Path) -> None:
    """Remove temporary directories whose builder has ended; keep locked and unreadable ones."""
    for leftover in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(lock)


def _locked_directory(parent: Path) -> tuple[Path, int]:
    """A new directory and a descriptor that holds its lock.

    Another process's sweep may remove the directory before it is locked; then a new one is made.
    """
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = -1
        try:
            lock = os.open(temporary, os.O_RDONLY)
            with contextlib.suppress(OSError):  # some network filesystems cannot lock a directory
                fcntl.flock(lock, fcntl.LOCK_EX)
            if temporary.is_dir():
                return temporary, lock
        except FileNotFoundError:
            pass
        if lock >= 0:
            os.close(lock)
