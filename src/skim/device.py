"""Work on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. Copies to CUDA go through pinned memory, else the host would wait."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of whole numbers as int64 tensors on the device, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64))
    parts = to_device(flat, device).split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host. Those of CUDA tensors are complete after `until_computed`."""
    found = []
    for tensor in tensors:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        found.append(pinned.copy_(tensor, non_blocking=True))
    return found


def until_computed(device: torch.device) -> Generator[None, None, None]:
    """Yield until the device has computed everything launched so far; at once on a CPU."""
    if device.type == "cuda":
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        while not done.query():
            yield
