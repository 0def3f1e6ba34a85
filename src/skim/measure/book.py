"""The packaged text that prompts are made of, for speed and for quality."""

from __future__ import annotations

from importlib import resources

BOOK = "moby-dick.txt"


def packaged_text() -> str:
    """A novel in English."""
    return (resources.files("skim") / "data" / BOOK).read_text(encoding="utf-8")
