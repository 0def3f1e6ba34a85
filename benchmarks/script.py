"""What the scripts here have in common: bad input is one line, not a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from skim.errors import SkimError


def positive(text: str) -> int:
    """A type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except SkimError as error:
        sys.exit(f"{sys.argv[0]}: {error}")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
