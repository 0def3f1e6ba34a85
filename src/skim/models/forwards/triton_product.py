"""Matrix-vector product for one token, as fast as the weight can be read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from skim.attention.triton_overlap import await_inputs, overlapping

# Within 8% of the best of 30 launch configurations on an H200, for each product of Qwen3 0.6B, 8B and 32B.
ROWS, TILE, WARPS = 2, 1024, 4


@triton.jit
def product_kernel(
    out_ptr,  # [outputs]; with GATED, half as many
    hidden_ptr,  # [inputs]
    weight_ptr,  # [outputs, inputs] by stride
    bias_ptr,  # [outputs]
    residual_ptr,  # [outputs]
    outputs,
    inputs,
    weight_row,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply ROWS rows of the weight by the token. With GATED, a row and the one half of them below it."""
    if GATED:
        row = tl.program_id(0) + tl.arange(0, 2) * (outputs // 2)
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < outputs
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * weight_row
    await_inputs(OVERLAP)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(0, inputs, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < inputs
        hidden = tl.load(hidden_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last")
        weight = tl.load(
            row_ptr + column[None, :],
            mask=exists[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",  # not read again before the next step
        )
        total += weight.to(tl.float32) * hidden.to(tl.float32)[None, :]
    product = tl.sum(total, axis=1)
    if HAS_BIAS:
        product += tl.load(bias_ptr + row, mask=exists, other=0.0).to(tl.float32)
    product = product.to(out_ptr.dtype.element_ty)
    if GATED:
        gate, passed = tl.split(product.to(tl.float32)[None, :])
        product = (gate * tl.sigmoid(gate) * passed).to(product.dtype)
        row = tl.program_id(0) + tl.arange(0, 1)
        exists = row >= 0
    if HAS_RESIDUAL:  # rounded twice, as by torch
        added = tl.load(residual_ptr + row, mask=exists, other=0.0).to(tl.float32)
        product = (product.to(tl.float32) + added).to(product.dtype)
    tl.store(out_ptr + row, product, mask=exists)


def multiply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`linear` for one token: `hidden` is [..., inputs], with all other sizes 1.

    Each row of the weight is contiguous, and so is the bias. The residual is added to the product. `gated`:
    silu of its left half times its right half, before the residual.
    """
    outputs, inputs = weight.shape
    hidden = hidden.contiguous()
    out = hidden.new_empty(*hidden.shape[:-1], outputs // 2 if gated else outputs)
    product_kernel[(outputs // 2 if gated else triton.cdiv(outputs, ROWS),)](
        out,
        hidden,
        weight,
        hidden if bias is None else bias,
        hidden if residual is None else residual.contiguous(),
        outputs,
        inputs,
        weight.stride(0),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        ROWS=ROWS,
        TILE=TILE,
        num_warps=WARPS,
        **overlapping(hidden.device),
    )
    return out
