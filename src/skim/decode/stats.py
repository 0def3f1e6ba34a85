"""Counts of slow and fast decode rows, of an engine and of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DecodeStats:
    """Decode rows to which slow-fast decode applied."""

    slow: int = 0
    fast: int = 0
    blocks: int = 0  # of the contexts of these rows, in each layer that is summarized
    blocks_read: int = 0  # of these, those that were read
    refreshes: Counter[str] = field(default_factory=Counter)  # slow rows by reason
    mass: float = 0.0  # sum of the estimated attention mass in the blocks that fast rows read
    masses: int = 0  # fast rows in that sum
    drafted: int = 0  # tokens that fast rows drafted and slow rows verified
    accepted: int = 0  # of these, those that slow rows drew as well

    @property
    def rows(self) -> int:
        return self.slow + self.fast

    @property
    def mean_mass(self) -> float | None:
        return self.mass / self.masses if self.masses else None

    def add(self, other: DecodeStats) -> None:
        self.slow += other.slow
        self.fast += other.fast
        self.blocks += other.blocks
        self.blocks_read += other.blocks_read
        self.refreshes.update(other.refreshes)
        self.mass += other.mass
        self.masses += other.masses
        self.drafted += other.drafted
        self.accepted += other.accepted

    def in_words(self) -> str:
        """`30 fast steps of 40`, or `25 of 30 drafts accepted`."""
        if self.drafted:
            return f"{self.accepted} of {self.drafted} drafts accepted"
        return f"{self.fast} fast steps of {self.rows}"

    def as_json(self) -> dict[str, Any]:
        """As replies show it."""
        return {
            "slow": self.slow,
            "fast": self.fast,
            "blocks": self.blocks,
            "blocks_read": self.blocks_read,
            "refreshes": dict(self.refreshes),
            "mean_mass": self.mean_mass,
            "drafted": self.drafted,
            "accepted": self.accepted,
        }

    def copy(self) -> DecodeStats:
        made = DecodeStats()
        made.add(self)
        return made
