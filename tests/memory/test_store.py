"""The contract of what a layer stores: every format is written, gathered and copied alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from skim.bench.work import kv_bytes
from skim.memory import pool as pools
from skim.memory.formats import make_stores
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, LayerStore, PlainStore, Plane, Planes

BLOCK = 4
SHAPES = (LayerShape(2, 8, 4), LayerShape(1, 4, 4, window=6))
CPU = torch.device("cpu")


class EighthsStore(LayerStore):
    """A format of several planes, one of them per block: whole codes, a scale per slot, writes per block."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        self.planes = (
            Plane("key_codes", (shape.kv_heads, shape.key_dim), torch.int8),
            Plane("value_codes", (shape.kv_heads, shape.value_dim), torch.int8),
            Plane("scale", (), torch.float32),
            Plane("writes", (), torch.int32, per_block=True),
        )

    def write(self, planes: Planes, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        planes.slots["scale"][slots] = 0.125
        planes.slots["key_codes"][slots] = (key * 8).to(torch.int8)
        planes.slots["value_codes"][slots] = (value * 8).to(torch.int8)
        planes.blocks["writes"].index_add_(0, slots // BLOCK, torch.ones(len(slots), dtype=torch.int32))

    def gather(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = planes.slots["scale"][at][:, None, None]
        return planes.slots["key_codes"][at] * scale, planes.slots["value_codes"][at] * scale


def make_eighths(layers: Sequence[LayerShape], *_: object, **__: object) -> tuple[LayerStore, ...]:
    return tuple(EighthsStore(shape) for shape in layers)


FORMATS = {"plain": make_stores, "eighths": make_eighths}


@pytest.fixture(params=FORMATS)
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KVPool:
    monkeypatch.setattr(pools, "make_stores", FORMATS[request.param])
    made = KVPool.of_blocks(SHAPES, 20, block_size=BLOCK, dtype=torch.float32, device=CPU, slab_blocks=6)
    assert (made.capacity, made.slab_blocks) == (20, 6)
    made.allocate(20)
    for slab in made.slabs:
        for planes in slab.layers:
            for tensor in planes.blocks.values():
                tensor.zero_()
    return made


def eighths(*sizes: int) -> torch.Tensor:
    """Random multiples of 1/8, which every format here stores exactly."""
    return torch.randint(-8, 9, sizes) / 8


def tokens(layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = SHAPES[layer]
    return eighths(count, shape.kv_heads, shape.key_dim), eighths(count, shape.kv_heads, shape.value_dim)


def test_blocks_take_the_bytes_of_their_planes(pool: KVPool) -> None:
    planes = [plane for store in pool.stores for plane in store.planes]
    assert pool.block_bytes == sum(plane.bytes(BLOCK) for plane in planes)
    assert pool.stats().reserved_bytes == 20 * pool.block_bytes
    pool.check()


def test_a_plain_slot_takes_its_keys_and_values() -> None:
    store = PlainStore(LayerShape(2, 8, 4), torch.bfloat16)
    assert store.bytes(1) == 2 * (8 + 4) * 2
    assert store.bytes(16) == 16 * store.bytes(1)


def test_a_read_counts_planes_per_slot_and_planes_per_block() -> None:
    shape = LayerShape(2, 8, 4)
    slot, block = 2 * (8 + 4) + 4, 4  # codes and a scale per slot, a count per block
    store = EighthsStore(shape)
    assert [store.read_bytes(slots, BLOCK) for slots in (0, 1, 4, 5, 10)] == [
        0,
        slot + block,
        4 * slot + block,
        5 * slot + 2 * block,
        10 * slot + 3 * block,
    ]
    assert store.read_bytes(BLOCK, BLOCK) == store.bytes(BLOCK)
    assert kv_bytes([store, EighthsStore(replace(shape, window=6))], 10, BLOCK) == 16 * slot + 5 * block


@pytest.mark.parametrize("seed", range(5))
def test_writes_are_gathered_from_scattered_blocks(pool: KVPool, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table = rng.sample(range(20), 9)
    for layer in range(len(SHAPES)):
        expected = [torch.zeros_like(part) for part in tokens(layer, 9 * BLOCK)]
        for _ in range(6):
            first = rng.randrange(9 * BLOCK)
            new = tokens(layer, rng.randrange(1, 9 * BLOCK - first + 1))
            pool.write(layer, pool.runs(table, first, first + len(new[0])), *new)
            for whole, part in zip(expected, new, strict=True):
                whole[first : first + len(part)] = part
        first = rng.randrange(9 * BLOCK)
        found = pool.gather(layer, pool.runs(table, first, 9 * BLOCK))
        for whole, part in zip(expected, found, strict=True):
            assert torch.equal(whole[first:], part)


@pytest.mark.parametrize("slots", [1, 3, BLOCK])
def test_a_copied_block_has_the_first_slots_of_its_source_in_every_layer(pool: KVPool, slots: int) -> None:
    written = [tokens(layer, BLOCK) for layer in range(len(SHAPES))]
    for layer, new in enumerate(written):
        pool.write(layer, pool.runs([2], 0, BLOCK), *new)
    pool.copy_block(2, 17, slots)  # into another slab
    for layer, new in enumerate(written):
        for source, copied in zip(new, pool.gather(layer, pool.runs([17], 0, BLOCK)), strict=True):
            assert torch.equal(copied[:slots], source[:slots])
            assert not copied[slots:].any()
        for planes, at in ((pool.slabs[0].layers[layer], 2), (pool.slabs[2].layers[layer], 17 - 12)):
            if "writes" in planes.blocks:
                assert planes.blocks["writes"][at] == BLOCK
