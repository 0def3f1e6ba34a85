"""The packaged text that benchmarks, evaluations and calibration build prompts from."""

from __future__ import annotations

from importlib import resources

BOOK = "moby-dick.txt"


def packaged_text() -> str:
    """A novel in English."""
    return (resources.files("skim") / "data" / BOOK).read_text(encoding="utf-8")
