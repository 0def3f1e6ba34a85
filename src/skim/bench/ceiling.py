"""The machine's limits, measured in the same run: matrix multiplication rate and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from skim.bench.turns import alone
from skim.measure.report import Row
from skim.memory.budget import free_bytes

_SECONDS = 0.5  # minimum time for each probe
_LEAST = 3  # minimum runs of each probe
_BUFFER = 2**30  # minimum bytes of the bandwidth probe
_CACHES = 4  # buffer size in multiples of the last-level cache, so that most reads miss it
_FREE = 4  # the buffer takes at most 1 / _FREE of free memory
_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Ceiling:
    """Peak rates, each the best of several runs. Noise can only make them too low."""

    flops: float  # FLOP/s of a matrix product in the model's dtype
    bandwidth: float  # bytes per second


def rescale_shares(row: Row, limit: Ceiling, best: Ceiling) -> Row:
    """Convert a row's shares of `limit` to shares of `best`, the higher of two probes."""
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
    """Measure both rates, in a thread chosen as for a turn (`alone`)."""
    return alone(lambda: Ceiling(matrix_rate(device, dtype, seconds), memory_rate(device, dtype, seconds)))


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    size = 8192 if device.type == "cuda" else 2048
    left, right = (
        torch.rand(size, size, device=device).to(dtype) for _ in range(2)
    )  # zeros would draw less power
    out = torch.empty_like(left)
    best = fastest(lambda: torch.mm(left, right, out=out), device, seconds)
    return 2 * size**3 / best


@torch.inference_mode()
def memory_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Bytes per second of the fastest of three probes: a sum, a copy, a matrix-vector product.

    The fastest differs between machines; a decode step is mostly matrix-vector products.
    """
    columns = 4096
    cached = 0 if device.type == "cuda" else last_cache()  # GPU caches are far below the minimum buffer
    half = max(1, buffer_bytes(cached, free_bytes(device)) // (2 * columns * dtype.itemsize))
    source = torch.ones(2 * half, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, dtype=dtype, device=device)
    size = source.numel() * source.element_size()
    probes: list[tuple[int, Callable[[], object]]] = [
        (size, source.sum),
        (size, lambda: source[half:].copy_(source[:half])),  # reads one half, writes the other
        (size, lambda: torch.mv(source, vector)),
    ]
    return max(moved / fastest(probe, device, seconds / len(probes)) for moved, probe in probes)


def buffer_bytes(cached: int, free: int) -> int:
    """Size of a buffer larger than `cached` bytes of cache, limited by free memory."""
    return min(max(_BUFFER, _CACHES * cached), free // _FREE)


def last_cache(system: Path = _SYSTEM) -> int:
    """Total bytes of the machine's last-level caches; 0 if the system does not report them."""
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
    """Seconds of the fastest of at least three runs, after one warm-up run."""
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
