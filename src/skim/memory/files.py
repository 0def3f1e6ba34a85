"""Files that are complete or absent: written under a temporary name, flushed to disk, and renamed.

The writer holds a lock on its temporary file. The lock ends with the process, so `sweep` finds the leftovers
of a killed one and leaves those of a process that still writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

PREFIX = ".writing-"
PIECE = 8 * 2**20  # bytes of one write


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file, all or nothing. An OSError, such as a full disk, leaves no trace."""
    temporary = path.parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        try:
            with contextlib.suppress(OSError):  # some network filesystems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for part in parts:
                _write(descriptor, memoryview(part).cast("B"))
            os.fsync(descriptor)
            os.replace(temporary, path)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def sweep(directory: Path) -> None:
    """Remove temporary files whose writer has ended."""
    for leftover in directory.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(leftover, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(leftover)
            finally:
                os.close(descriptor)


def _write(descriptor: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.write(descriptor, data[at : at + PIECE])


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every filesystem can do that
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
