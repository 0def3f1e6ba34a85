"""Matrix product for few tokens on tensor cores, as fast as the weight can be read.

A program multiplies some rows of the weight by all tokens. With few rows, programs share the columns
(`quantized/triton_shares.py`). Nothing depends on the number of tokens but how many of them are padding, so a
token's result does not depend on the tokens beside it.

On Hopper and later, the kernel starts while the one before it ends: it asks for its first weights, which no
kernel writes, and then waits for the tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.attention.hook import FEW_TOKENS
from skim.attention.triton_overlap import LINE, ask_for, await_inputs, can_overlap
from skim.models.quantized.triton_shares import add_shares, room_for

SMALLEST = 16  # tokens that tensor cores take at least
ROWS, PROGRAMS = 64, 160  # of a program, and programs that fill a GPU
LEAST = 512  # columns that are worth a program


@triton.jit(do_not_specialize=["tokens", "steps"])
def few_kernel(
    out_ptr,  # [tokens, outputs]; with GATED, half as many
    hidden_ptr,  # [tokens, inputs]
    weight_ptr,  # [outputs, inputs] by stride
    bias_ptr,  # [outputs]
    residual_ptr,  # [tokens, outputs]
    sums_ptr,  # of `add_shares`
    counts_ptr,
    tokens,
    outputs,
    inputs,
    weight_row,
    steps,  # times COLUMNS columns that a program reads
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,  # whether all programs read whole steps
    OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr,  # columns to prefetch
):
    """Multiply ROWS rows of the weight by the tokens, over some of the columns.

    With GATED, half of them are rows of the weight's upper half, and the others are those below them.
    """
    if GATED:
        first = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS) % (ROWS // 2)
        exists = first < outputs // 2
        row = tl.where(exists, first, 0) + tl.arange(0, ROWS) // (ROWS // 2) * (outputs // 2)
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        exists = row < outputs
    at = tl.where(exists, row, 0).to(tl.int64)  # programs with too few rows read the first one again
    begin = tl.program_id(1) * steps * COLUMNS
    weight_ptr += at[:, None] * weight_row
    if OVERLAP and AHEAD > 0:
        line = begin + tl.arange(0, AHEAD // LINE) * LINE
        ask_for(weight_ptr + tl.minimum(line, inputs - 1)[None, :])
    await_inputs(OVERLAP)
    token = tl.arange(0, TOKENS)
    live = token < tokens
    hidden_ptr += token[:, None].to(tl.int64) * inputs
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(steps):
        column = (begin + step * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        if EVEN:
            weight = tl.load(weight_ptr + column, eviction_policy="evict_first")
            hidden = tl.load(hidden_ptr + column, mask=live[:, None], other=0.0)
        else:
            inside = column < inputs
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0, eviction_policy="evict_first")
            hidden = tl.load(hidden_ptr + column, mask=live[:, None] & inside, other=0.0)
        total = tl.dot(weight, tl.trans(hidden), total)
    last = True
    if SPLITS > 1:
        last, total = add_shares(total, sums_ptr, counts_ptr, SPLITS)
    if last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=exists, other=0.0).to(tl.float32)[:, None]
        product = total.to(out_ptr.dtype.element_ty)
        if GATED:
            halves = tl.permute(tl.reshape(product, [2, ROWS // 2, TOKENS]), [1, 2, 0])
            gate, passed = tl.split(halves.to(tl.float32))
            written = (gate * tl.sigmoid(gate) * passed).to(product.dtype)
            out_row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            width = outputs // 2
        else:
            written = product
            out_row = row
            width = outputs
        out_at = token[None, :].to(tl.int64) * width + out_row[:, None]
        mask = (out_row < width)[:, None] & live[None, :]
        if HAS_RESIDUAL:  # rounded twice, as by torch
            added = tl.load(residual_ptr + out_at, mask=mask, other=0.0).to(tl.float32)
            written = (written.to(tl.float32) + added).to(written.dtype)
        tl.store(out_ptr + out_at, written, mask=mask)


class Launch(NamedTuple):
    """How the kernel is launched."""

    rows: int
    columns: int
    """Columns that a program reads at a time."""
    splits: int
    """Programs that share the columns of a row."""
    warps: int
    stages: int
    ahead: int = 0
    """Columns that a program asks for before the tokens are known."""
    overlap: bool = False
    """Whether it starts before the kernel before it has ended."""


def can_multiply(tokens: int, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel computes such a product, and faster than torch."""
    return 1 < tokens <= FEW_TOKENS and weight.dtype == dtype and dtype.itemsize == 2


def choose(outputs: int, inputs: int, overlap: bool) -> Launch:
    """The launch for a weight of this shape: within 7% of the best of 30 for products of Qwen3 4B and 8B."""
    splits = 1
    while triton.cdiv(outputs, ROWS) * splits < PROGRAMS and inputs >= 2 * splits * LEAST:
        splits *= 2
    return Launch(ROWS, 128, splits, 4, 3, 128, overlap)


def multiply_few(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`linear` for 1 to 32 tokens of 16 bits a value, like the weight: [..., inputs] -> [..., outputs].

    Each row of the weight is contiguous, and so is the bias. The residual is added to the product. `gated`:
    silu of its left half times its right half, before the residual.
    """
    outputs, inputs = weight.shape
    launch = launch or choose(outputs, inputs, can_overlap(hidden.device))
    splits = launch.splits
    hidden = hidden.contiguous()
    tokens = hidden.numel() // inputs
    out = hidden.new_empty(*hidden.shape[:-1], outputs // 2 if gated else outputs)
    width = max(SMALLEST, triton.next_power_of_2(tokens))
    tiles = triton.cdiv(outputs, launch.rows)
    steps = triton.cdiv(inputs, launch.columns * splits)
    few_kernel[(tiles, splits)](
        out,
        hidden,
        weight,
        hidden if bias is None else bias,
        hidden if residual is None else residual.contiguous(),
        *room_for(tiles, splits, launch.rows * width, hidden.device),
        tokens,
        outputs,
        inputs,
        weight.stride(0),
        steps,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        TOKENS=width,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        SPLITS=splits,
        EVEN=steps * splits * launch.columns == inputs,
        OVERLAP=launch.overlap,
        AHEAD=launch.ahead,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **({"launch_pdl": True} if launch.overlap else {}),
    )
    return out
