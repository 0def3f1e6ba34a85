"""A scorer that fails, for tests of the dense fallback."""

from __future__ import annotations

from collections.abc import Generator

from skim.prefill.scoring.scorer import ScoringTask

FAILURES = {
    "raises": "scorer_failed",
    "nan": "non_finite",
    "short": "non_finite",
    "out of memory": "out_of_memory",
}
"""The fallback reason that counts each failure."""


class Broken:
    """A scorer that fails in one of the ways in `FAILURES`."""

    def __init__(self, how: str) -> None:
        self.how = how

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        yield
        if self.how == "raises":
            raise ValueError("no idea")
        if self.how == "out of memory":
            raise MemoryError("too large")
        return [float("nan") if self.how == "nan" else 1.0] * (task.blocks - (self.how == "short"))
