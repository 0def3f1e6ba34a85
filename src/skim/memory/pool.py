"""The paged pool: fixed-size KV blocks, their refcounts, and the slabs they lie in.

A block's refcount is the number of block tables that point at it. The prefix tree may also *cache* it for its
contents. A block with neither is free; a cached block with refcount 0 is evictable. The pool counts; it never
decides what to evict.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from skim.errors import ConfigError
from skim.memory.formats import AUTO, make_stores
from skim.memory.groups import Geometry, LayerGroup, one_group
from skim.memory.runs import Run, find_runs
from skim.memory.slab import Slab
from skim.memory.store import LayerShape, LayerStore, Planes, block_bytes
from skim.memory.summary import filled_in, summarize

SLAB_BYTES = 512 * 2**20


class OutOfBlocks(Exception):
    """The pool cannot provide the requested blocks. Nothing was changed."""


@dataclass(frozen=True)
class PoolStats:
    """Block counts and real bytes at one moment."""

    capacity: int  # blocks the budget allows
    allocated: int  # blocks that exist in slabs
    live: int  # blocks with a refcount, or cached
    evictable: int  # live blocks that only the prefix tree keeps
    free: int  # allocated blocks that are not live
    block_bytes: int  # one block over the layers of a group
    reserved_bytes: int  # storage of every slab
    used_bytes: int  # storage of live blocks
    token_bytes: int  # one token over all layers
    kv_format: str  # of the layers that a quantized format applies to
    block_size: int  # slots of a block
    ended: int = 0  # blocks that sequences gave back behind sliding windows, since start


def bytes_of_block(stores: Sequence[LayerStore], groups: Sequence[LayerGroup], block_size: int) -> int:
    """Bytes of one block: those of the group with the most layers, whose sizes all groups share."""
    largest = max(groups, key=lambda group: len(group.layers))
    return block_bytes([stores[layer] for layer in largest.layers], block_size)


class KVPool:
    """The blocks of every layer, handed out by number. A block belongs to the layers of one group.

    Block `b` lives in slab `b // slab_blocks` at index `b % slab_blocks`. Slabs are added as blocks are
    needed, up to the byte budget, and existing blocks never move. On a CUDA device there is one slab for the
    whole budget: kernels find every block from one address, and captured graphs may keep it.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        block_size: int,
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        slab_bytes: int | None = None,
        kv_format: str = AUTO,
        groups: Sequence[LayerGroup] | None = None,
        summaries: bool = False,
    ) -> None:
        """By default, all layers are one group, no block ends, and blocks have no summaries."""
        self.layers = tuple(layers)
        self.windowed = any(shape.window is not None for shape in layers)  # some layer has a sliding window
        self.kv_format = kv_format
        self.stores = make_stores(self.layers, dtype, kv_format, summaries=summaries)
        self.summarized = [layer for layer, store in enumerate(self.stores) if store.summarized]
        """The layers whose full blocks have summaries."""
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.groups = tuple(groups or one_group(len(self.layers)))
        self.geometry = Geometry(block_size, tuple(group.window for group in self.groups))
        self.group_of = [0] * len(self.layers)  # by layer
        self._place_of = [0] * len(self.layers)  # in a block, by layer
        for index, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                self.group_of[layer], self._place_of[layer] = index, place
        largest = max(self.groups, key=lambda group: len(group.layers))
        self._places = [self.stores[layer] for layer in largest.layers]
        self.block_bytes = bytes_of_block(self.stores, self.groups, block_size)
        whole = budget_bytes // self.block_bytes
        if slab_bytes is None:
            slab_bytes = budget_bytes if device.type == "cuda" else SLAB_BYTES
        slab_blocks = min(whole, max(1, slab_bytes // self.block_bytes))
        self.spare = self.geometry.ends and slab_blocks == whole
        """True if there is a block of zeros after the last one. Kernels read it for slots that have ended."""
        self.capacity = whole - self.spare
        self.slab_blocks = min(slab_blocks, self.capacity)
        if self.capacity < 1:
            raise ConfigError(
                f"kv_memory of {budget_bytes:,} bytes holds no block: one block of {block_size} tokens takes "
                f"{self.block_bytes:,} bytes in {len(self._places)} layers; raise kv_memory, or lower "
                "block_size",
                fields=("kv_memory", "block_size"),
            )
        self.slabs: list[Slab] = []
        self._refcounts: list[int] = []
        self._cached: list[bool] = []
        self._free: set[int] = set()
        self._heap: list[int] = []  # candidates for the lowest free block; may hold stale entries
        self._evictable = 0
        self.ended = 0

    @classmethod
    def of_blocks(
        cls,
        layers: Sequence[LayerShape],
        blocks: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        slab_blocks: int | None = None,
        kv_format: str = AUTO,
        groups: Sequence[LayerGroup] | None = None,
        summaries: bool = False,
    ) -> KVPool:
        """A pool with a budget of exactly `blocks` blocks, in slabs of `slab_blocks`."""
        stores = make_stores(layers, dtype, kv_format, summaries=summaries)
        size = bytes_of_block(stores, groups or one_group(len(stores)), block_size)
        return cls(
            layers,
            block_size=block_size,
            budget_bytes=blocks * size,
            dtype=dtype,
            device=device,
            slab_bytes=None if slab_blocks is None else slab_blocks * size,
            kv_format=kv_format,
            groups=groups,
            summaries=summaries,
        )

    # -- counts

    @property
    def allocated(self) -> int:
        return len(self._refcounts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, scales included."""
        return block_bytes(self.stores, self.block_size) // self.block_size

    @property
    def format_name(self) -> str:
        """The KV format as reports show it: the dtype of keys and values that are not quantized."""
        return str(self.dtype).removeprefix("torch.") if self.kv_format == AUTO else self.kv_format

    @property
    def token_capacity(self) -> int:
        """The longest sequence that the budget allows."""
        return self.geometry.tokens_in(self.capacity)

    def tokens_at(self, context: int) -> int:
        """Tokens that fit in sequences of `context` tokens each."""
        return self.geometry.tokens_at(context, self.capacity)

    @property
    def obtainable(self) -> int:
        """Blocks available without eviction: free blocks, and blocks of slabs not yet allocated."""
        return len(self._free) + self.capacity - self.allocated

    @property
    def evictable(self) -> int:
        return self._evictable

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def cached(self, block: int) -> bool:
        return self._cached[block]

    def private(self, block: int) -> bool:
        """True if the one table that points at the block may write into it."""
        return self._refcounts[block] == 1 and not self._cached[block]

    def stats(self) -> PoolStats:
        live = self.allocated - len(self._free)
        return PoolStats(
            capacity=self.capacity,
            allocated=self.allocated,
            live=live,
            evictable=self._evictable,
            free=len(self._free),
            block_bytes=self.block_bytes,
            reserved_bytes=sum(slab.bytes for slab in self.slabs),
            used_bytes=live * self.block_bytes,
            token_bytes=self.token_bytes,
            kv_format=self.format_name,
            block_size=self.block_size,
            ended=self.ended,
        )

    # -- allocation

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks with refcount 1, following block `after` where possible.

        Neighbouring blocks are read in place, without a gather.
        """
        if count > self.obtainable:
            raise OutOfBlocks(f"{count} blocks requested, {self.obtainable} of {self.capacity} available")
        while len(self._free) < count:
            self._grow()
        blocks: list[int] = []
        for _ in range(count):
            after = self._take(after)
            blocks.append(after)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Increment the refcount of these live blocks."""
        for block in blocks:
            self._require_live(block)
            if self._refcounts[block] == 0:
                self._evictable -= 1
            self._refcounts[block] += 1

    def end(self, blocks: Sequence[int]) -> None:
        """Release blocks that are behind a sliding window, and count them."""
        self.release(blocks)
        self.ended += len(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Decrement the refcount of these blocks; at 0 a block is evictable if cached, otherwise free."""
        for block in blocks:
            if self._refcounts[block] < 1:
                raise AssertionError(f"block {block} is released but its refcount is 0")
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                if self._cached[block]:
                    self._evictable += 1
                else:
                    self._put_back(block)

    def cache(self, block: int) -> None:
        """Keep a live block for its contents, at any refcount."""
        self._require_live(block)
        if self._cached[block]:
            raise AssertionError(f"block {block} is cached twice")
        self._cached[block] = True
        self._evictable += self._refcounts[block] == 0

    def uncache(self, block: int) -> None:
        """Stop keeping a block for its contents; it becomes free at refcount 0."""
        if not self._cached[block]:
            raise AssertionError(f"block {block} is dropped but was not cached")
        self._cached[block] = False
        if self._refcounts[block] == 0:
            self._evictable -= 1
            self._put_back(block)

    # -- contents

    def planes(self, layer: int) -> Planes:
        """The planes of a layer in a pool of one slab, as CUDA kernels take them."""
        [slab] = self.slabs
        return slab.layers[layer]

    def runs(self, blocks: Sequence[int], first: int, end: int) -> list[Run]:
        """The slots `first : end` of a block table as runs of neighbouring slots."""
        return find_runs(blocks, first, end, self.block_size, self.slab_blocks)

    def write(
        self,
        layer: int,
        runs: Sequence[Run],
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    ) -> None:
        """Store the keys and values of as many tokens as the runs have slots, in their order.

        Blocks whose last slot is written get their summaries.
        """
        store, first = self.stores[layer], 0
        for run in runs:
            at = slice(first, first + len(run.slots))
            slots = torch.arange(run.start, run.start + len(run.slots), device=self.device)
            store.write(self.slabs[run.slab].layers[layer], slots, key[at], value[at])
            first = at.stop
        self.summarize(layer, runs)

    def summarize(self, layer: int, runs: Sequence[Run]) -> None:
        """Write the summaries of the blocks that these newly written slots fill, if the layer has any."""
        if self.stores[layer].summarized:
            for slab, blocks in filled_in(runs, self.block_size).items():
                at = torch.tensor(blocks, device=self.device)
                summarize(self.stores[layer], self.slabs[slab].layers[layer], at)

    def gather(self, layer: int, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the runs' slots: a view of a single run, a copy of several.

        [slots, kv_heads, key_dim] and [slots, kv_heads, value_dim]
        """
        return self._join(layer, runs, self.stores[layer].gather)

    def read(self, layer: int, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in the store's basis (see `LayerStore.read`)."""
        return self._join(layer, runs, self.stores[layer].read)

    def zero(self) -> None:
        """Set everything stored so far to zero."""
        for slab in self.slabs:
            for planes in slab.places:
                for tensor in planes.blocks.values():
                    tensor.zero_()

    def copy_block(self, source: int, target: int, slots: int) -> None:
        """Copy the first `slots` slots of one block to another, in every layer of its group."""
        from_slab, from_index = divmod(source, self.slab_blocks)
        to_slab, to_index = divmod(target, self.slab_blocks)
        read, write = self.slabs[from_slab].places, self.slabs[to_slab].places
        for store, one, other in zip(self._places, read, write, strict=True):
            store.copy_block(one, from_index, other, to_index, slots)

    # -- invariants

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        free = {b for b in range(self.allocated) if self._refcounts[b] == 0 and not self._cached[b]}
        evictable = sum(1 for b in range(self.allocated) if self._refcounts[b] == 0 and self._cached[b])
        stats = self.stats()
        problems = {
            "a refcount is negative": any(n < 0 for n in self._refcounts),
            "the free set is not the blocks with refcount 0 that are not cached": free != self._free,
            "a free block is missing from the heap": not self._free <= set(self._heap),
            "the evictable count is wrong": evictable != self._evictable,
            "more blocks than the budget allows": self.allocated > self.capacity,
            "free + live is not allocated": stats.free + stats.live != stats.allocated,
            "slabs and block numbers disagree": sum(s.blocks for s in self.slabs) != self.allocated,
            "reserved bytes are not the slabs' bytes": stats.reserved_bytes
            != (self.allocated + (self.spare and bool(self.slabs))) * self.block_bytes,
        }
        broken = [name for name, is_broken in problems.items() if is_broken]
        if broken:
            raise AssertionError("pool: " + "; ".join(broken))

    # -- internals

    def _join(
        self,
        layer: int,
        runs: Sequence[Run],
        get: Callable[[Planes, slice], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            get(self.slabs[run.slab].layers[layer], slice(run.start, run.start + len(run.slots)))
            for run in runs
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([key for key, _ in parts]), torch.cat([value for _, value in parts])

    def _require_live(self, block: int) -> None:
        if not 0 <= block < self.allocated or block in self._free:
            raise AssertionError(f"block {block} is not live")

    def _grow(self) -> None:
        first = self.allocated
        blocks = min(self.slab_blocks, self.capacity - first)
        sizes = blocks, self.block_size, self.device
        self.slabs.append(Slab(self._places, self._place_of, *sizes, spare=self.spare and not self.slabs))
        self._refcounts.extend([0] * blocks)
        self._cached.extend([False] * blocks)
        for block in range(first, first + blocks):
            self._put_back(block)

    def _take(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            block = after + 1
        else:
            block = heapq.heappop(self._heap)
            while block not in self._free:
                block = heapq.heappop(self._heap)
        self._free.remove(block)
        self._refcounts[block] = 1
        return block

    def _put_back(self, block: int) -> None:
        self._free.add(block)
        heapq.heappush(self._heap, block)
        if len(self._heap) > 2 * len(self._free) + 64:
            self._heap = sorted(self._free)
