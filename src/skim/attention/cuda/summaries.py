"""Write the summaries of blocks that a step fills: the mean and the variance of their keys, as stored.

`memory/summary.py` is the plain twin. One launch per layer, after the step's keys are written. In decode
steps over plain keys, `write.py` does the same without a launch. A decode row fills a block in one of
`block_size` steps; its programs end at once in the others.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl

from skim.attention.cuda.codes import group_count, kind_of
from skim.attention.cuda.layout import GroupTables
from skim.attention.cuda.restore import read_head
from skim.memory.codec import CodedStore
from skim.memory.store import LayerStore, PlainStore, Planes
from skim.memory.summary import MEAN, VARIANCE

TILE = 64  # slots that a program reads at a time


@triton.jit
def _read(
    keys_ptr, scales_ptr, first_slot, start, head, KV_HEADS: tl.constexpr, KIND: tl.constexpr,
    DIM: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys of one head, float32: in two halves if they are codes, otherwise whole and twice."""
    slot = start + tl.arange(0, TILE)
    place = (first_slot + slot) * KV_HEADS + head
    if KIND == "plain":
        dim = tl.arange(0, PAD)
        at = keys_ptr + place[:, None] * DIM + dim[None, :]
        first = tl.load(at, mask=(dim < DIM)[None, :] & (slot >= 0)[:, None], other=0.0).to(tl.float32)
        second = first
    else:
        first, second = read_head(keys_ptr, scales_ptr, place, slot >= 0, KIND, DIM, GROUPS, PAD)
    return first, second


@triton.jit
def summary_kernel(
    keys_ptr,  # [slots, kv_heads, ...]: keys, or their codes
    scales_ptr,  # of codes
    mean_ptr,  # [blocks, kv_heads, DIM]
    variance_ptr,
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    blocks_ptr,  # concatenated block tables
    KV_HEADS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Summarize one head of one of the blocks that a row's new slots may fill."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(rows_ptr + 4 * row + 1)
    length = context + tl.load(rows_ptr + 4 * row + 2)
    block = context // BLOCK_SIZE + tl.program_id(2)
    if (block + 1) * BLOCK_SIZE > length:
        return
    page = tl.load(blocks_ptr + tl.load(rows_ptr + 4 * row + 3) + block).to(tl.int64)
    slot = page * BLOCK_SIZE
    mean = tl.zeros([PAD], tl.float32)
    second_mean = tl.zeros([PAD], tl.float32)
    for start in range(0, BLOCK_SIZE, TILE):
        first, second = _read(
            keys_ptr, scales_ptr, slot, start, head, KV_HEADS, KIND, DIM, GROUPS, PAD, TILE
        )  # fmt: skip
        mean += tl.sum(first, 0) / BLOCK_SIZE
        second_mean += tl.sum(second, 0) / BLOCK_SIZE
    variance = tl.zeros([PAD], tl.float32)
    second_variance = tl.zeros([PAD], tl.float32)
    for start in range(0, BLOCK_SIZE, TILE):
        first, second = _read(
            keys_ptr, scales_ptr, slot, start, head, KV_HEADS, KIND, DIM, GROUPS, PAD, TILE
        )  # fmt: skip
        first -= mean[None, :]
        second -= second_mean[None, :]
        variance += tl.sum(first * first, 0) / BLOCK_SIZE
        second_variance += tl.sum(second * second, 0) / BLOCK_SIZE
    SIZE: tl.constexpr = DIM if KIND == "plain" else DIM // 2
    dim = tl.arange(0, PAD)
    inside = dim < SIZE
    at = (page * KV_HEADS + head) * DIM + dim
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    tl.store(mean_ptr + at, mean.to(dtype), mask=inside)
    tl.store(variance_ptr + at, variance.to(dtype), mask=inside)
    if KIND != "plain":
        tl.store(mean_ptr + at + SIZE, second_mean.to(dtype), mask=inside)
        tl.store(variance_ptr + at + SIZE, second_variance.to(dtype), mask=inside)


def write_summaries(
    store: LayerStore, planes: Planes, tables: GroupTables, most: int, block_size: int
) -> None:
    """Summarize the blocks that the new slots of each row fill, at most `most` of a row."""
    shape = store.shape
    if isinstance(store, CodedStore):
        keys, scales = (planes.slots[name] for name in store.KEYS)
        kind, groups = kind_of(store.key), group_count(store.key)
        pad = triton.next_power_of_2(shape.key_dim // 2)
    else:
        keys = scales = planes.slots[PlainStore.KEY]
        kind, groups = "plain", 1
        pad = triton.next_power_of_2(shape.key_dim)
    summary_kernel[(shape.kv_heads, tables.rows.shape[0], most)](
        keys,
        scales,
        planes.blocks[MEAN],
        planes.blocks[VARIANCE],
        tables.rows,
        tables.blocks,
        KV_HEADS=shape.kv_heads,
        KIND=kind,
        DIM=shape.key_dim,
        GROUPS=groups,
        PAD=pad,
        BLOCK_SIZE=block_size,
        TILE=min(block_size, TILE),
        num_warps=4,
        num_stages=1,
    )
