"""Free memory of a device, a cap on it, and the share of a GPU's memory that the KV pool may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from skim.errors import ConfigError

GRAPH_RESERVE = 512 * 2**20
"""Bytes reserved for CUDA graphs, which are captured after the pool is sized."""
TENSOR_ROUNDING = 2 * 2**20
"""The CUDA allocator rounds large tensors up to a multiple of this many bytes."""
USEFUL_TOKENS = 1024
"""Refuse a pool that holds fewer tokens than this and than the context window: it could serve no request."""


def free_bytes(device: torch.device) -> int:
    """Bytes this process may still take on the device, within the container's limit or a GPU's cap."""
    if device.type == "cuda":
        return gpu_memory(device)[0]
    return min(_available(), _cgroup_room())


def cap_gpu_memory(device: torch.device, cap: int | None) -> None:
    """Let this process take at most `cap` bytes of a GPU, as if the GPU were that small. None lifts a cap.

    It is a limit of torch's allocator: an allocation beyond it fails. The driver's own memory, about half a
    gigabyte, is not part of it.
    """
    total = torch.cuda.mem_get_info(device)[1]
    share = 1.0 if cap is None else min(1.0, cap / total)
    torch.cuda.set_per_process_memory_fraction(share, _index(device))


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU. With a cap, it is the total, and memory of other programs matters only
    where it leaves less than the cap."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(_index(device))
    if share >= 1.0:
        return free, total
    cap = round(share * total)
    return max(0, min(free, cap - torch.cuda.memory_reserved(device))), cap


def gpu_size(device: torch.device) -> int:
    """Total bytes of a GPU, or its cap. Unlike `gpu_memory`, it does not ask the driver."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return round(torch.cuda.get_per_process_memory_fraction(_index(device)) * total)


def _index(device: torch.device) -> int:
    """The number of a GPU: `cuda` alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def gpu_pool_bytes(
    *,
    total: int,
    used: int,
    peak: int | None,
    utilization: float,
    tensors: int,
    least: int,
    graphs: int = GRAPH_RESERVE,
) -> int:
    """The pool's byte budget on a GPU of `total` bytes, of which all programs together use `used`.

    `peak` is the memory of a worst-case step; if it is None, the result is an upper bound. `tensors` counts
    the pool's tensors, `graphs` the bytes that CUDA graphs may take. Raises ConfigError if less than `least`
    bytes are left for the pool.
    """
    allowed = int(utilization * total)
    rounding = tensors * TENSOR_ROUNDING
    left = allowed - used - (peak or 0) - graphs - rounding
    if left >= least:
        return left
    step = "" if peak is None else f"the largest step or scoring takes {in_words(peak)}, "
    raise ConfigError(
        f"the GPU has too little memory for a KV pool: gpu_memory_utilization {utilization} of its "
        f"{in_words(total)} is {in_words(allowed)}, {in_words(used)} are in use by weights and other "
        f"programs, {step}{in_words(graphs + rounding)} are reserved for CUDA graphs and rounding; "
        f"that leaves {in_words(max(left, 0))}, and the smallest useful pool takes {in_words(least)}. Lower "
        "max_num_batched_tokens, raise gpu_memory_utilization, keep layers on the host with offload_layers, "
        "use a smaller model, or stop other programs that use the GPU",
        fields=("gpu_memory_utilization", "max_num_batched_tokens", "offload_layers", "model"),
    )


def in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _available() -> int:
    try:
        import psutil
    except ImportError:  # running from source with only the core's dependencies
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def _cgroup_room() -> int:
    """Bytes left under a cgroup limit; 2**63 without a limit."""
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
    """True if memory ran out, whether torch, a library, the driver or Python reported it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # Outside torch's allocator (CUDA driver, Triton) it is a plain RuntimeError: only the text tells.
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
