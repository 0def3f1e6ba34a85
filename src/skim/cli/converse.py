"""A conversation, message by message: its commands, its files, and replies that may be interrupted."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from skim.cli.ask import parts_about
from skim.cli.documents import Source, read_sources
from skim.cli.files import check_utf8
from skim.cli.reply import CUT, Piece, Reply
from skim.errors import RequestError, SkimError

COMMANDS = (
    "/file PATH adds a file to the next message, /plan shows what was read for the last reply, /clear starts "
    "over, /exit or Ctrl-D ends, Ctrl-C stops a reply"
)

Message = dict[str, Any]
Pieces = Generator[Piece, None, None]
Answer = Callable[[list[Message]], Pieces]
Explain = Callable[[Sequence[Source]], list[str]]
"""Lines about the last reply, given the files of the conversation."""


def converse(
    answer: Answer, lines: Iterator[str], system: list[Message], *, interactive: bool, explain: Explain
) -> None:
    """Answer message by message. An error or Ctrl-C ends the reply if interactive, else the whole chat."""
    talk = Conversation(answer, system, explain)
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        try:
            talk.take(line)
        except KeyboardInterrupt:
            if not interactive:
                raise
        except SkimError as error:
            if not interactive:
                raise
            print(f"skim chat: {error}", file=sys.stderr)


class Conversation:
    """The messages so far, and files that wait for the next one."""

    def __init__(self, answer: Answer, system: list[Message], explain: Explain) -> None:
        self._answer = answer
        self._system = system
        self._explain = explain
        self._clear()

    def _clear(self) -> None:
        self._messages = list(self._system)
        self._waiting: list[Source] = []  # files for the next message
        self._sources: list[Source] = []  # files of earlier ones

    def take(self, line: str) -> None:
        """Run a command, or send a message."""
        if path := re.fullmatch(r"/file\s+(.+)", line):
            self._add_file(path[1].strip("'\""))
        elif line == "/file":
            raise RequestError("/file needs the path of a file, a directory or a pattern: /file notes.txt")
        elif line == "/plan":
            print("\n".join(self._explain(self._sources)))
        elif line == "/clear":
            self._clear()
        elif re.fullmatch(r"/\w*", line):
            raise RequestError(f"there is no {line}; {COMMANDS}")
        elif line:
            self._send(line)

    def _add_file(self, path: str) -> None:
        new = read_sources([path])
        self._waiting += new
        count = sum(source.text.count("\n") + 1 for source in new)
        print(f"(added {path}: {count:,} lines; ask about it)", file=sys.stderr)

    def _send(self, line: str) -> None:
        check_utf8(line, "the line")
        content = parts_about(self._waiting, line) if self._waiting else line
        asked = {"role": "user", "content": content}
        reply = Reply()
        try:
            _speak(self._answer, [*self._messages, asked], reply)
        except KeyboardInterrupt:
            if not reply.text:
                print()  # the terminal has shown ^C
            raise
        except SkimError:
            reply.text = ""
            raise
        finally:
            if reply.text:
                self._messages += [asked, {"role": "assistant", "content": reply.text}]
                self._sources += self._waiting
                self._waiting = []


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
