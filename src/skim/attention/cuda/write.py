"""Write new keys and values into the pool: one launch per layer for both."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl


@triton.jit
def write_kernel(
    key_ptr,  # [tokens, kv_heads, key_dim] by strides
    value_ptr,  # [tokens, kv_heads, value_dim] by strides
    key_pool_ptr,  # [slots, kv_heads, key_dim]
    value_pool_ptr,  # [slots, kv_heads, value_dim]
    slots_ptr,  # [tokens]
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
):
    """Write one token's key and value into its slot; a slot of -1 is padding."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    token = token.to(tl.int64)
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
) -> None:
    """Write every token's key and value into its slot; skip tokens with slot -1."""
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    write_kernel[(tokens,)](
        key,
        value,
        key_slots,
        value_slots,
        slot_mapping,
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
    )
