"""Profile a GPU while a function runs: time per kernel, and idle times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LONG_MS = 1.0  # shorter idle times are not shown
KERNELS = 16
WIDTH = 78  # of a kernel's name


def device_work(run: Callable[[], object], times: int = 1) -> str:
    """Call `run` several times; return a table of averages. Call this on the thread that does the work."""
    torch.cuda.synchronize()  # an earlier in-flight step must not be profiled
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start / 1e3, event.time_range.end / 1e3, event.name[:WIDTH])
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        return "device: no work recorded"
    waits, until = [], spans[0][0]
    spent, launches = Counter[str](), Counter[str]()
    for start, end, name in spans:
        if start - until > LONG_MS:
            waits.append(f"  idle for {start - until:.1f} ms before {name}")
        until = max(until, end)
        spent[name] += end - start
        launches[name] += 1
    busy, whole = sum(spent.values()) / times, (until - spans[0][0]) / times
    return "\n".join(
        [
            f"device: {len(spans) / times:.0f} launches, busy for {busy:.2f} of {whole:.2f} ms",
            *(
                f"{ms / times:8.3f} ms {launches[n] / times:6.1f}x {n}"
                for n, ms in spent.most_common(KERNELS)
            ),
            *waits,
        ]
    )
