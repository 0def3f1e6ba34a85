"""A good neighbour on a CPU: threads do not spin while they wait, and are as many as the cores they may use.

OpenMP's threads wait for each other many times per token. By default GNU's runtime spins for milliseconds.
On a busy machine, a spinning thread takes the core from the thread that it waits for, and a token takes many
times as long. Without any spinning, an idle machine is slower: waking a thread takes longer than most waits.
So threads spin for some tens of microseconds and then sleep. That matters most beside another program of this
kind: each spins on the core that a thread of the other one waits for.

OpenMP reads its variables once, when torch loads it. So `import skim` sets them, before it imports torch. A
variable that is set already is left alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

SPINS = 1000
"""Turns of GNU's waiting loop, of 10 to 50 nanoseconds each."""

WAITING = {
    "GOMP_SPINCOUNT": str(SPINS),  # GNU
    "KMP_BLOCKTIME": "0",  # Intel and LLVM, in milliseconds; the default is 200
}
UNCHANGED = {"KMP_BLOCKTIME": "200"}
"""A choice that leaves waiting as runtimes do it by default, for programs that Skim is compared with."""

_CHOSEN = ("OMP_WAIT_POLICY", *WAITING)  # any of these means that the user has chosen a policy
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_up(variables: MutableMapping[str, str], *, cores: int, allowed: float) -> dict[str, str]:
    """Set the variables of OpenMP that the user has not set, and return them.

    The runtime follows the affinity, which is `cores`, but does not know of a quota, which may allow less.
    """
    chosen: dict[str, str] = {}
    if not any(name in variables for name in _CHOSEN):
        chosen |= WAITING
    if allowed < cores and not any(name in variables for name in _THREADS):
        chosen["OMP_NUM_THREADS"] = str(max(1, math.floor(allowed)))
    variables.update(chosen)
    return chosen


def affine_cores() -> int:
    """Cores that this process may run on, by its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(groups: str, root: Path) -> float:
    """Cores that the control groups of a process allow; infinite without a quota.

    `groups` is the content of `/proc/self/cgroup`, and `root` is `/sys/fs/cgroup`. The quotas of all parents
    count, in version 2 and in version 1.
    """
    found = [math.inf]
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [_parse(*_read(place / "cpu.max").split()) for place in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                for place in _upwards(mount, path):
                    limit, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
                    found.append(_parse(limit, period))
    return min(found)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A control group's directory and those of its parents. In a container, only the mount may be there."""
    here = Path(path.lstrip("/"))
    yield from (mount / one for one in (here, *here.parents))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse(limit: str = "", period: str = "", *_: str) -> float:
    """Cores of a quota; infinite for `max`, -1 and anything that is no quota."""
    if limit.isdigit() and period.isdigit() and int(limit) > 0 and int(period) > 0:
        return int(limit) / int(period)
    return math.inf


def _groups() -> str:
    return _read(Path("/proc/self/cgroup"))


OURS = set_up(os.environ, cores=affine_cores(), allowed=quota(_groups(), Path("/sys/fs/cgroup")))
"""The variables that were set here."""


def without_ours() -> dict[str, str]:
    """An environment in which OpenMP's threads wait as they do by default, or as the user has chosen."""
    rest = {name: value for name, value in os.environ.items() if OURS.get(name) != value}
    return rest if any(name in rest for name in _CHOSEN) else rest | UNCHANGED
