"""`skim bench compare`: two reports side by side, with what moved beyond the noise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skim.cli.settings.parser import Parser
from skim.errors import RequestError
from skim.measure.compare import ENOUGH, LEAST, MARGIN, compare, listing
from skim.measure.report import MeasurementError, Report

HELP = "compare two reports and flag what moved beyond the noise"
USAGE = "A.json B.json [--fail-on-regression]"
REMEDY = "give a file that --json of skim bench or skim eval wrote"


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: every figure of B against A's, as a ratio. It moved (+ better, ! "
        "worse, ~ neither) where the two ranges or 95% intervals do not overlap and both have "
        f"n >= {ENOUGH}. With n of {LEAST} or {ENOUGH - 1} they lie apart by chance too often, and must be "
        f"further apart than the wider one is wide and than {MARGIN:.0%} of the value; of fewer runs nothing "
        "is said. Counted numbers need no repeats. The files are those that --json of skim bench and skim "
        "eval wrote."
    )
    parser.add_argument("before", metavar="A.json", help="report to compare with")
    parser.add_argument("after", metavar="B.json", help="report of the same kind")
    parser.add_argument(
        "--fail-on-regression",
        action="store_true",
        help="exit with 1 if a figure got worse beyond the noise, or what A has is missing or failed in B",
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
        print("skim bench compare: no row is in both reports", file=sys.stderr)
        return 1
    return 1 if args.fail_on_regression and found.regressions else 0


def read(name: str) -> Report:
    """The report in a file, or an error that names the file."""
    try:
        return Report.from_json(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}; {REMEDY}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"cannot read {name}: it is not text; {REMEDY}") from error
    except MeasurementError as error:
        raise RequestError(f"cannot read {name}: {error}; {REMEDY}") from error
