"""The checkpoint directory: segments by link, named prefixes and a size cap; least recently used go first.

    DIR/FINGERPRINT/PARENT-LINK-TOKENS.safetensors    one segment
    DIR/FINGERPRINT/NAME.json                         a named prefix: its segments, which are not removed

Files appear by renaming and are never changed, so several processes may use a directory at once. A file's
modification time is the time of its last use. Any file may vanish at any time; its reader then computes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skim.errors import ConfigError, RequestError, shown
from skim.memory.budget import in_words
from skim.memory.files import sweep, write_file
from skim.memory.prefix import Namespace
from skim.memory.segment import SUFFIX, VERSION, Identity, RefusedFile, Segment, read_head

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STALE_SECONDS = 1.0  # after this time, look whether other processes have changed the directory


@dataclass
class CheckpointStats:
    """Counts since start, and the directory's present size."""

    spills: int = 0  # segments written
    spilled_bytes: int = 0
    restores: int = 0  # requests that began on restored slots
    restored_tokens: int = 0
    restored_bytes: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # segments that were not written, by reason
    refused: Counter[str] = field(default_factory=Counter)  # files that were not used, by reason
    files: int = 0
    bytes: int = 0

    def copy(self) -> CheckpointStats:
        return replace(self, lost=self.lost.copy(), refused=self.refused.copy())


@dataclass(frozen=True)
class Named:
    """A named prefix."""

    name: str
    model: str
    fingerprint: str
    tokens: int
    bytes: int
    created: float  # seconds since 1970
    segments: tuple[str, ...]  # file names, in order


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(
            "a checkpoint's name has up to 100 letters, digits, dots, dashes and underscores, and begins "
            f"with a letter or digit, got {shown(name)}",
            fields="name",
        )
    return name


class Shelf:
    """A checkpoint directory without a model: its named prefixes, sizes, and removal."""

    def __init__(self, root: Path, most_bytes: int | None = None) -> None:
        self.root = root
        self.most_bytes = most_bytes

    def named(self) -> list[Named]:
        """All named prefixes, by model and name. A broken list of segments is logged and left out."""
        return [one for path in sorted(self.root.glob("*/*.json")) if (one := _read_named(path)) is not None]

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.root.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                yield path, path.stat()

    def remove(self, name: str, fingerprint: str | None = None) -> list[Named]:
        """Remove a named prefix, of one model or of all, and the segments that no other one has."""
        check_name(name)
        every = self.named()
        gone = [n for n in every if n.name == name and fingerprint in (None, n.fingerprint)]
        if not gone:
            raise _no_checkpoint(name, self.root)
        kept = {(one.fingerprint, file) for one in every if one not in gone for file in one.segments}
        for one in gone:
            (self.root / one.fingerprint / f"{name}.json").unlink(missing_ok=True)
            for file in one.segments:
                if (one.fingerprint, file) not in kept:
                    (self.root / one.fingerprint / file).unlink(missing_ok=True)
        return gone

    def pinned(self) -> set[Path]:
        return {self.root / one.fingerprint / file for one in self.named() for file in one.segments}

    def trim(self) -> tuple[int, list[str]]:
        """Remove segments without a name, least recently used first, until the rest fits.

        Returns the size of the rest, and the names of the removed files.
        """
        removed: list[str] = []
        every = sorted(self.files(), key=lambda one: one[1].st_mtime_ns)
        size = sum(stat.st_size for _, stat in every)
        if self.most_bytes is not None and size > self.most_bytes:
            pinned = self.pinned()
            for path, stat in every:
                if size <= self.most_bytes:
                    break
                if path not in pinned:
                    path.unlink(missing_ok=True)
                    removed.append(path.name)
                    size -= stat.st_size
        return size, removed


def _no_checkpoint(name: str, root: Path) -> RequestError:
    return RequestError(
        f"there is no checkpoint {name!r} in {root}; `skim checkpoint list` lists them", fields="name"
    )


def _read_named(path: Path) -> Named | None:
    try:
        about: dict[str, Any] = json.loads(path.read_text())
        version = int(about.pop("version"))
        if version != VERSION:
            remedy = "update Skim" if version > VERSION else "save the prefix again"
            raise ValueError(f"it has version {version}, and this Skim reads {VERSION}; {remedy}")
        files = tuple(map(str, about.pop("segments")))
        if any(Path(file).name != file or not file.endswith(SUFFIX) for file in files):
            raise ValueError("it names files outside its directory")
        found = Named(**about, segments=files)
        if (found.name, found.fingerprint) != (path.stem, path.parent.name):
            raise ValueError(f"it belongs to {found.fingerprint}/{found.name}")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint file %s is refused: %s", path, error)
        return None


class CheckpointDir(Shelf):
    """The segments of one model, indexed in memory. Any thread may call any method."""

    def __init__(self, root: Path, most_bytes: int, identity: Identity) -> None:
        super().__init__(root, most_bytes)
        self.identity = identity
        self.path = root / identity.fingerprint
        self.stats = CheckpointStats()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep(self.path)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir {shown(str(root))} cannot be used: {error.strerror or error}; choose a "
                "directory that Skim may write",
                fields="checkpoint_dir",
            ) from error
        self._lock = threading.Lock()
        self._segments: dict[str, Segment] = {}  # by file name
        self._children: dict[str, list[Segment]] = {}  # by the link before them
        self._pending: set[str] = set()  # file names of segments on their way
        self._refused: set[str] = set()
        self._seen = -1
        self._looked = 0.0
        self.refresh()

    # -- index

    def refresh(self) -> None:
        """Read the directory again if another process, or this one, has changed it."""
        with self._lock:
            self._looked = time.monotonic()
            with contextlib.suppress(OSError):
                changed = self.path.stat().st_mtime_ns
                if changed == self._seen:
                    return
                self._seen = changed
                names = {name for name in os.listdir(self.path) if name.endswith(SUFFIX)}
                for name in self._segments.keys() - names - self._pending:
                    self._forget(name)
                self._refused &= names
                for name in names - self._segments.keys() - self._refused:
                    self._index(name)
            self._make_room()

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._looked > _STALE_SECONDS

    def find(self, keys: Sequence[int], namespace: Namespace) -> list[tuple[Segment, int]]:
        """The longest stored prefix of `keys`: its segments, and the number of slots to take of each."""
        link, size = self.identity.root(namespace), self.identity.segment
        found: list[tuple[Segment, int]] = []
        for first in range(0, len(keys), size):
            mine = array("q", keys[first : first + size])
            best, shared = self._best(link, mine, written=True)
            if best is None:
                break
            found.append((best, shared))
            if shared < size:
                break
            link = best.link
        return found

    def _best(self, link: str, keys: array[int], *, written: bool) -> tuple[Segment | None, int]:
        """The segment after `link` that shares most slots with `keys`, and how many."""
        best, shared = None, 0
        for one in self._children.get(link, ())[:]:
            if one.keys[: shared + 1] != keys[: shared + 1] or (written and one.file_name in self._pending):
                continue
            count = min(one.tokens, len(keys))
            if one.keys[:count] != keys[:count]:
                pairs = enumerate(zip(one.keys, keys, strict=False))
                count = next(at for at, (a, b) in pairs if a != b)
            if count > shared:
                best, shared = one, count
        return best, shared

    def has(self, file_name: str) -> bool:
        """True if the file is there, or on its way."""
        return file_name in self._segments

    def holder(self, parent: str, keys: array[int]) -> Segment | None:
        """A segment after `parent` that begins with all these keys, written or on its way."""
        best, shared = self._best(parent, keys, written=False)
        return best if shared == len(keys) else None

    def expect(self, segment: Segment) -> None:
        """A segment is on its way: `write` or `lose` follows."""
        with self._lock:
            if not self.has(segment.file_name):
                self._pending.add(segment.file_name)
                self._enter(segment)

    def lose(self, segment: Segment) -> None:
        """A segment was not written."""
        with self._lock:
            if segment.file_name in self._pending:
                self._pending.remove(segment.file_name)
                self._forget(segment.file_name)

    def _index(self, name: str) -> None:
        path = self.path / name
        try:
            with open(path, "rb") as file:
                self._enter(read_head(file, path, self.identity).segment)
        except FileNotFoundError:
            pass
        except (RefusedFile, OSError) as error:
            self._refused.add(name)
            self._tell(error)

    def _enter(self, segment: Segment) -> None:
        if segment.file_name not in self._segments:
            self._segments[segment.file_name] = segment
            self._children.setdefault(segment.parent, []).append(segment)

    def _forget(self, name: str) -> None:
        segment = self._segments.pop(name, None)
        if segment is not None:
            siblings = [one for one in self._children[segment.parent] if one is not segment]
            if siblings:
                self._children[segment.parent] = siblings
            else:
                del self._children[segment.parent]

    # -- files

    def refuse(self, segment: Segment, error: Exception) -> None:
        """Forget a file that could not be read. It is not tried again."""
        with self._lock:
            self._forget(segment.file_name)
            if not isinstance(error, RefusedFile) or error.reason != "missing":
                self._refused.add(segment.file_name)
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, RefusedFile) else "unreadable"
        self.stats.refused[reason] += 1
        # A file that goes while it is about to be read is normal in a full directory.
        log.log(logging.DEBUG if reason == "missing" else logging.WARNING, "%s", error)

    def write(self, segment: Segment, parts: Sequence[bytes | memoryview]) -> None:
        """Write a segment, then make room under the size cap. Raises OSError with nothing changed."""
        size = sum(memoryview(part).nbytes for part in parts)
        write_file(self.path / segment.file_name, parts)
        with self._lock:
            self._enter(segment)
            self._pending.discard(segment.file_name)
            self._refused.discard(segment.file_name)
            self.stats.spills += 1
            self.stats.spilled_bytes += size
            self._remove_beginnings(segment)
            self.stats.files, self.stats.bytes = len(self._segments), self.stats.bytes + size
            if self.most_bytes is not None and self.stats.bytes > self.most_bytes:
                self._make_room()

    def _remove_beginnings(self, segment: Segment) -> None:
        """Remove files without a name that hold only the beginning of a segment."""
        shorter = [
            one
            for one in self._children[segment.parent]
            if one.tokens < segment.tokens
            and one.keys == segment.keys[: one.tokens]
            and one.file_name not in self._pending
        ]
        pinned = self.pinned() if shorter else set()
        for one in shorter:
            if (path := self.path / one.file_name) not in pinned:
                path.unlink(missing_ok=True)
                self._forget(one.file_name)

    def _make_room(self) -> None:
        self.stats.bytes, removed = self.trim()
        for name in removed:
            self._forget(name)
        self.stats.files = len(self._segments)

    def touch(self, segments: Sequence[Segment]) -> None:
        """Mark segments of a prefix as just used, earlier ones as more recent: so its end goes first."""
        now = time.time_ns()
        for back, segment in enumerate(segments):
            with contextlib.suppress(OSError):
                at = now - back * 1000
                os.utime(self.path / segment.file_name, ns=(at, at))

    # -- names

    def check_room(self, size: int) -> None:
        """Refuse a named prefix of `size` bytes that cannot fit beside the others."""
        taken = sum(one.bytes for one in self.named())
        if self.most_bytes is not None and taken + size > self.most_bytes:
            raise RequestError(
                f"the checkpoint takes {in_words(size)}, the named ones take {in_words(taken)}, and "
                f"checkpoint_size is {in_words(self.most_bytes)}; raise it, or remove some with "
                "`skim checkpoint rm`"
            )

    def name(self, name: str, segments: Sequence[Segment], tokens: int) -> Named:
        """Give a stored prefix of `tokens` slots a name, in place of an earlier one with it."""
        files = [self.path / one.file_name for one in segments]
        made = Named(
            check_name(name),
            self.identity.model,
            self.identity.fingerprint,
            tokens,
            sum(path.stat().st_size for path in files),
            time.time(),
            tuple(path.name for path in files),
        )
        write_file(self.path / f"{name}.json", [json.dumps({"version": VERSION, **vars(made)}).encode()])
        missing = [path.name for path in files if not path.exists()]
        if missing:
            (self.path / f"{name}.json").unlink(missing_ok=True)
            raise FileNotFoundError(f"{missing[0]} was removed meanwhile; raise checkpoint_size")
        return made

    def get(self, name: str) -> tuple[Named, list[Segment]]:
        """A named prefix of this model, with its segments."""
        check_name(name)
        with self._lock:
            for one in self.named():
                if (one.name, one.fingerprint) == (name, self.identity.fingerprint):
                    lost = next((file for file in one.segments if file not in self._segments), None)
                    if lost is not None:
                        raise RequestError(f"checkpoint {name!r}: its file {lost} is missing or refused")
                    return one, [self._segments[file] for file in one.segments]
        other = next((one.model for one in self.named() if one.name == name), None)
        if other is not None:
            raise RequestError(
                f"there is no checkpoint {name!r} for this model; one was saved by {other!r}", fields="name"
            )
        raise _no_checkpoint(name, self.root)
