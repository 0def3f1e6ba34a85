"""Kernels that start while the kernel before them ends: CUDA's programmatic dependent launch.

Starting a kernel takes about a microsecond, and a decode step has hundreds of them. Every kernel launched so
calls `await_inputs` before it touches what kernels of the step write, and none returns before the call:
otherwise the kernel after it could start too early. Before the call it may read weights and the step's
tables.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

LINE = tl.constexpr(64)  # values of 16 bits in a cache line


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, then let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(ptr):
    """Prefetch the cache lines at these addresses into the second cache. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """True from compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device) -> dict[str, Any]:
    """Arguments for launching a kernel with a parameter OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}
