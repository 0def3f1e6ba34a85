"""Incremental parsing of replies, by character: the base of all parsers of tool calls.

Knows content, calls and JSON. Knows nothing of HTTP, prompts or models.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Generator, Sequence

from skim.server.formats.deltas import ContentDelta, Delta, ToolCallDelta
from skim.server.formats.tags import TagFinder

_WHITESPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text is not a call. `char` is the first character that does not fit; it is not consumed.

    `partial` is the end of the consumed text that may be the beginning of an opening tag.
    """

    def __init__(self, char: str, partial: str = "") -> None:
        self.char, self.partial = char, partial


Parsing = Generator[None, str, str]  # receives characters, "" at the end; returns the first one not consumed
Found = Generator[None, str, tuple[str, str]]  # returns (what was found, first character not consumed)
Sink = Callable[[str], None]


class Scanner:
    """Finds calls in text that arrives in pieces.

    A subclass has the `openings` of its calls and implements `read_calls`. Content is emitted at once, except
    for a possible start of a tag and for white space, which are held back. White space is dropped only at the
    start and end of a reply with calls. A call starts as soon as its name is known, and its arguments are
    streamed.

    If the text after an opening is no call, the tag and the text up to the first invalid character become
    content, and parsing resumes there. A call that had already started keeps the arguments it has. In
    arguments only strings and brackets are checked; validating them is up to the tool.
    """

    openings: Sequence[str] = ()

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._new_id = new_id or new_call_id
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []  # content, or arguments of the current call, not yet in `_deltas`
        self._calls = 0
        self._has_content = False  # some content was emitted
        self._pending_space: list[str] = []  # white space that becomes content if text follows
        self._tags = TagFinder(self.openings)
        self._raw: list[str] = []  # consumed text that becomes content if it is no part of a call
        self._name: str | None = None  # of the call in progress
        self._parsing = self._read()
        next(self._parsing)

    def push(self, text: str) -> list[Delta]:
        for char in text:
            self._parsing.send(char)
        return self._collect()

    def finish(self) -> list[Delta]:
        self._parsing.send("")
        if not self._calls:
            self._pieces.extend(self._pending_space)
        self._pending_space.clear()
        return self._collect()

    # -- for subclasses

    def read_start(self, char: str) -> Parsing:
        """Read calls at the start of a reply that have no opening tag."""
        return char
        yield

    def read_calls(self, tag: str, char: str) -> Parsing:
        """Read one call or several after an opening tag."""
        raise NotImplementedError

    def begin_call(self, name: str) -> None:
        """Start a call. The text consumed since the last call or content belongs to it."""
        self._flush()
        self._name = name
        self._deltas.append(ToolCallDelta(self._calls, self._new_id(), name, ""))
        self._calls += 1
        self._raw.clear()

    def add_arguments(self, text: str) -> None:
        self._pieces.append(text)

    def end_call(self) -> None:
        """End the call in progress, if there is one."""
        self._flush()
        self._name = None

    def accept(self) -> None:
        """The text consumed so far belongs to calls, such as a closing tag."""
        self._raw.clear()

    def unclaimed(self, text: str) -> None:
        """This text, consumed within a call, is no part of it."""
        self._raw.append(text)

    # -- output

    def _collect(self) -> list[Delta]:
        self._flush()
        found, self._deltas = self._deltas, []
        return found

    def _flush(self) -> None:
        if text := "".join(self._pieces):
            self._deltas.append(
                ContentDelta(text) if self._name is None else ToolCallDelta(self._calls - 1, None, None, text)
            )
        self._pieces.clear()

    def _add_content(self, text: str) -> None:
        """Add content. Trailing white space is held back until text follows."""
        shown = text.rstrip(_WHITESPACE)
        if shown:
            if self._has_content or not self._calls:
                self._pieces.extend([*self._pending_space, shown])
            else:
                self._pieces.append(shown.lstrip(_WHITESPACE))
            self._pending_space.clear()
            self._has_content = True
        self._pending_space.append(text[len(shown) :])

    # -- parsing: each receives a character, yields for more, and returns the first one it did not consume

    def _read(self) -> Parsing:
        char = yield from self._attempt("", (yield))
        while tag := (yield from self._read_content(char)):
            char = yield from self._attempt(tag, (yield))
        while True:
            yield  # finished: nothing more arrives

    def _read_content(self, char: str) -> Parsing:
        """Parse up to an opening tag; return the tag, or "" at the end."""
        while char:
            text, tag = self._tags.feed(char)
            self._add_content(text)
            if tag is not None:
                return tag
            char = yield
        self._add_content(self._tags.flush())
        return ""

    def _attempt(self, tag: str, char: str) -> Parsing:
        """Read calls. Consumed text that is no part of one becomes content."""
        self._raw = [tag]
        partial = ""
        try:
            char = yield from self.read_calls(tag, char) if tag else self.read_start(char)
        except Malformed as error:
            char, partial = error.char, error.partial
        self.end_call()
        text = "".join(self._raw)
        self._raw = []
        self._add_content(text.removesuffix(partial))
        for one in partial:
            self._add_content(self._tags.feed(one)[0])
        return char

    def take(self, char: str) -> Parsing:
        """Consume a character."""
        if self._name is None:
            self._raw.append(char)
        return (yield)

    def skip(self, char: str) -> Parsing:
        """Consume white space."""
        while char and char in _WHITESPACE:
            char = yield from self.take(char)
        return char

    def word(self, char: str, ends: str) -> Found:
        """Consume characters that are not among `ends`."""
        read = []
        while char and char not in ends:
            read.append(char)
            char = yield from self.take(char)
        return "".join(read), char

    def expect(self, text: str, char: str) -> Parsing:
        """Consume exactly this text."""
        return (yield from self.one_of((text,), char))[1]

    def one_of(self, texts: Collection[str], char: str) -> Found:
        """Consume one of these texts, none of which begins another."""
        read = ""
        while True:
            if not char or not any(text.startswith(read + char) for text in texts):
                raise Malformed(char, read)
            read += char
            char = yield from self.take(char)
            if read in texts:
                return read, char

    def up_to(self, tags: Collection[str], char: str, sink: Sink) -> Found:
        """Consume text up to one of these tags, and the tag. At the end the tag is empty."""
        finder = TagFinder(tags)
        while char:
            text, tag = finder.feed(char)
            if text:
                sink(text)
            char = yield from self.take(char)
            if tag is not None:
                return tag, char
        sink(finder.flush())
        return "", char

    def call_list(self, char: str, read: Callable[[str], Parsing], separator: str, closing: str) -> Parsing:
        """Parse calls, each by `read`, with separators between them and a closing tag after the last."""
        while True:
            char = yield from read(char)
            char = yield from self.skip(char)
            tag, char = yield from self.one_of((separator, closing), char)
            if tag == closing:
                self.accept()
                return char

    # -- JSON

    def call_object(
        self, char: str, keys: Sequence[str] = ("arguments",), only: Collection[str] | None = None
    ) -> Parsing:
        """Parse an object with a name and arguments, under one of `keys`, which may be missing.

        With `only`, the call begins at its arguments, which it must have, and its name must be among these.
        """
        char = yield from self.expect("{", char)
        char = yield from self.skip(char)
        name = ""
        early: list[str] = []  # arguments that precede the name
        has_arguments = False

        literal: list[str] = []

        def begin() -> None:
            self.begin_call(name)
            self._pieces.extend(early)

        def named() -> None:
            nonlocal name
            name = decoded(literal, '"')
            if not name or (only is not None and name not in only):
                raise Malformed('"')
            if only is None or has_arguments:
                begin()

        while char != "}":
            key: list[str] = []
            char = yield from self.string(char, key.append)
            char = yield from self.skip(char)
            char = yield from self.expect(":", char)
            char = yield from self.skip(char)
            member = decoded(key, char)
            if member == "name" and not name:
                char = yield from self.string(char, literal.append, named)
            elif member in keys and not has_arguments:
                has_arguments = True
                if name and self._name is None:
                    begin()
                char = yield from self.value(char, early.append if self._name is None else self.add_arguments)
            else:
                char = yield from self.value(char, lambda _: None)
            char = yield from self.skip(char)
            if char != ",":
                break
            char = yield from self.take(char)
            char = yield from self.skip(char)
        if self._name is None:
            raise Malformed(char)
        char = yield from self.expect("}", char)
        if not has_arguments:
            self.add_arguments("{}")
        self.end_call()
        return char

    def call_in_tags(self, char: str, closing: str) -> Parsing:
        """Parse an object and a closing tag, which also ends an object that breaks off."""
        char = yield from self.skip(char)
        try:
            char = yield from self.call_object(char)
        except Malformed as error:
            if self._name is None:
                raise
            char = error.char
            self.end_call()
        char = yield from self.skip(char)
        char = yield from self.expect(closing, char)
        self.accept()
        return char

    def value(self, char: str, sink: Sink) -> Parsing:
        """Parse a JSON value, checking only strings and brackets."""
        if char == '"':
            return (yield from self.string(char, sink))
        open_brackets: list[str] = []
        begun = False
        while char:
            if char == '"' and open_brackets:
                char = yield from self.string(char, sink)
                continue
            if char in _CLOSERS:
                if begun and not open_brackets:
                    raise Malformed(char)
                open_brackets.append(_CLOSERS[char])
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                sink(char)
                char = yield from self.take(char)
                if not open_brackets:
                    return char
                continue
            elif char in '<>"}]' or (not open_brackets and char in ",:" + _WHITESPACE):
                break
            sink(char)
            begun = True
            char = yield from self.take(char)
        if open_brackets or not begun:
            raise Malformed(char)
        return char

    def string(self, char: str, sink: Sink, at_end: Callable[[], None] | None = None) -> Parsing:
        """Parse a JSON string with its quotes; call `at_end` at the closing quote."""
        if char != '"':
            raise Malformed(char)
        sink(char)
        char = yield from self.take(char)
        while char != '"':
            if char == "\\":
                sink(char)
                char = yield from self.take(char)
            if not char:
                raise Malformed(char)
            sink(char)
            char = yield from self.take(char)
        sink(char)
        if at_end is not None:
            at_end()
        return (yield from self.take(char))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def decoded(literal: Sequence[str], char: str) -> str:
    """Decode a JSON string literal; raw line breaks are allowed."""
    try:
        text = json.loads("".join(literal), strict=False)
        text.encode()
    except ValueError:
        raise Malformed(char) from None
    return str(text)
