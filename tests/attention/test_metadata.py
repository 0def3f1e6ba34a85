"""How a step's keys are split among programs. `test_triton.py` tests the kernels that read the splits."""

from __future__ import annotations

from array import array
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda import metadata
from skim.attention.cuda.captured import CapturedTables, refuses_capture
from skim.attention.cuda.layout import MOST_SPLITS
from skim.attention.cuda.metadata import (
    LEAST_SPLIT,
    CudaMetadata,
    Tables,
)
from skim.attention.step import Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from tests.pools import make_pool

WINDOWS = (1, 128, 1024, 4096)
POOL = KVPool(
    [LayerShape(4, 2, 2), *(LayerShape(4, 2, 2, window) for window in WINDOWS)],
    block_size=16,
    budget_bytes=1 << 20,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def tables_of(*lengths: int, processors: int = 132) -> tuple[Step, Tables]:
    blocks = array("i", [0]) * (-(-max(lengths) // 16))
    step = Step(POOL, tuple(Row(Role.DECODE, blocks, n - 1, 1) for n in lengths), TorchBackend())
    with patch.object(metadata, "processors", lambda _: processors):
        tables = Tables(POOL, len(lengths), len(lengths), len(lengths) * len(blocks))
    tables.fill(step)
    return step, tables


@example(lengths=[4327, 4327], processors=132)  # the sliding window of 4,096 alone would need more splits
@given(
    lengths=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 150_000)), min_size=1, max_size=70),
    processors=st.sampled_from([1, 16, 132]),
)
def test_splits_cover_every_row_with_and_without_a_sliding_window(
    lengths: list[int], processors: int
) -> None:
    _, tables = tables_of(*lengths, processors=processors)
    assert 1 <= tables.splits <= MOST_SPLITS
    for window, size in tables.split_size.items():
        assert size % LEAST_SPLIT == 0
        assert tables.split[window].tolist() == [size]
        # With a sliding window, reading begins at a tile edge.
        read = max(min(n, n if window is None else window + LEAST_SPLIT - 1) for n in lengths)
        assert tables.splits * size >= read


def test_splits_of_a_sliding_window_are_finer_than_those_of_a_whole_long_row() -> None:
    step, tables = tables_of(32_000)
    assert tables.split_size[None] == 256
    assert tables.split_size[1024] == LEAST_SPLIT
    known = CudaMetadata(step, tables, splits=128)
    assert known.decode[1024].splits_within(1024 + 64) == 17
    _, many = tables_of(*[32_000] * 64)
    assert many.split_size[1024] > LEAST_SPLIT  # many rows need no finer splits


def test_the_graph_key_is_the_number_of_splits_rounded_up() -> None:
    with patch.object(metadata, "processors", lambda _: 132):
        captured = CapturedTables(POOL, rows=4, slots=40_000)
    keys = [captured.refill(tables_of(length)[0]) for length in (1, LEAST_SPLIT, 3 * LEAST_SPLIT, 32_000)]
    assert keys == [(count, (0, 0)) for count in (1, 1, 4, 128)]
    step, _ = tables_of(3 * LEAST_SPLIT)
    assert captured.refill(step) == (4, (0, 0))
    assert captured.metadata(step, (4, (0, 0))).decode[None].splits == 4
    with pytest.raises(AssertionError, match="keys would be left out"):
        captured.metadata(step, (2, (0, 0)))


def test_rows_at_positions_out_of_order_are_not_captured_with_sliding_windows() -> None:
    def step(pool: KVPool, positions: list[int] | None = None, ascending: bool = False) -> Step:
        row = Row(Role.DECODE, [0], 2, 1, positions, ascending)
        return Step(pool, (row,), TorchBackend())

    full = make_pool(LayerShape(1, 2, 2), block_size=4, blocks=4, slab_blocks=4)
    windowed = make_pool(LayerShape(1, 2, 2, window=4), block_size=4, blocks=4, slab_blocks=4)
    for pool, refusal in ((full, None), (windowed, "positions")):
        assert refuses_capture(step(pool)) is None
        assert refuses_capture(step(pool, [0, 5, 9], ascending=True)) is None
        assert refuses_capture(step(pool, [5, 0, 9])) == refusal
