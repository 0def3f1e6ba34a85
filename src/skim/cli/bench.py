"""`skim bench`: speed, measured. Each of its commands is a module, as those of `skim` are."""

from __future__ import annotations

import argparse
from typing import Any

from skim.cli import bench_compare, bench_decode, bench_kv, bench_serve, bench_ttft
from skim.cli.parser import Parser

HELP = "measure speed: time to first token, decode steps, KV formats, a server under load"
USAGE = "{ttft,decode,kv,serve,compare} [options]"

COMMANDS: dict[str, Any] = {
    "ttft": bench_ttft,
    "decode": bench_decode,
    "kv": bench_kv,
    "serve": bench_serve,
    "compare": bench_compare,
}


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Reports go to the terminal, to JSON and to HTML. A row that did not "
        "measure what it says is marked FAILED with the reason, and the exit code is 1."
    )
    choices = parser.add_subparsers(
        dest="bench", metavar="COMMAND", required=True, prog="skim bench", parser_class=Parser
    )
    for name, command in COMMANDS.items():
        child = choices.add_parser(name, help=command.HELP, usage=f"skim bench {name} {command.USAGE}")
        child.description = f"{command.HELP[0].upper()}{command.HELP[1:]}."
        child.set_defaults(parser=child)
        command.configure(child)


def run(args: argparse.Namespace) -> int:
    return int(COMMANDS[args.bench].run(args))
