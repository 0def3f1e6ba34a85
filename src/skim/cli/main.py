"""`skim`: the commands and their exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from skim.cli import (
    INTERRUPTED,
    ask,
    bench,
    calibrate,
    chat,
    checkpoint,
    park,
    plan,
    pull,
    serve,
    status,
    unpark,
)
from skim.cli import eval as evaluate
from skim.cli.settings.parser import Parser
from skim.cli.settings.sources import as_written, warn_of_misspelt_variables
from skim.errors import ConfigError, ModelError, RequestError, SkimError
from skim.version import __version__

COMMANDS = {
    "serve": serve,
    "chat": chat,
    "ask": ask,
    "plan": plan,
    "calibrate": calibrate,
    "bench": bench,
    "eval": evaluate,
    "pull": pull,
    "checkpoint": checkpoint,
    "park": park,
    "unpark": unpark,
    "status": status,
}

OK, FAILED, WRONG_USAGE, NO_MODEL = 0, 1, 2, 3

EPILOG = f"""\
exit codes:
  {OK:<4} success
  {FAILED:<4} a failure at run time: of the engine, the server, the connection or the output
  {WRONG_USAGE:<4} wrong usage, settings or input: the command must change
  {NO_MODEL:<4} the model cannot be found, fetched, converted or loaded
  {INTERRUPTED:<4} interrupted with Ctrl-C

Fetched and converted models are in $SKIM_CACHE (default: skim in the user's cache directory).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Only unexpected errors leave a traceback."""
    if sys.stdout is None:
        print("skim: standard output is closed; redirect it, for example to /dev/null", file=sys.stderr)
        return WRONG_USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot show all that models write
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output is gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(f"skim: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    name = f"skim {args.command}"
    try:
        warn_of_misspelt_variables(name, os.environ)
        return int(COMMANDS[args.command].run(args))
    except SkimError as error:
        return report(error, name, args)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def report(error: SkimError, command: str, args: argparse.Namespace) -> int:
    """Print an error of a command and return the exit code."""
    print(f"{command}: {as_written(error, args, os.environ)}", file=sys.stderr)
    return exit_code(error)


def exit_code(error: SkimError) -> int:
    if isinstance(error, (ConfigError, RequestError)):
        return WRONG_USAGE
    return NO_MODEL if isinstance(error, ModelError) else FAILED


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", commands[args.command]).refuse(unknown)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `skim`, and those of its commands by name."""
    parser = Parser(
        prog="skim",
        description="A long-context LLM inference engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"skim {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        usage = f"skim {name} {command.USAGE}"
        commands[name] = choices.add_parser(name, help=command.HELP, usage=usage)
        commands[name].description = command.HELP[0].upper() + command.HELP[1:] + "."
        command.configure(commands[name])
    return parser, commands
