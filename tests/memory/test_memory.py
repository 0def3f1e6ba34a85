"""The pool and the prefix tree, piece by piece; tests/engine/test_stateful.py uses them at random."""

from __future__ import annotations

import random

import pytest
import torch

from skim.errors import ConfigError
from skim.memory.manager import BlockTable, MemoryManager
from skim.memory.pool import KVPool, OutOfBlocks
from skim.memory.prefix import Namespace
from skim.memory.store import LayerShape

SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 8, 2)]
BLOCK = 4
BLOCK_BYTES = BLOCK * (2 * (4 + 4) + 1 * (8 + 2)) * 4
DENSE = Namespace()


def make_pool(blocks: int, slab_blocks: int = 3) -> KVPool:
    return KVPool(
        SHAPES,
        block_size=BLOCK,
        budget_bytes=blocks * BLOCK_BYTES + BLOCK_BYTES - 1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        slab_bytes=slab_blocks * BLOCK_BYTES,
    )


def make_memory(blocks: int = 40) -> MemoryManager:
    return MemoryManager(make_pool(blocks))


def fill(memory: MemoryManager, tokens: list[int], publish: bool = True) -> BlockTable:
    """A block table with `tokens` computed: each slot's keys and values equal its token."""
    table = memory.open(memory.match(tokens, DENSE))
    memory.extend(table, len(tokens) - table.length)
    new = torch.tensor(tokens[table.length :], dtype=torch.float32)[:, None, None]
    runs = memory.pool.runs(table.blocks, table.length, len(tokens))
    for layer, shape in enumerate(SHAPES):
        key = new.expand(-1, shape.kv_heads, shape.key_dim)
        value = new.expand(-1, shape.kv_heads, shape.value_dim)
        memory.pool.write(layer, runs, key, value)
    table.length = len(tokens)
    if publish:
        memory.publish(table, tokens, DENSE)
    memory.check()
    return table


def contents(memory: MemoryManager, table: BlockTable) -> list[int]:
    """The tokens in a table's slots, the same in every layer."""
    runs = memory.pool.runs(table.blocks, 0, table.length)
    parts = [memory.pool.gather(layer, runs) for layer in range(len(SHAPES))]
    stored = torch.cat([tensor.flatten(1) for part in parts for tensor in part], dim=1)  # [slots, numbers]
    assert (stored == stored[:, :1]).all()
    return stored[:, 0].int().tolist()


def test_slabs_have_the_documented_layout_and_never_move() -> None:
    pool = make_pool(8)
    pool.allocate(1)
    first = pool.slabs[0].layers[0].blocks["key"]
    assert first.shape == (3, BLOCK, 2, 4)
    address = first.data_ptr()
    pool.allocate(7)
    assert [slab.blocks for slab in pool.slabs] == [3, 3, 2]
    assert pool.slabs[0].layers[0].slots["key"].data_ptr() == address
    with pytest.raises(OutOfBlocks, match="1 blocks requested, 0 of 8"):
        pool.allocate(1)


def test_stats_count_real_bytes() -> None:
    pool = make_pool(8)
    blocks = pool.allocate(4)
    stats = pool.stats()
    assert (stats.capacity, stats.allocated, stats.live, stats.free) == (8, 6, 4, 2)
    tensors = [t for slab in pool.slabs for planes in slab.layers for t in planes.blocks.values()]
    assert stats.reserved_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert stats.used_bytes == 4 * BLOCK_BYTES
    pool.release(blocks)
    assert pool.stats().used_bytes == 0
    assert pool.stats().reserved_bytes == stats.reserved_bytes


def test_blocks_are_allocated_after_their_predecessor_if_possible() -> None:
    pool = make_pool(12, slab_blocks=12)
    one = pool.allocate(3)
    pool.allocate(1)
    pool.release(one[1:])
    assert pool.allocate(2, after=one[0]) == [1, 2]
    assert pool.allocate(1, after=2) == [4]


def test_a_budget_below_one_block_is_refused_and_names_the_block_size() -> None:
    with pytest.raises(ConfigError, match=f"{BLOCK_BYTES} bytes"):
        KVPool(
            SHAPES,
            block_size=BLOCK,
            budget_bytes=BLOCK_BYTES - 1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._refcounts.__setitem__(0, 5), "free set"),
        (lambda pool: pool._free.add(1), "free set"),
        (lambda pool: setattr(pool, "_evictable", 3), "evictable count"),
        (lambda pool: setattr(pool, "capacity", 1), "budget"),
        (lambda pool: pool._heap.clear(), "heap"),
        (lambda pool: pool.slabs.pop(), "slabs"),
    ],
)
def test_check_detects_corruption(damage, message) -> None:  # type: ignore[no-untyped-def]
    pool = make_pool(8)
    pool.release(pool.allocate(4)[:1])
    pool.allocate(1)
    pool.release([0])
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_misuse_of_a_block_is_an_error() -> None:
    pool = make_pool(4)
    [block] = pool.allocate(1)
    pool.release([block])
    for wrong in (lambda: pool.release([block]), lambda: pool.acquire([block]), lambda: pool.cache(block)):
        with pytest.raises(AssertionError, match=f"block {block}"):
            wrong()


def test_matching_leaves_one_token_to_compute_and_changes_nothing() -> None:
    memory = make_memory()
    tokens = list(range(12))
    memory.close(fill(memory, tokens))
    before = (memory.pool.stats(), memory.tree.version, len(memory.tree))
    assert memory.match(tokens, DENSE).length == 11
    assert memory.match([*tokens, 99], DENSE).length == 12
    assert memory.match(tokens[:5], DENSE).length == 4
    assert memory.match(tokens[:1], DENSE).length == 0
    assert (memory.pool.stats(), memory.tree.version, len(memory.tree)) == before


def test_the_longest_partial_match_is_found_among_many_children() -> None:
    rng = random.Random(0)
    memory = make_memory(200)
    prompts = [[1, 2, 3, 4, *(rng.randrange(3) for _ in range(4))] for _ in range(60)]
    for prompt in prompts:
        memory.close(fill(memory, prompt))
    for _ in range(200):
        query = [1, 2, 3, 4, *(rng.randrange(4) for _ in range(4)), 9]
        shared = max(
            next((i for i, (a, b) in enumerate(zip(query, p, strict=False)) if a != b), 8) for p in prompts
        )
        match = memory.match(query, DENSE)
        assert match.length == shared
        table = memory.open(match)
        assert contents(memory, table) == query[:shared]
        memory.close(table)


def test_tenants_and_policies_do_not_share_prefixes() -> None:
    memory = make_memory()
    tokens = list(range(9))
    fill(memory, tokens)
    assert memory.match(tokens, DENSE).length == 8
    assert memory.match(tokens, Namespace(salt="tenant")).length == 0
    assert memory.match(tokens, Namespace(policy="sparse")).length == 0


def test_a_shared_partial_block_is_copied_on_write() -> None:
    memory = make_memory()
    one = fill(memory, [1, 2, 3, 4, 5, 6], publish=False)
    two = memory.fork(one)
    assert memory.blocks_needed(two, 1) == 1
    memory.extend(two, 1)
    assert one.blocks[0] == two.blocks[0]
    assert one.blocks[1] != two.blocks[1]
    assert contents(memory, two) == contents(memory, one) == [1, 2, 3, 4, 5, 6]
    assert memory.blocks_needed(one, 2) == 0
    memory.check()


def test_rolled_back_slots_give_back_their_blocks_and_are_written_again() -> None:
    memory = make_memory()
    table = fill(memory, [1, 2, 3, 4, 5, 6], publish=False)
    size, free = memory.pool.block_size, memory.available
    memory.extend(table, 2 * size)
    table.length += 2 * size
    memory.roll_back(table, 5)
    assert memory.available == free + (-(-6 // size) - -(-5 // size))
    assert contents(memory, table) == [1, 2, 3, 4, 5]
    memory.check()
    memory.extend(table, 3 * size)
    memory.check()
    with pytest.raises(AssertionError, match="cannot be rolled back"):
        memory.roll_back(table, 6)


def test_published_duplicates_are_replaced_by_the_trees_blocks() -> None:
    memory = make_memory()
    tokens = list(range(10))
    one = fill(memory, tokens, publish=False)
    two = fill(memory, tokens, publish=False)
    memory.publish(one, tokens, DENSE)
    live = memory.pool.stats().live
    memory.publish(two, tokens, DENSE)
    assert two.blocks[:2] == one.blocks[:2]
    assert memory.pool.stats().live == live - 2
    memory.check()


def test_eviction_takes_the_least_recently_used_leaf_and_no_block_in_use() -> None:
    memory = make_memory(12)
    old, new, pinned = [1] * 8, [2] * 8, [3] * 8
    for tokens in (old, new):
        memory.close(fill(memory, tokens))
    table = fill(memory, pinned)
    memory.tree.touch([*old, 0], DENSE, len(old))
    assert memory.tree.evict(1) == 1
    assert [memory.match([*t, 0], DENSE).length for t in (old, new, pinned)] == [8, 4, 8]
    assert memory.tree.evict(memory.pool.evictable) == 3
    assert [memory.match([*t, 0], DENSE).length for t in (old, new, pinned)] == [0, 0, 8]
    assert contents(memory, table) == pinned
    memory.check()


def test_extend_evicts_cold_prefixes_and_changes_nothing_if_it_fails() -> None:
    memory = make_memory(6)
    memory.close(fill(memory, list(range(16))))
    table = fill(memory, [7] * 8)
    assert memory.available == 4
    with pytest.raises(OutOfBlocks):
        memory.extend(table, 17)
    assert len(memory.tree) == 6
    assert len(table.blocks) == 2
    memory.extend(table, 16)
    assert memory.available == 0
    assert memory.tree.stats.evicted_blocks == 4
    memory.check()


def test_queries_hits_misses_and_bypasses_are_counted() -> None:
    memory = make_memory()
    tokens = list(range(9))
    memory.count_query(tokens, memory.match(tokens, DENSE))
    fill(memory, tokens)
    memory.count_query(tokens, memory.match(tokens, DENSE))
    memory.count_query([1], memory.match([1], DENSE))
    memory.count_query(tokens, memory.match(tokens, DENSE), bypass="request")
    stats = memory.tree.stats
    assert (stats.queries, stats.hits, stats.misses) == (2, 1, 1)
    assert (stats.query_tokens, stats.hit_tokens) == (18, 8)
    assert dict(stats.bypasses) == {"too_short": 1, "request": 1}
    off = MemoryManager(make_pool(4), prefix_caching=False)
    off.count_query(tokens, off.match(tokens, DENSE))
    assert dict(off.tree.stats.bypasses) == {"disabled": 1}
