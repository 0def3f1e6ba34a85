"""Write new keys and values into the pool: one launch per layer for both.

In decode steps, the same launch summarizes the blocks that are filled, like `summaries.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from skim.attention.triton_overlap import await_inputs, overlapping


@dataclass(frozen=True)
class Summaries:
    """The summaries of a layer's blocks."""

    mean: torch.Tensor  # [blocks, kv_heads, key_dim]
    variance: torch.Tensor
    block_size: int


@triton.jit
def _summarize(
    new,  # [PAD] the key in the block's last slot
    keys_ptr,  # of the head in the block's first slot
    mean_ptr,
    variance_ptr,
    stride,  # from slot to slot
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Summarize one head of a block whose last slot another program is writing."""
    dim = tl.arange(0, PAD)
    inside = dim < DIM
    mean = tl.zeros([PAD], tl.float32)
    for start in range(0, BLOCK_SIZE, TILE):
        slot = start + tl.arange(0, TILE)
        mask = (slot < BLOCK_SIZE - 1)[:, None] & inside[None, :]
        key = tl.load(keys_ptr + slot[:, None] * stride + dim[None, :], mask=mask, other=0.0)
        mean += tl.sum(key.to(tl.float32), 0) / BLOCK_SIZE
    mean += new / BLOCK_SIZE
    variance = (new - mean) * (new - mean) / BLOCK_SIZE
    for start in range(0, BLOCK_SIZE, TILE):
        slot = start + tl.arange(0, TILE)
        known = (slot < BLOCK_SIZE - 1)[:, None]
        key = tl.load(
            keys_ptr + slot[:, None] * stride + dim[None, :], mask=known & inside[None, :], other=0.0
        )
        less = tl.where(known, key.to(tl.float32) - mean[None, :], 0.0)
        variance += tl.sum(less * less, 0) / BLOCK_SIZE
    tl.store(mean_ptr + dim, mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(variance_ptr + dim, variance.to(mean_ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_kernel(
    key_ptr,  # [tokens, kv_heads, key_dim] by strides
    value_ptr,  # [tokens, kv_heads, value_dim] by strides
    key_pool_ptr,  # [slots, kv_heads, key_dim]
    value_pool_ptr,  # [slots, kv_heads, value_dim]
    slots_ptr,  # [tokens]
    mean_ptr,  # with SUMMARIZED: [blocks, kv_heads, key_dim]
    variance_ptr,
    key_token,
    key_head,
    value_token,
    value_head,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    SUMMARIZED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write one token's key and value into its slot; a slot of -1 is padding.

    With SUMMARIZED, further programs summarize a head each, if this is the last slot of its block.
    """
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    await_inputs(OVERLAP)
    if slot < 0:
        return
    token = token.to(tl.int64)
    if SUMMARIZED:
        own = tl.program_id(1) - 1
        if own >= 0:
            if (slot + 1) % BLOCK_SIZE == 0:
                column = tl.arange(0, PAD_KEY)
                last = tl.load(
                    key_ptr + token * key_token + own * key_head + column, mask=column < KEY_DIM, other=0.0
                )
                block = slot // BLOCK_SIZE
                at = (block * KV_HEADS + own) * KEY_DIM
                _summarize(
                    last.to(tl.float32), key_pool_ptr + (block * BLOCK_SIZE * KV_HEADS + own) * KEY_DIM,
                    mean_ptr + at, variance_ptr + at, KV_HEADS * KEY_DIM, KEY_DIM, PAD_KEY, BLOCK_SIZE, TILE,
                )  # fmt: skip
            return
    head = tl.arange(0, PAD_HEADS)[:, None]
    dim = tl.arange(0, PAD_KEY)[None, :]
    mask = (head < KV_HEADS) & (dim < KEY_DIM)
    new = tl.load(key_ptr + token * key_token + head * key_head + dim, mask=mask)
    tl.store(key_pool_ptr + (slot * KV_HEADS + head) * KEY_DIM + dim, new, mask=mask)
    dim = tl.arange(0, PAD_VALUE)[None, :]
    mask = (head < KV_HEADS) & (dim < VALUE_DIM)
    new = tl.load(value_ptr + token * value_token + head * value_head + dim, mask=mask)
    tl.store(value_pool_ptr + (slot * KV_HEADS + head) * VALUE_DIM + dim, new, mask=mask)


def write_keys_values(
    key: torch.Tensor,  # [tokens, kv_heads, key_dim]
    value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    key_slots: torch.Tensor,  # [slots, kv_heads, key_dim]
    value_slots: torch.Tensor,  # [slots, kv_heads, value_dim]
    slot_mapping: torch.Tensor,  # [tokens] int32 on the device
    summaries: Summaries | None = None,
) -> None:
    """Write every token's key and value into its slot; skip tokens with slot -1.

    With `summaries`, no two tokens may belong to one block.
    """
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    write_kernel[(tokens, 1 if summaries is None else 1 + heads)](
        key,
        value,
        key_slots,
        value_slots,
        slot_mapping,
        key_slots if summaries is None else summaries.mean,
        key_slots if summaries is None else summaries.variance,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAD_HEADS=triton.next_power_of_2(heads),
        PAD_KEY=triton.next_power_of_2(key_dim),
        PAD_VALUE=triton.next_power_of_2(value_dim),
        SUMMARIZED=summaries is not None,
        BLOCK_SIZE=1 if summaries is None else summaries.block_size,
        TILE=1 if summaries is None else min(summaries.block_size, 64),
        **overlapping(key.device),
    )
