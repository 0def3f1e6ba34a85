"""`skim chat`: a conversation in the terminal, with a model in this process or behind a URL."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

from skim import cache
from skim.cli.ask import read_of
from skim.cli.converse import COMMANDS, Answer, Explain, Message, Pieces, converse
from skim.cli.documents import Source
from skim.cli.files import check_utf8
from skim.cli.reply import Piece
from skim.cli.settings.client import key_of, key_setting, refuse_engine_settings
from skim.cli.settings.fields import engine_settings
from skim.cli.settings.parser import (
    Parser,
    add_engine_settings,
    add_sampling,
    add_setting,
    max_tokens_of,
)
from skim.cli.settings.sources import engine_config, gather
from skim.cli.terminal import columns, may_colour
from skim.cli.typed import typed_messages
from skim.errors import ConfigError, RequestError

HELP = "talk to a model in the terminal"
USAGE = "[MODEL] [options]"
HISTORY = "chat_history.jsonl"
FILES = "auto"  # sparse prefill of conversations with files

API_KEY = key_setting("api_key", "Key that the server at --url requires. Default: no key.")

Talk = tuple[Answer, Explain]


def configure(parser: Parser) -> None:
    parser.description = (
        f"Talk to a model. {COMMANDS}. Pasted lines are one message. When standard input is not a terminal, "
        "each line is a message and the first error ends the chat."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt: instructions before the conversation"
    )
    parser.add_argument(
        "--url",
        help="talk to the server at this address, such as http://127.0.0.1:8000, instead of loading a model; "
        "MODEL is then one of its models (default: the first it lists)",
    )
    add_setting(parser, API_KEY)
    add_sampling(parser, max_tokens=1024, temperature=0.7)
    add_engine_settings(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise RequestError("standard input is closed, so there are no messages; give one per line")
    check_utf8(args.system or "", "--system")
    with _remote(args) if args.url is not None else _local(args) as (answer, explain):
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
        lines = typed_messages(COMMANDS, cache.root() / HISTORY) if typed else piped_lines()
        converse(answer, lines, messages, interactive=typed, explain=explain)
    return 0


def piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input is not a text in UTF-8; convert it, for example with iconv"
        ) from error


@contextlib.contextmanager
def _local(args: argparse.Namespace) -> Iterator[Talk]:
    if args.api_key is not None:
        raise ConfigError("--api-key: it is the key of the server at --url; give both, or neither")
    found = gather(engine_settings(), args, os.environ)
    config = engine_config(found)
    with_files = config.prefill
    if "sparse_prefill" not in found:
        with_files = dataclasses.replace(config.prefill, sparse_prefill=FILES)

    from skim.cli.local import answer as events
    from skim.cli.local import opened
    from skim.cli.plan import lines
    from skim.cli.shown import shown_of
    from skim.engine.sequence import Delta, Finished
    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=max_tokens_of(args))
    last: list[tuple[list[Message], Finished]] = []
    with opened(config) as llm:

        def answer(messages: list[Message]) -> Pieces:
            has_files = any(isinstance(message["content"], list) for message in messages)
            prefill = with_files if has_files else config.prefill
            with contextlib.closing(events(llm, messages, params, prefill=prefill)) as found:
                for event in found:
                    if isinstance(event, Delta):
                        yield Piece(event.text, event.finish_reason)
                    else:
                        last[:] = [(messages, event)]

        def explain(sources: Sequence[Source]) -> list[str]:
            if not last:
                return ["no reply was written yet"]
            [(messages, done)] = last
            if done.plan is None:
                return [f"{done.metrics.prompt_tokens} prompt tokens, {read_of(done)}"]
            prompt = llm.encode_chat(messages, skimmed=True)
            return lines(shown_of(llm, prompt, done.plan, sources), width=columns(), colour=may_colour())

        yield answer, explain


@contextlib.contextmanager
def _remote(args: argparse.Namespace) -> Iterator[Talk]:
    refuse_engine_settings(args, allowed={"model"})
    key = key_of(args, API_KEY)

    from skim.cli.remote import RemoteModel

    with RemoteModel(args.url, key, getattr(args, "MODEL", None) or args.model) as remote:
        remote.connect()

        def answer(messages: list[Message]) -> Pieces:
            return remote.reply(messages, temperature=args.temperature, max_tokens=args.max_tokens)

        yield answer, lambda sources: [remote.reading]
