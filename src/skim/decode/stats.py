"""Counts of slow and fast decode rows, of an engine and of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Decode rows to which slow-fast decode applied."""

    slow: int = 0
    fast: int = 0
    blocks: int = 0  # of the contexts of these rows, in each layer that is summarized
    blocks_read: int = 0  # of these, those that were read
    refreshes: Counter[str] = field(default_factory=Counter)  # slow rows by reason
    mass: float = 0.0  # sum over fast rows of the estimated attention mass in the blocks read

    @property
    def rows(self) -> int:
        return self.slow + self.fast

    @property
    def mean_mass(self) -> float | None:
        return self.mass / self.fast if self.fast else None

    def add(self, other: DecodeStats) -> None:
        self.slow += other.slow
        self.fast += other.fast
        self.blocks += other.blocks
        self.blocks_read += other.blocks_read
        self.refreshes.update(other.refreshes)
        self.mass += other.mass

    def copy(self) -> DecodeStats:
        made = DecodeStats()
        made.add(self)
        return made
