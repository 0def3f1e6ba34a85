"""Checkpoints between steps: stored prefixes come back into the pool, cached ones go to the directory.

Files are read and written on other threads. The engine's thread only copies between buffers and blocks, for a
bounded time before each step, so decode rows go on while a document is restored.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from skim.config import MemoryConfig, parse_bytes
from skim.cpu import affine_cores
from skim.errors import EngineError, RequestError, SkimError
from skim.memory.checkpoint import CheckpointDir, CheckpointStats, Named, check_name
from skim.memory.copying import Copier
from skim.memory.groups import ABSENT
from skim.memory.manager import BlockTable, MemoryManager
from skim.memory.node import Node
from skim.memory.prefix import Match, Namespace
from skim.memory.segment import TOKENS, Identity, RefusedFile, Segment, data_bytes, read
from skim.memory.spill import Spiller, Writer
from skim.models.fingerprint import fingerprint
from skim.models.load import LoadedModel

SHORTEST = 64  # tokens; a shorter prefix is not worth a file
LEAST_GAIN = 16  # stored tokens beyond the cached ones for which files are read
RESTORES = 4  # prefixes restored at a time; further ones wait
MOST_READERS = 12  # threads
WAIT_SECONDS = 0.005  # for a file, if there is nothing else to do
IDLE_SECONDS = 0.25  # without work, before cached prefixes are written back
WRITE_BACK_SECONDS = 0.05  # of copying at a time
CLOSE_SECONDS = 2.0  # of writing back at the end


@dataclass(eq=False)
class Restore:
    """A stored prefix on its way into a block table."""

    table: BlockTable
    end: int  # slots to restore up to
    parts: deque[Segment]  # not read yet
    alive: Callable[[], bool]  # False once nothing waits for it
    advance: Callable[[int], None]  # called with the number of slots that were restored
    finish: Callable[[], None]
    reading: deque[tuple[Segment, Future[tuple[Segment, torch.Tensor]]]] = field(default_factory=deque)
    used: list[Segment] = field(default_factory=list)

    def cancel(self) -> None:
        self.parts.clear()
        for _, future in self.reading:
            future.cancel()
        self.reading.clear()


@dataclass(eq=False)
class Save:
    """A cached prefix on its way into the directory."""

    name: str
    keys: Sequence[int]
    namespace: Namespace
    table: BlockTable  # keeps its blocks from being evicted
    nodes: deque[Node]  # ends of segments to write
    result: Future[Named]


class Keeper:
    """Restores, spills and saves prefixes. All methods run on the engine's thread."""

    def __init__(self, model: LoadedModel, memory: MemoryManager, config: MemoryConfig) -> None:
        assert config.checkpoint_dir is not None
        size = memory.pool.block_size
        identity = Identity(model.name, fingerprint(model), -(-TOKENS // size) * size)
        limit = parse_bytes("checkpoint_size", config.checkpoint_size)
        self.directory = CheckpointDir(Path(config.checkpoint_dir).expanduser(), limit, identity)
        self._memory = memory
        self._copier = Copier(memory.pool)
        self._writer = Writer(self.directory)
        self._spiller = Spiller(memory.tree, self._copier, self.directory, self._writer, SHORTEST)
        self._workers = max(1, min(MOST_READERS, affine_cores() - 1))
        self._readers = ThreadPoolExecutor(self._workers, "skim-checkpoint-reader")
        self._refresh: Future[None] | None = None
        self._restores: list[Restore] = []
        self._saves: list[Save] = []
        self._left = True  # something may have to be written back
        self._version = -1
        self._closed = False

    def stats(self) -> CheckpointStats:
        return self.directory.stats.copy()

    # -- restore

    @property
    def is_full(self) -> bool:
        """True if another restore must wait."""
        return len(self._restores) >= RESTORES

    def find(self, keys: Sequence[int], namespace: Namespace) -> list[tuple[Segment, int]]:
        """The longest stored prefix of `keys`, without their last: segments, and slots to take of each."""
        if self.directory.is_stale and (self._refresh is None or self._refresh.done()):
            self._refresh = self._readers.submit(self.directory.refresh)
        return self.directory.find(keys[: len(keys) - 1], namespace)

    def stored_tokens(self, keys: Sequence[int], namespace: Namespace) -> int:
        return _end_of(self.find(keys, namespace))

    def offer(
        self, keys: Sequence[int], namespace: Namespace, cached: int, grain: int
    ) -> tuple[list[tuple[Segment, int]], int] | None:
        """A stored prefix that is worth restoring beyond `cached` tokens, and its end in whole grains."""
        found = self.find(keys, namespace)
        end = _end_of(found) // grain * grain
        return (found, end) if end - cached >= LEAST_GAIN else None

    def restore(
        self,
        table: BlockTable,
        found: Sequence[tuple[Segment, int]],
        end: int,
        *,
        alive: Callable[[], bool],
        advance: Callable[[int], None],
        finish: Callable[[], None],
    ) -> None:
        """Restore slots of a table up to `end`. `finish` follows, even if a file is refused on the way."""
        parts = deque(segment for segment, count in found if min(segment.first + count, end) > table.length)
        self._restores.append(Restore(table, end, parts, alive, advance, finish))
        self._read_ahead()

    def advance(self, seconds: float, *, wait: bool) -> bool:
        """Copy what was read, for about this long; False if there is nothing to restore or save.

        `wait` for a file if none has been read yet.
        """
        if not self._restores and not self._saves:
            return False
        end = time.perf_counter() + seconds
        if wait:
            self._wait()
        for one in list(self._restores):
            while one in self._restores and time.perf_counter() < end and self._step(one):
                pass
        for save in list(self._saves):
            self._save_some(save)
        return True

    def _read_ahead(self) -> None:
        room = 2 * self._workers - sum(len(one.reading) for one in self._restores)
        identity, path = self.directory.identity, self.directory.path
        for one in self._restores:
            while one.parts and room > 0:
                segment = one.parts.popleft()
                file = path / segment.file_name
                future = self._readers.submit(read, file, identity, self._copier.allocate)
                one.reading.append((segment, future))
                room -= 1

    def _wait(self) -> None:
        first = [one.reading[0][1] for one in self._restores if one.reading]
        if first:
            concurrent.futures.wait(first, WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
        elif not any(self._spiller.has_room for _ in self._saves):
            time.sleep(WAIT_SECONDS)

    def _step(self, one: Restore) -> bool:
        """Copy the next segment into its table; False if it has not been read yet."""
        if not one.alive():
            one.cancel()
            self._restores.remove(one)
        elif not one.reading:
            self._end(one)
        elif one.reading[0][1].done():
            segment, future = one.reading.popleft()
            try:
                _, data = future.result()
                if not self._insert(one, segment, data):
                    one.cancel()
            except (RefusedFile, OSError, ValueError) as error:
                self.directory.refuse(segment, error)
                one.cancel()
        else:
            return False
        self._read_ahead()
        return True

    def _insert(self, one: Restore, segment: Segment, data: torch.Tensor) -> bool:
        """Write a segment's slots into the table; False if the pool has no room for all of them."""
        table, memory = one.table, self._memory
        start, stop = table.length, min(segment.end, one.end)
        tokens = stop - start
        if memory.blocks_needed(table, tokens) > memory.available:
            return False
        memory.extend(table, tokens)
        self._copier.write(table.tables, range(start, stop), data, segment)
        one.advance(tokens)
        one.used.append(segment)
        stats = self.directory.stats
        stats.restored_tokens += tokens
        stats.restored_bytes += tokens * data_bytes(segment.form, 1)
        return True

    def _end(self, one: Restore) -> None:
        self._restores.remove(one)
        if one.used:
            self.directory.stats.restores += 1
            self._readers.submit(self.directory.touch, one.used)
        one.finish()

    def load(self, name: str, salt: str, result: Future[int]) -> None:
        """Restore a named prefix into the prefix tree. The result is its number of cached tokens."""
        memory = self._memory
        try:
            named, segments = self.directory.get(name)
            namespace = Namespace(salt, segments[0].policy)
            if segments[0].parent != self.directory.identity.root(namespace):
                raise RequestError(
                    f"checkpoint {name!r} was saved with another cache salt", fields="cache_salt"
                )
        except SkimError as error:
            result.set_exception(error)
            return
        keys = [key for segment in segments for key in segment.keys][: named.tokens]
        table = memory.open(memory.match([*keys, 0], namespace))

        def finish() -> None:
            memory.publish(table, keys, namespace, table.length)
            length = table.length
            memory.close(table)
            result.set_result(length)

        def advance(tokens: int) -> None:
            table.length += tokens
            memory.slide(table, table.length, keys, namespace, table.length)

        found = [(segment, segment.tokens) for segment in segments]
        self.restore(table, found, named.tokens, alive=lambda: True, advance=advance, finish=finish)

    # -- save

    def save(self, name: str, keys: Sequence[int], namespace: Namespace, result: Future[Named]) -> None:
        """Write the cached prefix of `keys` to the directory and give it a name."""
        try:
            check_name(name)
            path = self._memory.tree.path(keys, namespace)
            size = self._memory.pool.block_size
            length = len(path) * size
            if length < max(SHORTEST, len(keys) - size + 1):
                raise RequestError(
                    f"checkpoint {name!r}: {length} of its {len(keys)} tokens are cached, and it needs all "
                    f"whole blocks and at least {SHORTEST} tokens; save a longer text, or raise kv_memory"
                )
            if not all(node.is_whole or self._is_kept(node) for node in path):
                raise RequestError(
                    f"checkpoint {name!r}: blocks behind its sliding windows were given back before they "
                    "were saved; save it again after a restart, or raise kv_memory"
                )
            self.directory.check_room(data_bytes(self._copier.form, length))
        except SkimError as error:
            result.set_exception(error)
            return
        per = self.directory.identity.segment // size
        nodes = deque([*path[per - 1 :: per], *([path[-1]] if len(path) % per else [])])
        tables = tuple(map(_last_run, zip(*(node.blocks for node in path), strict=True)))
        table = self._memory.open(Match(tables, length), whole=True)
        self._saves.append(Save(name, list(keys[:length]), namespace, table, nodes, result))

    def _is_kept(self, node: Node) -> bool:
        return node.kept is not None and self.directory.has(node.kept)

    def _save_some(self, save: Save) -> None:
        while save.nodes and self._spiller.has_room:
            self._spiller.spill(save.nodes.popleft())
        if save.nodes:
            return
        self._saves.remove(save)
        self._memory.close(save.table)

        def give_name() -> None:
            try:
                found = self.directory.find(save.keys, save.namespace)
                stored = _end_of(found)
                if stored < len(save.keys):
                    raise EngineError(
                        f"checkpoint {save.name!r}: {stored} of {len(save.keys)} tokens could be written to "
                        f"{self.directory.path}; free some space there, or raise checkpoint_size"
                    )
                segments = [segment for segment, _ in found]
                save.result.set_result(self.directory.name(save.name, segments, len(save.keys)))
            except Exception as error:
                save.result.set_exception(
                    error
                    if isinstance(error, SkimError)
                    else EngineError(f"checkpoint {save.name!r}: {error}")
                )

        self._writer.call(give_name)

    # -- without work, and at the end

    @property
    def idle_seconds(self) -> float | None:
        """Seconds of idleness after which to call `write_back`; None if there is nothing to write."""
        return IDLE_SECONDS if self._left or self._version != self._memory.tree.version else None

    def write_back(self, seconds: float = WRITE_BACK_SECONDS) -> None:
        """Copy cached prefixes to the directory, so that a restart finds them."""
        self._version = self._memory.tree.version
        self._left = self._spiller.write_back(seconds)

    def close(self, reason: SkimError, *, write_back: bool = True) -> None:
        """Write back for a while, then end the threads. Unfinished saves fail with `reason`."""
        if self._closed:
            return
        self._closed = True
        for one in self._restores:
            one.cancel()
            if one.alive():
                one.finish()
        for save in self._saves:
            save.result.set_exception(reason)
        self._restores, self._saves = [], []
        end = time.perf_counter() + CLOSE_SECONDS
        self._left = write_back
        while self._left and time.perf_counter() < end:
            self.write_back()
            if self._left and not self._spiller.has_room:
                time.sleep(WAIT_SECONDS)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.close(max(0.0, end - time.perf_counter()) + 0.5)


def _last_run(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """A group's blocks without those before the last absent one."""
    first = next((i for i in range(len(blocks), 0, -1) if blocks[i - 1] == ABSENT), 0)
    return (ABSENT,) * first + blocks[first:]


def _end_of(found: Sequence[tuple[Segment, int]]) -> int:
    """The slots up to the end of a stored prefix."""
    return found[-1][0].first + found[-1][1] if found else 0
