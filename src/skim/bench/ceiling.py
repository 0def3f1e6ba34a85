"""What this machine can do at most, measured in the same run: multiply matrices, and move memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from skim.bench.turns import alone
from skim.measure.report import Row
from skim.memory.budget import free_bytes

_SECONDS = 0.5  # spent on each probe, at least
_LEAST = 3  # times it is run
_BUFFER = 2**30  # bytes that memory is measured with, at least
_CACHES = 4  # times the size of the last cache, so that most of it is not there
_FREE = 4  # the buffer takes no more than one part in so many of what is free
_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Ceiling:
    """The best of several runs: a limit to hold others against, so noise may only make it too low."""

    flops: float  # floating-point operations a second, multiplying matrices of the model's dtype
    bandwidth: float  # bytes a second


def hold_against(row: Row, limit: Ceiling, best: Ceiling) -> Row:
    """A row whose shares were taken of `limit`, with shares of `best`, which was found by probing again."""
    flops, bandwidth = limit.flops / best.flops, limit.bandwidth / best.bandwidth
    factors = {"of_peak": flops, "of_floor": bandwidth, "floor": bandwidth}
    figures = {
        name: replace(
            figure, **{part: getattr(figure, part) * factors[name] for part in ("value", "low", "high")}
        )
        if name in factors
        else figure
        for name, figure in row.figures.items()
    }
    return replace(row, figures=figures)


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
    cached = 0 if device.type == "cuda" else last_cache()  # a GPU's are far below the least buffer
    half = max(1, buffer_bytes(cached, free_bytes(device)) // (2 * columns * dtype.itemsize))
    source = torch.ones(2 * half, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, dtype=dtype, device=device)
    size = source.numel() * source.element_size()
    probes: list[tuple[int, Callable[[], object]]] = [
        (size, source.sum),
        (size, lambda: source[half:].copy_(source[:half])),  # one half is read, the other written
        (size, lambda: torch.mv(source, vector)),
    ]
    return max(moved / fastest(probe, device, seconds / len(probes)) for moved, probe in probes)


def buffer_bytes(cached: int, free: int) -> int:
    """The size of a buffer that no cache of `cached` bytes holds, as far as memory allows."""
    return min(max(_BUFFER, _CACHES * cached), free // _FREE)


def last_cache(system: Path = _SYSTEM) -> int:
    """Bytes of all last-level caches of this machine together; 0 where it does not tell."""
    sizes: dict[tuple[int, str], int] = {}
    for index in system.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, cores = (
                (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            sizes[int(level), cores] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


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
