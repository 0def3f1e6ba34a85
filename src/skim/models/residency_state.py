"""The state of a model's residency, as plain data: its place, the reason for it, and its moves so far.

`residency.py` moves weights. Schedulers, metrics and HTTP need only these words and numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from skim.memory.budget import in_words


class Place(StrEnum):
    """Where weights are."""

    RESIDENT = "resident"  # on the device
    PARKED = "parked"  # in host memory; of a model on a CPU, in the scratch file
    RELEASED = "released"  # in the scratch file only


class Direction(StrEnum):
    TO_DEVICE = "to_device"
    TO_HOST = "to_host"
    TO_DISK = "to_disk"


class Standing(StrEnum):
    """Why a model is where it is, and what brings it back."""

    READY = "ready"  # on the device
    PARK_WAITS = "park_waits"  # an administrator's park waits for running requests; new ones are refused
    HELD = "held"  # parked by an administrator, until an unpark
    IDLE = "idle"  # parked after some time without work; the next request brings it back
    POLICY = "policy"  # away by the policy; it comes when a prompt or a step needs it


@dataclass(frozen=True)
class Transfer:
    """One move. Its bytes are those that were copied: a second park copies none."""

    direction: Direction
    bytes: int
    seconds: float
    at: float = field(default_factory=time.time)  # Unix time when its end was noticed

    def __str__(self) -> str:
        moved = f"{in_words(self.bytes)} {self.direction.replace('_', ' ')}"
        if not self.bytes:
            moved = f"parked {_COPIED[self.direction]} without copying, an earlier copy is there,"
        return f"{moved} in {self.seconds:.2f} s"


_COPIED = {
    Direction.TO_HOST: "in host memory",
    Direction.TO_DISK: "on disk",
    Direction.TO_DEVICE: "on the device",
}


@dataclass(frozen=True)
class Transfers:
    """Moves in one direction since start."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, one: Transfer) -> Transfers:
        return Transfers(self.count + 1, self.bytes + one.bytes, self.seconds + one.seconds)


class TransferCounts:
    """Moves of one model since start. Any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Direction, Transfers] = {}
        self._last: Transfer | None = None

    def add(self, one: Transfer) -> None:
        with self._lock:
            self._last = one
            self._counts[one.direction] = self._counts.get(one.direction, Transfers()).plus(one)

    def read(self) -> tuple[dict[Direction, Transfers], Transfer | None]:
        """The counts by direction, and the last move."""
        with self._lock:
            return dict(self._counts), self._last


@dataclass(frozen=True)
class ResidencyState:
    """A model at one moment."""

    model: str
    role: str  # `target` or `drafter`
    place: Place
    standing: Standing
    device_bytes: int
    host_bytes: int  # of a GPU's model: copies of its weights
    disk_bytes: int
    transfers: Mapping[Direction, Transfers] = field(default_factory=dict)
    last: Transfer | None = None
