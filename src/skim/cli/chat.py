"""`skim chat`: a conversation in the terminal, with a model in this process or behind a URL."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator

from skim.cli.files import check_utf8
from skim.cli.reply import CUT, Piece, Reply
from skim.cli.settings.fields import Setting, engine_settings, server_settings
from skim.cli.settings.parser import Parser, add_engine_settings, add_sampling, add_setting
from skim.cli.settings.sources import build, engine_config, from_flag, gather
from skim.config import ServerConfig
from skim.errors import ConfigError, RequestError, SkimError

HELP = "talk to a model in the terminal"
USAGE = "[MODEL] [options]"
COMMANDS = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops a reply"

Message = dict[str, str]
Pieces = Generator[Piece, None, None]
Answer = Callable[[list[Message]], Pieces]


def configure(parser: Parser) -> None:
    parser.description = (
        f"Talk to a model. {COMMANDS}. When standard input is not a terminal, each line is a message and the "
        "first error ends the chat."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt: instructions before the conversation"
    )
    parser.add_argument(
        "--url",
        help="talk to the server at this address, such as http://127.0.0.1:8000, instead of loading a model; "
        "MODEL is then one of its models (default: the first it lists)",
    )
    add_setting(parser, _api_key())
    add_sampling(parser, max_tokens=1024, temperature=0.7)
    add_engine_settings(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise RequestError("standard input is closed, so there are no messages; give one per line")
    check_utf8(args.system or "", "--system")
    with _remote(args) if args.url is not None else _local(args) as answer:
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        messages = [{"role": "system", "content": args.system}] if args.system else []
        converse(answer, typed_lines() if typed else piped_lines(), messages, interactive=typed)
    return 0


def converse(answer: Answer, lines: Iterator[str], system: list[Message], *, interactive: bool) -> None:
    """Answer line by line. An error or Ctrl-C ends the reply if interactive, else the whole chat."""
    messages = list(system)
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(system)
        elif re.fullmatch(r"/\w*", line):
            print(f"skim chat: there is no {line}; {COMMANDS}", file=sys.stderr)
        elif line:
            asked = {"role": "user", "content": line}
            reply = Reply()
            try:
                check_utf8(line, "the line")
                _speak(answer, [*messages, asked], reply)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                if not reply.text:
                    print()  # the terminal has shown ^C
            except SkimError as error:
                if not interactive:
                    raise
                print(f"skim chat: {error}", file=sys.stderr)
                continue
            if reply.text:
                messages += [asked, {"role": "assistant", "content": reply.text}]


def typed_lines() -> Iterator[str]:
    """Lines from the terminal, with its editing and history, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once imported
    print(f"({COMMANDS})", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n({COMMANDS})", file=sys.stderr)
            continue
        yield line


def piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input is not a text in UTF-8; convert it, for example with iconv"
        ) from error


def _speak(answer: Answer, messages: list[Message], reply: Reply) -> None:
    try:
        with interrupted_once(), contextlib.closing(answer(messages)) as pieces:
            for piece in pieces:
                reply.add(piece)
    finally:
        reply.end_line()
    if reply.was_cut:
        print(f"({CUT})", file=sys.stderr)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """The first Ctrl-C interrupts; further ones are ignored, so that the request is closed properly."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _local(args: argparse.Namespace) -> Iterator[Answer]:
    if args.api_key is not None:
        raise ConfigError("--api-key: it is the key of the server at --url; give both, or neither")
    config = engine_config(gather(engine_settings(), args, os.environ))

    from skim.cli.local import answer as events
    from skim.cli.local import opened
    from skim.engine.sequence import Delta
    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with opened(config) as llm:

        def answer(messages: list[Message]) -> Pieces:
            with contextlib.closing(events(llm, messages, params)) as found:
                for event in found:
                    if isinstance(event, Delta):
                        yield Piece(event.text, event.finish_reason)

        yield answer


@contextlib.contextmanager
def _remote(args: argparse.Namespace) -> Iterator[Answer]:
    for setting in engine_settings():
        given = from_flag(setting, args)
        if given is not None and setting.name != "model":
            raise ConfigError(
                f"{given.origin}: it has no effect with --url, because the server has its own settings"
            )
    found = gather([_api_key()], args, os.environ)
    key = build(ServerConfig, ["api_key"], found).api_key

    from skim.cli.remote import RemoteModel

    with RemoteModel(args.url, key, getattr(args, "MODEL", None) or args.model) as remote:
        remote.connect()
        yield lambda messages: remote.reply(
            messages, temperature=args.temperature, max_tokens=args.max_tokens
        )


def _api_key() -> Setting:
    """The server's `api_key` setting with a client's help text: one variable or file serves both."""
    [key] = [setting for setting in server_settings() if setting.name == "api_key"]
    return dataclasses.replace(key, doc="Key that the server at --url requires. Default: no key.")
