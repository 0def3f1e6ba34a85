"""Layer groups, and blocks that end behind sliding windows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
import torch

from skim.memory import groups
from skim.memory.formats import make_stores
from skim.memory.groups import ABSENT, Geometry, LayerGroup, first_needed, group_layers, one_group
from skim.memory.manager import BlockTable, MemoryManager
from skim.memory.pool import KVPool, OutOfBlocks
from skim.memory.prefix import OFFSET_SHIFT, Namespace
from skim.memory.store import LayerShape
from skim.models.shapes import shape_config

CPU = torch.device("cpu")
DENSE = Namespace()
CONTEXT = 128 * 1024


def gemma3_4b(heads: int = 4, dim: int = 256) -> list[LayerShape]:
    """34 layers; every sixth reads everything, the others 1024 positions."""
    return [LayerShape(heads, dim, dim, None if i % 6 == 5 else 1024) for i in range(34)]


def test_the_layers_are_those_of_the_shape() -> None:
    config = shape_config("gemma-3-4b").get_text_config()
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    heads, dim = config.num_key_value_heads, config.head_dim
    assert gemma3_4b() == [LayerShape(heads, dim, dim, window) for window in windows]


def groups_of(windows: Sequence[int | None], longest: int = CONTEXT) -> tuple[LayerGroup, ...]:
    shapes = [LayerShape(1, 8, 8, window) for window in windows]
    return group_layers(make_stores(shapes, torch.float32), longest)


# -- the groups of a model


def test_layers_are_grouped_by_window_in_groups_of_the_same_size() -> None:
    found = group_layers(make_stores(gemma3_4b(), torch.bfloat16), CONTEXT)
    assert [group.window for group in found] == [None] + [1024] * 6
    assert found[0].layers == (5, 11, 17, 23, 29)
    assert [len(group.layers) for group in found] == [5] * 6 + [4]
    assert sorted(layer for group in found for layer in group.layers) == list(range(34))


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 4, [(None, 4)]),
        ([128] * 4, [(128, 4)]),  # all layers have the same window: one group, whose blocks end
        ([128, None] * 12, [(None, 12), (128, 12)]),
        ([None, 64, 128], [(None, 1), (64, 1), (128, 1)]),
        ([None] + [128] * 31, [(None, 1)] + [(128, 5)] * 6 + [(128, 1)]),  # at most eight groups
        ([None, CONTEXT], [(None, 2)]),  # no sequence is longer than the window
    ],
)
def test_the_number_of_groups_and_their_layers(
    windows: list[int | None], expected: list[tuple[int | None, int]]
) -> None:
    assert [(group.window, len(group.layers)) for group in groups_of(windows)] == expected


def test_layers_whose_blocks_differ_in_size_stay_in_one_group() -> None:
    coded = make_stores(gemma3_4b(), torch.bfloat16, "int8")  # full attention only
    assert group_layers(coded, CONTEXT) == one_group(34)
    shapes = [LayerShape(1, 8, 8), LayerShape(1, 16, 16, 64)]
    assert group_layers(make_stores(shapes, torch.float32), CONTEXT) == one_group(2)


# -- decisions


def test_the_first_needed_slot_is_the_first_that_any_later_query_reads() -> None:
    rng = random.Random(0)
    for _ in range(500):
        positions = sorted(rng.sample(range(80), rng.randrange(1, 30)))
        length, window = rng.randrange(len(positions) + 1), rng.randrange(1, 40)
        end = positions[length - 1] + 1 if length else 0
        read = [slot for slot in range(length) if positions[slot] > end - window]
        assert first_needed(length, window, positions.__getitem__) == (read[0] if read else length)
        assert first_needed(length, window) == min(length, max(0, length - window + 1))
    assert first_needed(7, None) == 0


def test_a_sequence_never_holds_more_blocks_than_stated() -> None:
    rng = random.Random(1)
    for _ in range(40):
        size, windows = rng.choice([1, 4, 16]), [None, *rng.choices([1, 5, 30, 100], k=2)]
        pool = KVPool.of_blocks(
            [LayerShape(1, 1, 1, window) for window in windows],
            3 * 700 // size + 60,
            block_size=size,
            dtype=torch.float32,
            device=CPU,
            groups=groups_of(windows),
        )
        memory = MemoryManager(pool)
        table, tokens = memory.open(), [rng.randrange(9) for _ in range(700)]
        while table.length < 600:
            count = rng.randrange(1, groups.LEAST_CHUNK + 1)
            memory.extend(table, count)
            assert table.held <= pool.geometry.blocks_of(table.length + count)
            table.length += count
            memory.slide(table, table.length, tokens, DENSE, publishable=0)
        memory.check()


@pytest.mark.parametrize("windows", [(None,), (None, 20), (None, 20, 90, 90), (20,)])
def test_the_longest_sequence_is_the_inverse_of_the_blocks_it_takes(windows: tuple[int | None, ...]) -> None:
    geometry = Geometry(4, windows)
    for whole in (False, True):
        for blocks in range(1, 400, 3):
            longest = geometry.tokens_in(blocks, whole=whole)
            assert geometry.blocks_of(longest, whole=whole) <= blocks
            if longest != groups.UNBOUNDED:
                assert geometry.blocks_of(longest + 1, whole=whole) > blocks


# -- capacity


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float32])
def test_gemma_3_4b_holds_six_times_the_tokens_at_128k(form: torch.dtype) -> None:
    shapes, budget = gemma3_4b(), 40 * 2**30

    def capacity(grouping: tuple[LayerGroup, ...]) -> KVPool:
        return KVPool(shapes, block_size=16, budget_bytes=budget, dtype=form, device=CPU, groups=grouping)

    kept = capacity(one_group(34))
    ends = capacity(group_layers(make_stores(shapes, form), CONTEXT))
    assert ends.tokens_at(CONTEXT) >= 6 * kept.tokens_at(CONTEXT)
    assert ends.token_capacity >= 6 * kept.token_capacity
    assert ends.tokens_at(512) >= 0.96 * kept.tokens_at(512)  # one unused place of 35


def test_four_sequences_of_128k_fit_where_one_did() -> None:
    """The same with real tables: layers and windows of Gemma 3 4B, one number per key."""
    shapes = gemma3_4b(1, 1)
    made = group_layers(make_stores(shapes, torch.float32), CONTEXT)
    one = KVPool.of_blocks(shapes, CONTEXT // 16, block_size=16, dtype=torch.float32, device=CPU)
    pool = KVPool(
        shapes,
        block_size=16,
        budget_bytes=one.capacity * one.block_bytes,
        dtype=torch.float32,
        device=CPU,
        groups=made,
    )
    memory = MemoryManager(pool, prefix_caching=False)
    for number in range(4):
        table = memory.open()
        while table.length < CONTEXT:
            memory.extend(table, 2048)
            table.length += 2048
            memory.slide(table, table.length, range(CONTEXT), DENSE, publishable=0)
        assert len(memory.tables) == number + 1
    memory.check()
    assert pool.stats().reserved_bytes <= one.capacity * one.block_bytes


# -- tables, forks and the prefix tree


class World:
    """Tables with known contents: in every layer, the key of a slot is its token and position."""

    def __init__(self, seed: int, windows: Sequence[int | None], blocks: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.windows = windows
        self.pool = KVPool.of_blocks(
            [LayerShape(1, 2, 1, window) for window in windows],
            blocks,
            block_size=block_size,
            dtype=torch.float32,
            device=CPU,
            slab_blocks=self.rng.choice([3, blocks]),
            groups=groups_of(windows),
        )
        self.memory = MemoryManager(self.pool)
        self.tables: list[tuple[BlockTable, list[int], bool]] = []  # with their prefix-tree keys
        self.texts: list[list[int]] = []
        self.resumed = self.cut = 0

    def text(self) -> list[int]:
        """The keys of a sequence: a new one, or one that begins like another. Some have gaps."""
        rng = self.rng
        if self.texts and rng.random() < 0.7:
            old = rng.choice(self.texts)
            begin = old[: rng.randrange(len(old) + 1)]
        else:
            begin = []
        keys, offset = list(begin), begin[-1] >> OFFSET_SHIFT if begin else 0
        for _ in range(rng.randrange(1, 40)):
            offset += rng.choice([0] * 20 + [1, 7])
            keys.append(rng.randrange(4) + (offset << OFFSET_SHIFT))
        self.texts.append(keys)
        return keys

    def open(self) -> None:
        keys, whole = self.text(), self.rng.random() < 0.15
        match = self.memory.match(keys, DENSE, whole=whole)
        longest = len(self.memory.tree.path(keys, DENSE)) * self.pool.block_size
        self.cut += match.length + self.pool.block_size <= longest
        if match.length:
            self.memory.tree.touch(keys, DENSE, match.length)
        table = self.memory.open(match, whole=whole)
        self.resumed += any(table.starts)
        self.tables.append((table, keys, whole))

    def step(self) -> None:
        if not self.tables:
            return
        table, keys, _ = self.rng.choice(self.tables)
        count = min(len(keys) - table.length, self.rng.randrange(1, 12))
        if self.memory.blocks_needed(table, count) > self.memory.available:
            with pytest.raises(OutOfBlocks):
                self.memory.extend(table, count)
            return
        self.memory.extend(table, count)
        new = torch.tensor([_content(keys, slot) for slot in range(table.length, table.length + count)])
        for layer in range(len(self.windows)):
            blocks = table.tables[self.pool.group_of[layer]]
            runs = self.pool.runs(blocks, table.length, table.length + count)
            if count:
                self.pool.write(layer, runs, new[:, None].float() + layer, new[:, None, :1].float())
        table.length += count
        verified = self.rng.choice([0, table.length // 2, table.length, table.length])
        self.memory.slide(table, table.length, keys, DENSE, publishable=verified)
        if self.rng.random() < 0.3:
            self.memory.publish(table, keys, DENSE, table.length)

    def fork(self) -> None:
        if self.tables and len(self.tables) < 6:
            table, keys, whole = self.rng.choice(self.tables)
            self.tables.append((self.memory.fork(table), list(keys), whole))

    def close(self) -> None:
        if self.tables:
            table, keys, _ = self.tables.pop(self.rng.randrange(len(self.tables)))
            if self.rng.random() < 0.7:
                self.memory.publish(table, keys, DENSE, table.length)
            self.memory.close(table)

    def evict(self) -> None:
        count = min(self.rng.choice([1, 3, 1000]), self.pool.evictable)
        assert self.memory.tree.evict(count) >= count

    def check(self) -> None:
        """All invariants, and the contents of every slot that a later query may read."""
        self.memory.check()
        for table, keys, whole in self.tables:
            for layer, window in enumerate(self.windows):
                known = [slot + (keys[slot] >> OFFSET_SHIFT) for slot in range(len(keys))]
                first = 0 if whole else first_needed(table.length, window, known.__getitem__)
                blocks = table.tables[self.pool.group_of[layer]]
                if first == table.length:
                    continue
                found, _ = self.pool.gather(layer, self.pool.runs(blocks, first, table.length))
                expected = [_content(keys, slot) for slot in range(first, table.length)]
                assert (found[:, 0] - layer).tolist() == expected


def _content(keys: list[int], slot: int) -> list[float]:
    return [float(keys[slot] % 2**OFFSET_SHIFT), float(slot + (keys[slot] >> OFFSET_SHIFT))]


@pytest.mark.parametrize(
    "windows", [(None,), (None, 6), (None, 6, 6, 6, 17), (9,), (9, 4)], ids=lambda w: "-".join(map(str, w))
)
@pytest.mark.parametrize("worlds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_random_operations_keep_every_invariant_and_every_window(
    windows: tuple[int | None, ...], worlds: int
) -> None:
    totals = [0, 0, 0, 0]
    for seed in range(worlds):
        size = random.Random(seed).choice([1, 2, 4, 5])
        world = World(seed, windows, blocks=len(groups_of(windows)) * 30, block_size=size)
        kinds = [world.open, *[world.step] * 8, world.fork, world.close, world.evict]
        for _ in range(250):
            world.rng.choice(kinds)()
            world.check()
        while world.tables:
            world.close()
        world.check()
        assert world.pool.stats().live == len(world.memory.tree) == world.pool.evictable
        world.memory.tree.evict(world.pool.evictable)
        world.memory.check()
        assert world.pool.stats().live == 0
        stats = world.pool.stats()
        counts = stats.ended, world.resumed, world.cut, world.memory.tree.stats.evicted_blocks
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
    assert totals[3] > 0
    assert (totals[0] > 0) == (totals[1] > 0) == (windows != (None,))
    assert totals[2] > 0 or windows == (None,)


def test_forks_share_the_blocks_of_the_tree_together() -> None:
    """Another request has published the same first block, then one of two forks publishes."""
    memory = make(100)
    tokens = list(range(8))
    other, table = (memory.open() for _ in range(2))
    for one in (other, table):
        memory.extend(one, 8)
        one.length = 8
    fork = memory.fork(table)
    memory.publish(other, tokens, DENSE, 4)
    memory.close(other)
    memory.publish(table, tokens, DENSE)
    memory.close(table)
    memory.check()
    assert memory.tree.evict(memory.pool.evictable) == 0  # the fork uses both blocks
    assert fork.blocks == array("i", [node.blocks[0] for node in memory.tree.nodes()])


def make(blocks: int, window: int = 8, size: int = 4) -> MemoryManager:
    """A full and a sliding layer; each block of one of them is a block of the pool."""
    shapes = [LayerShape(1, 1, 1), LayerShape(1, 1, 1, window)]
    return MemoryManager(
        KVPool.of_blocks(
            shapes,
            blocks,
            block_size=size,
            dtype=torch.float32,
            device=CPU,
            slab_blocks=1,
            groups=groups_of([None, window]),
        )
    )


def fill(memory: MemoryManager, tokens: list[int]) -> BlockTable:
    table = memory.open(memory.match(tokens, DENSE))
    while table.length < len(tokens):
        count = min(4, len(tokens) - table.length)
        memory.extend(table, count)
        table.length += count
        memory.slide(table, table.length, tokens, DENSE, publishable=table.length)
    memory.publish(table, tokens, DENSE)
    memory.check()
    return table


def test_blocks_behind_the_window_stay_cached_until_others_need_them() -> None:
    memory = make(100)
    tokens = list(range(40))
    table = fill(memory, tokens)
    assert table.tables[1][:8] == array("i", [ABSENT] * 8)
    assert (table.held, len(memory.tree)) == (10 + 2, 20)
    memory.close(table)
    assert memory.match([*tokens[:22], 99], DENSE).length == 22  # another question about the same text
    memory.tree.evict(8)
    assert memory.match([*tokens, 99], DENSE).length == 40  # its last window went last
    assert memory.match([*tokens[:22], 99], DENSE).length == 0


def test_a_window_that_was_resumed_is_kept_longer() -> None:
    memory = make(100)
    tokens = list(range(40))
    memory.close(fill(memory, tokens))
    memory.close(fill(memory, [*tokens[:20], 77, 78]))
    memory.tree.evict(5)
    assert memory.match([*tokens[:20], 99], DENSE).length == 20
    assert memory.match([*tokens[:12], 99], DENSE).length < 12


def test_a_prefix_without_its_window_is_filled_again() -> None:
    memory = make(100)
    tokens = list(range(40))
    memory.close(fill(memory, tokens))
    memory.tree.evict(8)
    again = fill(memory, [*tokens[:30], 99])
    assert again.length == 31
    memory.close(again)
    assert memory.match([*tokens[:30], 98], DENSE).length == 28  # whole blocks of what was published


def test_a_leaf_that_cannot_be_resumed_goes_before_another_prefix() -> None:
    memory = make(100)
    old, new = list(range(40)), list(range(100, 140))
    memory.close(fill(memory, old))
    memory.close(fill(memory, new))
    memory.tree.evict(8 + 8 + 1)  # both thinned, and the last block of the old one
    assert memory.match([*old, 99], DENSE).length == 0
    memory.tree.evict(memory.pool.evictable - 12)
    assert memory.match([*new, 99], DENSE).length == 40


def test_without_caching_blocks_behind_the_window_are_free_at_once() -> None:
    memory = make(40)
    memory.prefix_caching = False
    table = fill(memory, list(range(60)))
    assert memory.pool.stats().live == table.held == 15 + 2
    assert memory.pool.stats().ended == 13
