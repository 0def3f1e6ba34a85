"""Steps over block tables whose blocks ended behind sliding windows, compared with a pool that keeps them.

Blocks that ended hold NaN, so reading one is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from skim.attention.backend import Backend
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.formats import make_stores
from skim.memory.groups import ABSENT, group_layers
from skim.memory.manager import BlockTable, MemoryManager
from skim.memory.pool import KVPool
from skim.memory.prefix import OFFSET_SHIFT, Namespace
from skim.memory.store import LayerShape

HEADS, DIM = 2, 16
WINDOWS = [None, 20, 20, 7]  # of the layers


class World:
    """Sequences in two pools: one whose blocks end, and one that keeps them."""

    def __init__(
        self, seed: int, device: torch.device, block_size: int = 4, in_one_slab: bool = True
    ) -> None:
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        shapes = [LayerShape(HEADS, DIM, DIM, window) for window in WINDOWS]
        groups = group_layers(make_stores(shapes, torch.float32), 10**6)
        self.device = device
        self.ends, self.keeps = (
            MemoryManager(
                KVPool.of_blocks(
                    shapes,
                    1000,
                    block_size=block_size,
                    dtype=torch.float32,
                    device=device,
                    slab_blocks=1000 if in_one_slab else 50,
                    groups=each,
                ),
                prefix_caching=False,
            )
            for each in (groups, None)
        )
        for memory in (self.ends, self.keeps):
            every = memory.pool.allocate(memory.pool.capacity)
            for slab in memory.pool.slabs:
                for planes in slab.places:
                    for tensor in planes.blocks.values():
                        tensor[: slab.blocks].fill_(float("nan"))
            memory.pool.release(every)
        self.sequences: list[tuple[BlockTable, BlockTable, list[int] | None]] = []

    def add(self, gaps: bool) -> None:
        positions = None
        if gaps:
            positions = sorted(self.rng.sample(range(900), 500))
        self.sequences.append((self.ends.open(), self.keeps.open(), positions))

    def step(self, counts: list[int], make: Callable[[KVPool], Backend]) -> None:
        """Run a step of as many tokens of each sequence, in all layers, in both pools."""
        rows: list[list[Row]] = [[], []]
        for (ends, keeps, positions), count in zip(self.sequences, counts, strict=True):
            for index, (memory, table) in enumerate(((self.ends, ends), (self.keeps, keeps))):
                memory.extend(table, count)
                rows[index].append(
                    Row(
                        Role.DECODE if count == 1 else Role.PREFILL,
                        table.tables[0],
                        table.length,
                        count,
                        positions,
                        positions is not None,
                        others=table.tables[1:],
                    )
                )
        one = Step(self.ends.pool, tuple(rows[0]), make(self.ends.pool))
        other = Step(self.keeps.pool, tuple(rows[1]), TorchBackend())
        tokens = sum(counts)
        for layer, window in enumerate(WINDOWS):
            sizes = (tokens, 2 * HEADS, DIM), (tokens, HEADS, DIM), (tokens, HEADS, DIM)
            new = [torch.randn(size, device=self.device) for size in sizes]
            call = AttentionCall(DIM**-0.5, window=window)
            got, expected = one.attend(layer, *new, call), other.attend(layer, *new, call)
            assert torch.isfinite(got).all()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for (ends, keeps, positions), count in zip(self.sequences, counts, strict=True):
            ends.length += count
            keeps.length += count
            keys = [0] * ends.length
            if positions is not None:
                keys = [(positions[i] - i) << OFFSET_SHIFT for i in range(ends.length)]
            before = [set(table) for table in ends.tables]
            self.ends.slide(ends, ends.length, keys, Namespace(), publishable=0)
            for old, table in zip(before, ends.tables, strict=True):
                self.spoil(old - set(table) - {ABSENT})

    def spoil(self, blocks: set[int]) -> None:
        pool = self.ends.pool
        for block in blocks:
            slab, index = divmod(block, pool.slab_blocks)
            for planes in pool.slabs[slab].places:
                for tensor in planes.blocks.values():
                    tensor[index] = float("nan")


def check_random_steps(
    make: Callable[[KVPool], Backend], device: torch.device, seed: int, steps: int, in_one_slab: bool
) -> None:
    """Chunks and decode rows of three sequences; the positions of one have gaps."""
    world = World(seed, device, block_size=[4, 1, 16][seed], in_one_slab=in_one_slab)
    for gaps in (False, True, False):
        world.add(gaps)
    for _ in range(steps):
        world.step([world.rng.choice([1, 1, 2, 17]) for _ in world.sequences], make)
    world.step([30, 1, 40], make)
    world.step([1, 30, 1], make)
    assert all(any(ends.starts) for ends, _, _ in world.sequences)
    world.ends.check()
