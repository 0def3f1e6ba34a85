"""`skim unpark`: bring the models of a running server back to the device."""

from __future__ import annotations

import argparse

from skim.cli.residency import add_models, move
from skim.cli.settings.parser import Parser

HELP = "bring the models of a running server back to the device"
USAGE = "[MODEL ...] [options]"


def configure(parser: Parser) -> None:
    parser.description = (
        "Bring the models of a running server back to the device, as far as its residency policy has them "
        "there. Needs the server's admin key."
    )
    add_models(parser)


def run(args: argparse.Namespace) -> int:
    return move(args, "admin/unpark")
