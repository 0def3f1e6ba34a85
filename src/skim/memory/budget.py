"""How much memory a device has left, and how much of a GPU's the pool may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from skim.errors import ConfigError

GRAPH_RESERVE = 512 * 2**20
"""Bytes kept for CUDA graphs: they are captured when first needed, long after the pool has its size."""
TENSOR_ROUNDING = 2 * 2**20
"""Bytes to which the CUDA allocator rounds a large tensor up; a pool has two tensors a layer."""
USEFUL_TOKENS = 1024
"""A pool that holds fewer, and less than the window, is refused: hardly a request could be served."""


def free_bytes(device: torch.device) -> int:
    """Bytes this process may still take on the device, the container's own limit included."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _cgroup_room())


def gpu_pool_bytes(
    *,
    total: int,
    used: int,
    peak: int | None,
    utilization: float,
    layers: int,
    least: int,
) -> int:
    """The pool's byte budget on a GPU of `total` bytes, of which `used` are taken, by whomever.

    `peak` is what a step of the worst case takes beside them; None where that is not known yet, and then the
    answer is an upper bound. What leaves less than `least` for the pool is a ConfigError.
    """
    allowed = int(utilization * total)
    rounding = 2 * layers * TENSOR_ROUNDING
    left = allowed - used - (peak or 0) - GRAPH_RESERVE - rounding
    if left >= least:
        return left
    step = "" if peak is None else f"the largest step takes {in_words(peak)} beside that, "
    raise ConfigError(
        f"the GPU has too little memory for a KV pool: gpu_memory_utilization {utilization} of its "
        f"{in_words(total)} is {in_words(allowed)}, {in_words(used)} are in use by weights and other "
        f"programs, {step}{in_words(GRAPH_RESERVE + rounding)} are reserved for CUDA graphs and rounding; "
        f"that leaves {in_words(max(left, 0))}, and the least useful pool takes {in_words(least)}. Lower "
        "max_num_batched_tokens, raise gpu_memory_utilization, take a smaller model, or end what else uses "
        "the GPU",
        fields=("gpu_memory_utilization", "max_num_batched_tokens", "model"),
    )


def in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _available() -> int:
    try:
        import psutil
    except ImportError:  # a run from source, with the core's packages only
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def _cgroup_room() -> int:
    """What is left under a cgroup limit, or a number too large to matter where there is none."""
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit_file).read_text()) - int(Path(usage_file).read_text()))
        except (OSError, ValueError):
            continue
    return 2**63


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever noticed: torch's allocator, a library's, the driver or Python."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()
