"""The remedy for a damaged model directory."""

from __future__ import annotations

from pathlib import Path

from skim import cache


def remedy(path: Path) -> str:
    """The remedy for a damaged directory, to end an error message with."""
    if path.is_relative_to(cache.root()):
        return f"delete {path} and it will be rebuilt"
    return f"fetch the files in {path} again"
