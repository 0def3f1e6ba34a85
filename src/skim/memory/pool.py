"""The paged pool: fixed-size blocks of keys and values, and who uses each of them.

A block has *users* (block tables that point at it) and may be *held* (kept for its contents by the
prefix tree). A block with neither is free; a held block without users is cold and may be reclaimed by
its holder. The pool counts; it never decides what to evict.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from skim.errors import ConfigError

SLAB_BYTES = 512 * 2**20


class OutOfBlocks(Exception):
    """The pool cannot give the blocks asked for. Nothing was changed."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores for a token, and how far back it reads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # the last positions a query reads, its own among them; None for all

    @property
    def width(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class PoolStats:
    """Block counts and real bytes at one moment."""

    capacity: int  # blocks the budget allows
    allocated: int  # blocks that exist in slabs
    live: int  # blocks with a user or a holder
    cold: int  # live blocks that only the prefix tree keeps
    free: int  # allocated blocks that are not live
    block_bytes: int  # one block over all layers
    reserved_bytes: int  # storage of every slab
    used_bytes: int  # storage of live blocks


class Slab:
    """A run of consecutive blocks in one allocation per layer and kind; it never moves."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def storage(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(blocks, block_size, heads, dim, dtype=dtype, device=device)

        self.blocks = blocks
        self.keys = [storage(layer.kv_heads, layer.key_dim) for layer in layers]
        self.values = [storage(layer.kv_heads, layer.value_dim) for layer in layers]
        self.key_slots = [keys.flatten(0, 1) for keys in self.keys]  # views: [slots, kv_heads, key_dim]
        self.value_slots = [values.flatten(0, 1) for values in self.values]

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values))


class KVPool:
    """Blocks `[blocks, block_size, kv_heads, head_dim]` per layer, handed out by number.

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
    ) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.block_bytes = block_size * sum(layer.width for layer in self.layers) * dtype.itemsize
        self.capacity = budget_bytes // self.block_bytes
        if self.capacity < 1:
            raise ConfigError(
                f"kv_memory of {budget_bytes:,} bytes holds no block: one block of {block_size} tokens takes "
                f"{self.block_bytes:,} bytes in {len(self.layers)} layers; raise kv_memory, or lower "
                "block_size",
                fields=("kv_memory", "block_size"),
            )
        if slab_bytes is None:
            slab_bytes = budget_bytes if device.type == "cuda" else SLAB_BYTES
        self.slab_blocks = min(self.capacity, max(1, slab_bytes // self.block_bytes))
        self.slabs: list[Slab] = []
        self._users: list[int] = []
        self._held: list[bool] = []
        self._free: set[int] = set()
        self._heap: list[int] = []  # candidates for the lowest free block; may hold stale entries
        self._cold = 0

    # -- what there is

    @property
    def allocated(self) -> int:
        return len(self._users)

    @property
    def token_capacity(self) -> int:
        """Tokens the budget allows."""
        return self.capacity * self.block_size

    @property
    def obtainable(self) -> int:
        """Blocks to be had without reclaiming anything: free ones and those of slabs not yet made."""
        return len(self._free) + self.capacity - self.allocated

    @property
    def cold(self) -> int:
        return self._cold

    def users(self, block: int) -> int:
        return self._users[block]

    def held(self, block: int) -> bool:
        return self._held[block]

    def private(self, block: int) -> bool:
        """Whether the block's one user may write into it."""
        return self._users[block] == 1 and not self._held[block]

    def stats(self) -> PoolStats:
        live = self.allocated - len(self._free)
        return PoolStats(
            capacity=self.capacity,
            allocated=self.allocated,
            live=live,
            cold=self._cold,
            free=len(self._free),
            block_bytes=self.block_bytes,
            reserved_bytes=sum(slab.bytes for slab in self.slabs),
            used_bytes=live * self.block_bytes,
        )

    # -- taking and giving back

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one user each, following block `after` where they can.

        Neighbouring blocks are read in place, without a gather, so runs are worth having.
        """
        if count > self.obtainable:
            raise OutOfBlocks(f"{count} blocks wanted, {self.obtainable} of {self.capacity} to be had")
        while len(self._free) < count:
            self._grow()
        blocks: list[int] = []
        for _ in range(count):
            after = self._take(after)
            blocks.append(after)
        return blocks

    def use(self, blocks: Iterable[int]) -> None:
        """One more user for each of these live blocks."""
        for block in blocks:
            self._require_live(block)
            if self._users[block] == 0:
                self._cold -= 1
            self._users[block] += 1

    def unuse(self, blocks: Iterable[int]) -> None:
        """One user fewer for each; what nobody uses or holds becomes free."""
        for block in blocks:
            if self._users[block] < 1:
                raise AssertionError(f"block {block} is given back but has no user")
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._held[block]:
                    self._cold += 1
                else:
                    self._put_back(block)

    def hold(self, block: int) -> None:
        """Keep the block for its contents, whoever uses it."""
        self._require_live(block)
        if self._held[block]:
            raise AssertionError(f"block {block} is held twice")
        self._held[block] = True
        self._cold += self._users[block] == 0

    def unhold(self, block: int) -> None:
        if not self._held[block]:
            raise AssertionError(f"block {block} is dropped but was not held")
        self._held[block] = False
        if self._users[block] == 0:
            self._cold -= 1
            self._put_back(block)

    def copy_head(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of one block to another, in every layer."""
        from_slab, from_index = divmod(source, self.slab_blocks)
        to_slab, to_index = divmod(target, self.slab_blocks)
        read, write = self.slabs[from_slab], self.slabs[to_slab]
        for source_tensors, target_tensors in ((read.keys, write.keys), (read.values, write.values)):
            for one, other in zip(source_tensors, target_tensors, strict=True):
                other[to_index, :tokens].copy_(one[from_index, :tokens])

    # -- invariants

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        free = {b for b in range(self.allocated) if self._users[b] == 0 and not self._held[b]}
        cold = sum(1 for b in range(self.allocated) if self._users[b] == 0 and self._held[b])
        stats = self.stats()
        problems = {
            "a block has a negative number of users": any(n < 0 for n in self._users),
            "the free set is not the blocks without user and holder": free != self._free,
            "a free block is missing from the heap": not self._free <= set(self._heap),
            "the cold count is wrong": cold != self._cold,
            "more blocks than the budget allows": self.allocated > self.capacity,
            "free + live is not allocated": stats.free + stats.live != stats.allocated,
            "slabs and block numbers disagree": sum(s.blocks for s in self.slabs) != self.allocated,
            "reserved bytes are not the slabs' bytes": stats.reserved_bytes
            != self.allocated * self.block_bytes,
        }
        broken = [name for name, is_broken in problems.items() if is_broken]
        if broken:
            raise AssertionError("pool: " + "; ".join(broken))

    # -- inside

    def _require_live(self, block: int) -> None:
        if not 0 <= block < self.allocated or block in self._free:
            raise AssertionError(f"block {block} is not live")

    def _grow(self) -> None:
        first = self.allocated
        blocks = min(self.slab_blocks, self.capacity - first)
        self.slabs.append(Slab(self.layers, blocks, self.block_size, self.dtype, self.device))
        self._users.extend([0] * blocks)
        self._held.extend([False] * blocks)
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
        self._users[block] = 1
        return block

    def _put_back(self, block: int) -> None:
        self._free.add(block)
        heapq.heappush(self._heap, block)
        if len(self._heap) > 2 * len(self._free) + 64:
            self._heap = sorted(self._free)
