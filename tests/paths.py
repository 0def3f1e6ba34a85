"""Paths and texts of the project's files, for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "skim"
BOOK = (SOURCE / "data" / "moby-dick.txt").read_text(encoding="utf-8")
LICENSE = (ROOT / "LICENSE").read_text(encoding="utf-8")
