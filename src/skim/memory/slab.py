"""A slab: the memory of consecutive blocks. The pool grows slab by slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skim.memory.store import LayerStore, Planes


class Slab:
    """A run of consecutive blocks: one allocation per place in a block and plane. It never moves."""

    def __init__(
        self,
        stores: Sequence[LayerStore],  # of the places in a block
        places: Sequence[int],  # of each layer
        blocks: int,
        block_size: int,
        device: torch.device,
        spare: bool = False,  # add a block of zeros
    ) -> None:
        self.blocks = blocks
        self.places = [Planes(store.planes, blocks + spare, block_size, device) for store in stores]
        for tensor in (tensor for planes in self.places for tensor in planes.blocks.values() if spare):
            tensor[blocks].zero_()
        self.layers = [self.places[place] for place in places]
        """The planes of each layer. Layers of different groups may have the same: they have other blocks."""

    @property
    def bytes(self) -> int:
        return sum(planes.bytes for planes in self.places)
