"""`skim bench compare`: compare two reports and flag changes beyond the noise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skim.cli.settings.parser import Parser
from skim.errors import RequestError
from skim.measure.compare import ENOUGH, LEAST, MARGIN, compare, listing
from skim.measure.report import MeasurementError, Report

HELP = "compare two reports and flag changes beyond the noise"
USAGE = "A.json B.json [--fail-on-regression]"
REMEDY = "give a report written by skim bench or skim eval with --json"


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: every figure of B as a ratio to A's. A figure changed (+ better, ! "
        "worse, ~ neither) if the two ranges or 95% intervals do not overlap and both have "
        f"n >= {ENOUGH}. With n of {LEAST} or {ENOUGH - 1}, chance separates ranges too often: the gap must "
        f"exceed both the width of the wider range and {MARGIN:.0%} of the value. With fewer runs there is "
        "no verdict. Counted numbers need no repeats. The files are reports written by skim bench or skim "
        "eval with --json."
    )
    parser.add_argument("before", metavar="A.json", help="baseline report")
    parser.add_argument("after", metavar="B.json", help="report of the same command to compare with it")
    parser.add_argument(
        "--fail-on-regression",
        action="store_true",
        help="exit with 1 if a figure got worse beyond the noise, or if a row or figure of A is missing or "
        "failed in B",
    )


def run(args: argparse.Namespace) -> int:
    before, after = read(args.before), read(args.after)
    try:
        found = compare(before, after)
    except MeasurementError as error:
        raise RequestError(f"cannot compare {args.before} with {args.after}: {error}") from error
    print(f"A: {args.before}\nB: {args.after}\n")
    print(listing(found))
    if not found.changes:
        print("skim bench compare: the reports have no row in common", file=sys.stderr)
        return 1
    return 1 if args.fail_on_regression and found.regressions else 0


def read(name: str) -> Report:
    """Read a report. Errors name the file."""
    try:
        return Report.from_json(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}; {REMEDY}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"cannot read {name}: it is not text; {REMEDY}") from error
    except MeasurementError as error:
        raise RequestError(f"cannot read {name}: {error}; {REMEDY}") from error
