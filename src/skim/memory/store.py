"""Storage of one layer: named planes, with their bytes, writes, reads and copies.

A plane is one tensor with an entry for every slot (keys, values, codes, scales) or for every block. The pool
adds up planes and knows nothing of formats. `formats.py` names the formats; backends say which they read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class LayerShape:
    """The keys and values of one attention layer, and its sliding window."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # sliding window: positions a query reads, its own included; None for all


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer: `shape` elements for each slot, or for each block."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_block: bool = False
    derived: bool = False
    """True if it follows from the other planes, so that it need not be saved."""

    def bytes(self, block_size: int) -> int:
        """Bytes in one block of `block_size` slots."""
        return self.read_bytes(block_size, block_size)

    def read_bytes(self, slots: int, block_size: int) -> int:
        """Bytes read for `slots` neighbouring slots: an entry for each slot, or for each of their blocks."""
        entries = -(-slots // block_size) if self.per_block else slots
        return prod(self.shape) * self.dtype.itemsize * entries


class Planes:
    """The planes of one layer in one slab. Their memory never moves."""

    def __init__(self, planes: Sequence[Plane], blocks: int, block_size: int, device: torch.device) -> None:
        self.blocks: dict[str, torch.Tensor] = {}
        """By name: [blocks, block_size, *shape] for a plane per slot, [blocks, *shape] for one per block."""
        self.slots: dict[str, torch.Tensor] = {}
        """Views of the planes per slot: [slots, *shape]."""
        self.block_size = block_size
        for plane in planes:
            sizes = (blocks,) if plane.per_block else (blocks, block_size)
            tensor = torch.empty(*sizes, *plane.shape, dtype=plane.dtype, device=device)
            self.blocks[plane.name] = tensor
            if not plane.per_block:
                self.slots[plane.name] = tensor.flatten(0, 1)

    @classmethod
    def over(cls, slots: Mapping[str, torch.Tensor]) -> Planes:
        """Planes per slot over existing tensors, by name. [slots, *shape]"""
        made = cls((), 0, 0, torch.device("cpu"))
        made.slots = dict(slots)
        return made

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.blocks.values())


class LayerStore(ABC):
    """Storage format of one layer's keys and values. Holds no memory itself: methods take `Planes`."""

    shape: LayerShape
    planes: tuple[Plane, ...]
    summarized: bool = False
    """True if its full blocks have summaries (`memory/summary.py`)."""
    exact: bool = True
    """True if reads return exactly what was written. Otherwise a chunk reads its own keys as stored."""

    def bytes(self, block_size: int) -> int:
        """Bytes in one block of `block_size` slots."""
        return sum(plane.bytes(block_size) for plane in self.planes)

    def read_bytes(self, slots: int, block_size: int) -> int:
        """Bytes read for `slots` neighbouring slots, the first one at the beginning of a block."""
        return sum(plane.read_bytes(slots, block_size) for plane in self.planes)

    @abstractmethod
    def write(
        self,
        planes: Planes,
        slots: torch.Tensor,  # [tokens] slots of the slab
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    ) -> None:
        """Store the keys and values of new tokens."""

    @abstractmethod
    def gather(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some slots of the slab. [slots, kv_heads, dim]

        Views where `at` is a slice and the format allows it, otherwise copies.
        """

    def read(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as stored, for queries from `turn_query`; pass the result of attention to `turn_out`."""
        return self.gather(planes, at)

    def turn_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries for keys from `read`. [tokens, heads, key_dim]"""
        return query

    def turn_out(self, out: torch.Tensor) -> torch.Tensor:
        """The result of attention, from weighted sums of values from `read`. [tokens, heads, value_dim]"""
        return out

    def copy_block(self, source: Planes, block: int, target: Planes, to: int, slots: int) -> None:
        """Copy the first `slots` slots of a block, and all of its planes per block, to another block."""
        for plane in self.planes:
            read, write = source.blocks[plane.name][block], target.blocks[plane.name][to]
            if plane.per_block:
                write.copy_(read)
            else:
                write[:slots].copy_(read[:slots])


class PlainStore(LayerStore):
    """Keys and values as the model computes them."""

    KEY, VALUE = "key", "value"

    def __init__(self, shape: LayerShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.planes = (
            Plane(self.KEY, (shape.kv_heads, shape.key_dim), dtype),
            Plane(self.VALUE, (shape.kv_heads, shape.value_dim), dtype),
        )

    def write(self, planes: Planes, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        planes.slots[self.KEY].index_copy_(0, slots, key)
        planes.slots[self.VALUE].index_copy_(0, slots, value)

    def gather(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return planes.slots[self.KEY][at], planes.slots[self.VALUE][at]


def block_bytes(stores: Sequence[LayerStore], block_size: int) -> int:
    """Bytes of one block over all layers: the one source of bytes per token."""
    return sum(store.bytes(block_size) for store in stores)
