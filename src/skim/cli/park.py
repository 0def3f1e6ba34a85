"""`skim park`: free the device's memory of a running server."""

from __future__ import annotations

import argparse

from skim.cli.residency import add_models, move
from skim.cli.settings.parser import Parser

HELP = "move the models of a running server off the device"
USAGE = "[MODEL ...] [options]"


def configure(parser: Parser) -> None:
    parser.description = (
        "Move the models of a running server off the device, once no request runs. Until `skim unpark`, "
        "requests are answered 503 if the target is parked. Without its drafter, the server reads prompts in "
        "full. Keys and values stay in the KV pool. Needs the server's admin key."
    )
    parser.add_argument(
        "--to",
        choices=("parked", "released"),
        help="`parked` in host memory, `released` on disk only; models of a CPU are on disk in both "
        "(default: parked)",
    )
    parser.add_argument("--no-wait", action="store_true", help="fail at once if requests are running")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="fail if requests still run after this time (default: the server's request_timeout)",
    )
    add_models(parser)


def run(args: argparse.Namespace) -> int:
    return move(args, "admin/park", to=args.to, wait=False if args.no_wait else None, timeout=args.timeout)
