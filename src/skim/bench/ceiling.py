"""What this machine can do at most, measured in the same run: multiply matrices, and move memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from skim.bench.turns import alone

_SECONDS = 0.5  # spent on each probe, at least
_LEAST = 3  # times it is run


@dataclass(frozen=True)
class Ceiling:
    """The best of several runs: a limit to hold others against, so noise may only make it too low."""

    flops: float  # floating-point operations a second, multiplying matrices of the model's dtype
    bandwidth: float  # bytes a second


def measure_ceiling(device: torch.device, dtype: torch.dtype, *, seconds: float = _SECONDS) -> Ceiling:
    """Measured in a thread that ends, as every turn is."""
    return alone(lambda: Ceiling(matrix_rate(device, dtype, seconds), memory_rate(device, dtype, seconds)))


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    size = 8192 if device.type == "cuda" else 2048
    left, right = (
        torch.rand(size, size, device=device).to(dtype) for _ in range(2)
    )  # zeros would run cooler
    out = torch.empty_like(left)
    best = fastest(lambda: torch.mm(left, right, out=out), device, seconds)
    return 2 * size**3 / best


@torch.inference_mode()
def memory_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The fastest of three ways to go through memory: adding it up, copying it, a matrix times a vector.

    Which of them is best differs between machines; a decode step is mostly the last.
    """
    columns = 4096
    rows = (2**30 if device.type == "cuda" else 2**27) // (columns * dtype.itemsize)
    source = torch.ones(rows, columns, dtype=dtype, device=device)
    target = torch.empty_like(source)
    vector = torch.ones(columns, dtype=dtype, device=device)
    size = source.numel() * source.element_size()
    probes: list[tuple[int, Callable[[], object]]] = [
        (size, source.sum),
        (2 * size, lambda: target.copy_(source)),
        (size, lambda: torch.mv(source, vector)),
    ]
    return max(moved / fastest(probe, device, seconds / len(probes)) for moved, probe in probes)


def fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of at least three runs; the first one, which sets things up, is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
