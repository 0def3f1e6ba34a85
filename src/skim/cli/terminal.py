"""The terminal that output goes to: its width and colours."""

from __future__ import annotations

import os
import shutil
import sys

MOST_COLUMNS = 120


def columns() -> int:
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def may_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
