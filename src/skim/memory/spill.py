"""Prefixes on their way to the checkpoint directory: copied on the engine's thread, written on another.

The queue to the writer is bounded in bytes. A segment that finds no room, or no space on disk, is lost, and
nothing else happens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable

from skim.memory.checkpoint import CheckpointDir
from skim.memory.copying import Copier, HostCopy
from skim.memory.node import Node
from skim.memory.prefix import PrefixTree
from skim.memory.segment import Segment, data_bytes, encode, hide, next_link

log = logging.getLogger(__name__)

QUEUE_BYTES = 2**30  # copies that wait for the writer
_LOG_SECONDS = 60.0


class Writer:
    """Writes segments on its own thread, in order."""

    def __init__(self, directory: CheckpointDir, queue_bytes: int = QUEUE_BYTES) -> None:
        self._directory = directory
        self._limit = queue_bytes
        self._waiting = 0  # bytes
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._complained = -_LOG_SECONDS
        self._thread = threading.Thread(target=self._loop, name="skim-checkpoint-writer", daemon=True)
        self._thread.start()

    def has_room(self, size: int) -> bool:
        """True if a segment of this many bytes would be taken. One alone always is."""
        return self._waiting == 0 or self._waiting + size <= self._limit

    def put(self, segment: Segment, copy: HostCopy) -> None:
        self._directory.expect(segment)
        with self._lock:
            self._waiting += segment.data_bytes
        self._jobs.put(lambda: self._write(segment, copy))

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` after everything that was put before."""
        self._jobs.put(work)

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, then end; False if that takes longer than `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _write(self, segment: Segment, copy: HostCopy) -> None:
        try:
            self._directory.write(segment, encode(segment, self._directory.identity, copy.wait()))
        except OSError as error:
            self._directory.lose(segment)
            self._directory.stats.lost["disk"] += 1
            if time.monotonic() - self._complained >= _LOG_SECONDS:
                self._complained = time.monotonic()
                reason = error.strerror or error
                log.warning("a prefix was not written to %s: %s", self._directory.path, reason)
        finally:
            with self._lock:
                self._waiting -= segment.data_bytes

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("the checkpoint writer failed")


class Spiller:
    """Copies prefixes of at least `shortest` slots to the writer. Used by the engine's thread."""

    def __init__(
        self,
        tree: PrefixTree,
        copier: Copier,
        directory: CheckpointDir,
        writer: Writer,
        shortest: int,
    ) -> None:
        self._tree = tree
        self._copier = copier
        self._directory = directory
        self._writer = writer
        self._shortest = shortest
        self._blocks = directory.identity.segment // tree.pool.block_size  # of a segment
        self._left: list[Node] = []  # nodes to write back
        self._version = -1  # of the tree, when they were found
        tree.on_evict = self.rescue

    @property
    def has_room(self) -> bool:
        """True if the writer takes another segment now."""
        return self._writer.has_room(data_bytes(self._copier.form, self._directory.identity.segment))

    def rescue(self, node: Node) -> None:
        """Copy the segment of a node of which blocks are about to be evicted."""
        while node.children and node.depth % self._blocks:
            node = max(node.children.values(), key=lambda child: child.used_at)
        self.spill(node)

    def spill(self, node: Node) -> None:
        """Copy a segment, up to this node, to the writer, unless a file holds it. O(slots of a segment).

        A segment of which blocks are absent is left out: it was copied before they went.
        """
        if node.kept is not None and self._directory.has(node.kept):
            return
        path = self._segment_path(node)
        if not all(one.is_whole for one in path):
            return
        parent = path[0].parent
        assert parent is not None
        keys = array("q", [key for one in path for key in one.edge])
        first = parent.depth * self._tree.pool.block_size
        if first + len(keys) < self._shortest:
            return
        link = self._link(parent)
        holder = self._directory.holder(link, keys)
        if holder is None:
            if not self.has_room:
                self._directory.stats.lost["queue"] += 1
                return
            holder = Segment(
                link,
                next_link(link, keys),
                first,
                keys,
                hide(node.namespace.salt),
                node.namespace.policy,
                self._copier.form,
                self._copier.kind,
            )
            tables = list(zip(*(one.blocks for one in path), strict=True))
            self._writer.put(holder, self._copier.read(tables, 0, len(keys)))
        for one in path:
            one.kept = holder.file_name

    def write_back(self, seconds: float) -> bool:
        """Spill prefixes that no file holds, for about this long; False if there are none left."""
        if self._version != self._tree.version:
            self._version = self._tree.version
            self._left = [node for node in self._tree.nodes() if self._ends_segment(node)][::-1]
        end = time.perf_counter() + seconds
        while self._left and self.has_room and time.perf_counter() < end:
            node = self._left.pop()
            if node.parent is not None:  # it has not been evicted
                self.spill(node)
        return bool(self._left)

    def _ends_segment(self, node: Node) -> bool:
        return not node.children or node.depth % self._blocks == 0

    def _segment_path(self, node: Node) -> list[Node]:
        """The nodes of a segment up to this one."""
        path = [node]
        while (node.depth - 1) % self._blocks:
            assert node.parent is not None
            node = node.parent
            path.append(node)
        return path[::-1]

    def _link(self, node: Node) -> str:
        """The link of the prefix that ends at a root or at the end of a whole segment."""
        unknown: list[Node] = []
        while node.link is None and node.parent is not None:
            unknown.append(node)
            parent = self._segment_path(node)[0].parent
            assert parent is not None
            node = parent
        link = node.link = node.link or self._directory.identity.root(node.namespace)
        for one in reversed(unknown):
            link = next_link(link, [key for each in self._segment_path(one) for key in each.edge])
            one.link = link
        return link
