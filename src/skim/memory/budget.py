"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes this process may still take on the device, the container's own limit included."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _cgroup_room())


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
