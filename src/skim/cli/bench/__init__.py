"""`skim bench`: speed benchmarks. Each command is a module here, like the commands of `skim`."""

from __future__ import annotations

import argparse
from typing import Any

from skim.cli.bench import compare, decode, kv, serve, ttft
from skim.cli.settings.parser import Parser
from skim.errors import SkimError

HELP = "measure speed: time to first token, decode steps, KV formats, a server under load"
USAGE = "COMMAND [options]"

COMMANDS: dict[str, Any] = {
    "ttft": ttft,
    "decode": decode,
    "kv": kv,
    "serve": serve,
    "compare": compare,
}


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Each command prints a table; --json FILE saves it with the machine, "
        "versions and seeds, --html FILE plots it. A row without a valid measurement is marked FAILED with "
        "the reason, and the exit code is 1."
    )
    parser.epilog = (
        "`skim bench COMMAND --help` lists a command's options. `skim eval` measures the quality of answers."
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
    """Run the command. Errors are prefixed with its full name, like those of its parser."""
    from skim.cli.main import report

    try:
        return int(COMMANDS[args.bench].run(args))
    except SkimError as error:
        return report(error, args.parser.prog, args)
