"""Read one row's codes into scratch memory, so that kernels for plain keys and values can attend over them.

For chunks: their products cost far more than this copy. Scratch memory is one row of one layer.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl

from skim.attention.cuda.coded_write import pad_of
from skim.attention.cuda.codes import group_count, kind_of, read_e4m3
from skim.memory.codec import CodedStore
from skim.memory.store import Planes

TILE = 64  # slots that a program restores at a time
PROGRAMS = 512  # for each head: enough to use all of a GPU's bandwidth
COLUMNS = tl.constexpr(32)  # values of a head that are restored at a time


@triton.jit
def read_head(
    codes_ptr, scales_ptr, place, live, KIND: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Both halves of one head of some slots, in the store's basis. `place` counts heads. [TILE, PAD] each"""
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, PAD)
    mask = live[:, None] & (half < HALF)[None, :]
    if KIND == "int4":
        byte = tl.load(codes_ptr + place[:, None] * HALF + half[None, :], mask=mask, other=0).to(tl.int32)
        at = scales_ptr + place * (2 * GROUPS)
        scale = tl.load(at, mask=live, other=0.0).to(tl.float32)
        middle = tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
        at += 2 * GROUPS - 2
        other = tl.load(at, mask=live, other=0.0).to(tl.float32)
        other_middle = tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
        first = ((byte & 15) - 8).to(tl.float32) * scale[:, None] + middle[:, None]
        second = ((byte >> 4) - 8).to(tl.float32) * other[:, None] + other_middle[:, None]
    else:
        scale = tl.load(scales_ptr + 2 * place, mask=live, other=0.0).to(tl.float32)
        other = tl.load(scales_ptr + 2 * place + 1, mask=live, other=0.0).to(tl.float32)
        scales = tl.where((half % 2)[None, :] == 1, other[:, None], scale[:, None])
        at = codes_ptr + place[:, None] * DIM + half[None, :]
        first = tl.load(at, mask=mask, other=0).to(tl.int32)
        second = tl.load(at + HALF, mask=mask, other=0).to(tl.int32)
        if KIND == "fp8":
            scales += scales - scales  # infinity becomes NaN
            first = read_e4m3(first) * scales
            second = read_e4m3(second) * scales
        else:
            first = first.to(tl.float32) * scales
            second = second.to(tl.float32) * scales
    return first, second


@triton.jit
def _restore_head(
    out_ptr, codes_ptr, scales_ptr, matrix_ptr, slot, place, live, head,
    KIND: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, PAD)
    inside = half < HALF
    mask = live[:, None] & inside[None, :]
    first, second = read_head(codes_ptr, scales_ptr, place, live, KIND, DIM, GROUPS, PAD)
    out_at = out_ptr + (slot.to(tl.int64) * KV_HEADS + head)[:, None] * DIM
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PLAIN:
        first = tl.where(mask, first, 0.0)
        second = tl.where(mask, second, 0.0)
        matrix_ptr += head * DIM * DIM
        for start in range(0, DIM, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            known = column < DIM
            upper_at = matrix_ptr + half[:, None] * DIM + column[None, :]
            both = inside[:, None] & known[None, :]
            upper = tl.load(upper_at, mask=both, other=0.0)
            lower = tl.load(upper_at + HALF * DIM, mask=both, other=0.0)
            plain = tl.dot(first, upper, input_precision="tf32x3")
            plain = tl.dot(second, lower, plain, input_precision="tf32x3")
            tl.store(out_at + column[None, :], plain.to(dtype), mask=live[:, None] & known[None, :])
    else:
        tl.store(out_at + half[None, :], first.to(dtype), mask=mask)
        tl.store(out_at + HALF + half[None, :], second.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["row"])
def restore_kernel(
    keys_ptr,  # [room, kv_heads, key_dim]
    values_ptr,  # [room, kv_heads, value_dim]
    key_codes_ptr,
    key_scales_ptr,
    value_codes_ptr,
    value_scales_ptr,
    key_matrix_ptr,  # with PLAIN: [kv_heads, key_dim, key_dim] float32
    value_matrix_ptr,
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    blocks_ptr,  # concatenated block tables
    row,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Restore one head of some slots, keys or values. With `PLAIN`, out of the store's basis."""
    head = tl.program_id(1)
    length = tl.load(rows_ptr + 4 * row + 1) + tl.load(rows_ptr + 4 * row + 2)
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    for start in range(tl.program_id(0) * TILE, length, tl.num_programs(0) * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        page = tl.load(table_ptr + slot // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = (page * BLOCK_SIZE + slot % BLOCK_SIZE) * KV_HEADS + head
        if tl.program_id(2) == 0:
            _restore_head(
                keys_ptr, key_codes_ptr, key_scales_ptr, key_matrix_ptr, slot, place, live, head, KEY,
                KV_HEADS, KEY_DIM, KEY_GROUPS, PAD_KEY, PLAIN,
            )  # fmt: skip
        else:
            _restore_head(
                values_ptr, value_codes_ptr, value_scales_ptr, value_matrix_ptr, slot, place, live, head,
                VALUE, KV_HEADS, VALUE_DIM, VALUE_GROUPS, PAD_VALUE, PLAIN,
            )  # fmt: skip


def restore_row(
    store: CodedStore,
    planes: Planes,
    rows: torch.Tensor,
    blocks: torch.Tensor,
    row: int,
    room: int,
    block_size: int,
    plain: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row's slots, in order. [room, kv_heads, dim]

    The device knows the row's length; room for more slots is left as it is.
    In the store's basis, like `LayerStore.read`; with `plain` out of it, like `LayerStore.gather`.
    """
    shape = store.shape
    device = rows.device
    keys = torch.empty(room, shape.kv_heads, shape.key_dim, dtype=store.dtype, device=device)
    values = torch.empty(room, shape.kv_heads, shape.value_dim, dtype=store.dtype, device=device)
    of_keys, of_values = store.bases(device)
    slots = planes.slots
    programs = min(triton.cdiv(room, TILE), PROGRAMS)
    restore_kernel[(programs, shape.kv_heads, 2)](
        keys,
        values,
        *(slots[name] for name in (*store.KEYS, *store.VALUES)),
        of_keys.to_plain,
        of_values.to_plain,
        rows,
        blocks,
        row,
        KV_HEADS=shape.kv_heads,
        KEY=kind_of(store.key),
        KEY_DIM=shape.key_dim,
        KEY_GROUPS=group_count(store.key),
        VALUE=kind_of(store.value),
        VALUE_DIM=shape.value_dim,
        VALUE_GROUPS=group_count(store.value),
        PAD_KEY=pad_of(shape.key_dim // 2),
        PAD_VALUE=pad_of(shape.value_dim // 2),
        BLOCK_SIZE=block_size,
        TILE=TILE,
        PLAIN=plain,
        num_warps=4,
        num_stages=1,
    )
    return keys, values
