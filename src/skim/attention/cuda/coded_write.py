"""Write new keys and values as codes, and turn queries into the basis of the keys: one launch for all.

A program takes some tokens of one head. `turn_back` ends a chunk: its results leave the basis of the values.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl

from skim.attention.cuda.codes import group_count, kind_of, make_e4m3, rounded_scale, scaled, whole
from skim.memory.codec import CodedStore
from skim.memory.store import Planes

CHUNK = tl.constexpr(64)  # values of a head that are multiplied at a time


@triton.jit
def _turned(
    x_ptr,  # of the first token's head
    x_token,
    token,  # [TILE]
    live,  # [TILE]
    matrix_ptr,  # [DIM, DIM]; with EXACT its signs, in the dtype of x
    factor,  # with EXACT: of the signs
    half,  # [PAD] columns of the matrix's first half
    inside,  # [PAD]
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x @ matrix, float32, in two halves. [TILE, PAD] each

    With `EXACT` the matrix has signs, which are exact in any dtype.
    """
    first = tl.zeros([token.shape[0], half.shape[0]], tl.float32)
    second = tl.zeros([token.shape[0], half.shape[0]], tl.float32)
    for start in range(0, DIM, CHUNK):
        dim = start + tl.arange(0, CHUNK)
        known = dim < DIM
        x = tl.load(
            x_ptr + token[:, None] * x_token + dim[None, :], mask=live[:, None] & known[None, :], other=0.0
        )
        columns_at = matrix_ptr + dim[:, None] * DIM + half[None, :]
        mask = known[:, None] & inside[None, :]
        left = tl.load(columns_at, mask=mask, other=0.0)
        right = tl.load(columns_at + DIM // 2, mask=mask, other=0.0)
        precision: tl.constexpr = "tf32" if x.dtype != tl.float32 else "tf32x3" if EXACT else "ieee"
        first = tl.dot(x, left, first, input_precision=precision)
        second = tl.dot(x, right, second, input_precision=precision)
    if EXACT:  # compilers would fuse mere products with the subtraction of a middle, and skip their rounding
        first = tl.fma(first, factor, 0.0)
        second = tl.fma(second, factor, 0.0)
    return first, second


@triton.jit
def _spoilt(x):
    """[TILE] True if a row has a NaN, which a maximum may ignore."""
    return tl.max((x != x).to(tl.int32), 1) > 0


@triton.jit
def _encode_group(first, second, inside, BOTH: tl.constexpr):
    """Scale and middle of int4 codes of one or two halves. [TILE]"""
    least = tl.min(tl.where(inside[None, :], first, float("inf")), 1)
    most = tl.max(tl.where(inside[None, :], first, float("-inf")), 1)
    broken = _spoilt(first)
    if BOTH:
        least = tl.minimum(least, tl.min(tl.where(inside[None, :], second, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(inside[None, :], second, float("-inf")), 1))
        broken = broken | _spoilt(second)
    scale = rounded_scale(tl.div_rn(most - least, 15.0))
    scale = tl.where(broken, float("nan"), scale)
    return scale, rounded_scale((most + least + scale) / 2.0)


@triton.jit
def _byte_scale(peak, broken, MOST: tl.constexpr):
    """The scale of values up to `peak`; NaN if one is `broken`. [TILE]"""
    return rounded_scale(tl.div_rn(tl.where(broken, float("nan"), peak), MOST))


@triton.jit
def _write_head(
    x_ptr, x_token, token, live, slot, head, matrix_ptr, factor, codes_ptr, scales_ptr,
    KIND: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Encode one head of some tokens as its codec does, and write it to the tokens' slots."""
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, PAD)
    inside = column < HALF
    matrix_ptr += head * DIM * DIM
    first, second = _turned(x_ptr, x_token, token, live, matrix_ptr, factor, column, inside, DIM, True)
    place = slot * KV_HEADS + head
    written = live & (slot >= 0)
    mask = written[:, None] & inside[None, :]
    if KIND == "int4":
        scale, middle = _encode_group(first, second, inside, GROUPS == 1)
        other, other_middle = scale, middle
        if GROUPS == 2:
            other, other_middle = _encode_group(second, second, inside, False)
        low = whole(scaled(first - middle[:, None], scale[:, None]), -8, 7) + 8
        high = whole(scaled(second - other_middle[:, None], other[:, None]), -8, 7) + 8
        low = tl.where((scale - scale == 0.0)[:, None], low, 0)
        high = tl.where((other - other == 0.0)[:, None], high, 0)
        at = codes_ptr + place[:, None] * HALF + column[None, :]
        tl.store(at, (low | (high << 4)).to(tl.uint8), mask=mask)
        at = scales_ptr + place * (2 * GROUPS)
        tl.store(at, scale.to(tl.bfloat16), mask=written)
        tl.store(at + 1, middle.to(tl.bfloat16), mask=written)
        if GROUPS == 2:
            tl.store(at + 2, other.to(tl.bfloat16), mask=written)
            tl.store(at + 3, other_middle.to(tl.bfloat16), mask=written)
    else:
        MOST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
        odd = (column % 2)[None, :]
        largest = tl.maximum(tl.abs(first), tl.abs(second))
        broken = _spoilt(first) | _spoilt(second)
        even_scale = _byte_scale(tl.max(tl.where(odd == 0, largest, 0.0), 1), broken, MOST)
        odd_scale = _byte_scale(tl.max(tl.where(odd == 1, largest, 0.0), 1), broken, MOST)
        scales = tl.where(odd == 1, odd_scale[:, None], even_scale[:, None])
        at = codes_ptr + place[:, None] * DIM + column[None, :]
        for half in tl.static_range(2):
            x = scaled(first if half == 0 else second, scales)
            if KIND == "int8":
                code = whole(x, -127, 127)
            else:
                code = make_e4m3(tl.where(x == x, tl.minimum(tl.maximum(x, -MOST), MOST), x))
            tl.store(at + half * HALF, code.to(codes_ptr.dtype.element_ty), mask=mask)
        tl.store(scales_ptr + 2 * place, even_scale.to(tl.bfloat16), mask=written)
        tl.store(scales_ptr + 2 * place + 1, odd_scale.to(tl.bfloat16), mask=written)


@triton.jit(do_not_specialize=["tokens"])
def write_codes_kernel(
    query_ptr,  # [tokens, heads, key_dim] by strides
    key_ptr,  # [tokens, kv_heads, key_dim] by strides
    value_ptr,
    turned_ptr,  # [tokens, heads, key_dim]
    key_codes_ptr,
    key_scales_ptr,
    value_codes_ptr,
    value_scales_ptr,
    slots_ptr,  # [tokens]; -1 for padding
    turn_ptr,  # [kv_heads, key_dim, key_dim]: queries into the basis of keys
    key_signs_ptr,  # [kv_heads, key_dim, key_dim]
    value_signs_ptr,
    key_factor,
    value_factor,
    tokens,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The last program axis is keys, values, and then each query head of a key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(1)
    kind = tl.program_id(2)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    live = token < tokens
    if kind == 0:
        slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
        _write_head(
            key_ptr + head * key_head, key_token, token, live, slot, head, key_signs_ptr, key_factor,
            key_codes_ptr, key_scales_ptr, KEY, KV_HEADS, KEY_DIM, KEY_GROUPS, PAD_KEY,
        )  # fmt: skip
    elif kind == 1:
        slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
        _write_head(
            value_ptr + head * value_head, value_token, token, live, slot, head, value_signs_ptr,
            value_factor, value_codes_ptr, value_scales_ptr, VALUE, KV_HEADS, VALUE_DIM, VALUE_GROUPS,
            PAD_VALUE,
        )  # fmt: skip
    else:
        own = head * GROUP + kind - 2
        column = tl.arange(0, PAD_KEY)
        inside = column < KEY_DIM // 2
        first, second = _turned(
            query_ptr + own * query_head, query_token, token, live, turn_ptr + head * KEY_DIM * KEY_DIM,
            1.0, column, inside, KEY_DIM, False,
        )  # fmt: skip
        at = turned_ptr + (token * HEADS + own)[:, None] * KEY_DIM + column[None, :]
        mask = live[:, None] & inside[None, :]
        tl.store(at, first.to(turned_ptr.dtype.element_ty), mask=mask)
        tl.store(at + KEY_DIM // 2, second.to(turned_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def turn_back_kernel(
    out_ptr,  # [tokens, heads, dim], turned in place
    turn_ptr,  # [kv_heads, dim, dim]
    tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Turn one head of some tokens. A program reads all that it writes before."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    live = token < tokens
    column = tl.arange(0, PAD)
    inside = column < DIM // 2
    first, second = _turned(
        out_ptr + head * DIM, HEADS * DIM, token, live, turn_ptr + head // GROUP * DIM * DIM, 1.0, column,
        inside, DIM, False,
    )  # fmt: skip
    at = out_ptr + (token * HEADS + head)[:, None] * DIM + column[None, :]
    mask = live[:, None] & inside[None, :]
    tl.store(at, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at + DIM // 2, second.to(out_ptr.dtype.element_ty), mask=mask)


def write_codes(
    store: CodedStore,
    planes: Planes,
    query: torch.Tensor,  # [tokens, heads, key_dim]
    key: torch.Tensor,  # [tokens, kv_heads, key_dim]
    value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    slot_mapping: torch.Tensor,  # [tokens] int32 on the device
) -> torch.Tensor:
    """Write every token's codes and scales into its slot; skip tokens with slot -1.

    Returns the queries in the basis of the keys. [tokens, heads, key_dim]
    """
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    tokens, heads, key_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    of_keys, of_values = store.bases(key.device)
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    slots = planes.slots
    tile = tile_of(tokens)
    write_codes_kernel[(triton.cdiv(tokens, tile), kv_heads, 2 + heads // kv_heads)](
        query,
        key,
        value,
        turned,
        *(slots[name] for name in (*store.KEYS, *store.VALUES)),
        slot_mapping,
        of_keys.matrix("query", query.dtype),
        of_keys.matrix("signs", key.dtype),
        of_values.matrix("signs", value.dtype),
        of_keys.factor,
        of_values.factor,
        tokens,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        KEY=kind_of(store.key),
        KEY_DIM=key_dim,
        KEY_GROUPS=group_count(store.key),
        VALUE=kind_of(store.value),
        VALUE_DIM=value_dim,
        VALUE_GROUPS=group_count(store.value),
        PAD_KEY=pad_of(key_dim // 2),
        PAD_VALUE=pad_of(value_dim // 2),
        TILE=tile,
        num_warps=8 if tile > 16 or max(key_dim, value_dim) > 128 else 4,
        num_stages=2,
    )
    return turned


def turn_back(store: CodedStore, out: torch.Tensor) -> None:
    """Turn results out of the basis of the values, in place. [tokens, heads, value_dim], contiguous"""
    tokens, heads, dim = out.shape
    basis = store.bases(out.device)[1]
    tile = tile_of(tokens)
    turn_back_kernel[(triton.cdiv(tokens, tile), heads)](
        out,
        basis.matrix("out", out.dtype),
        tokens,
        HEADS=heads,
        GROUP=heads // store.shape.kv_heads,
        DIM=dim,
        PAD=pad_of(dim // 2),
        TILE=tile,
        num_warps=4,
        num_stages=2,
    )


def tile_of(tokens: int) -> int:
    """Tokens of a program: few for decode steps, for more programs; many for chunks, for fewer reads."""
    return 16 if tokens <= 64 else 32 if tokens <= 1024 else 128


def pad_of(dim: int) -> int:
    """Width of a tile that a product reads or makes."""
    return max(16, int(triton.next_power_of_2(dim)))
