"""Incremental parser that separates tool calls from content in a streamed reply.

Knows the tags around a call and the JSON between them. Knows nothing of HTTP, prompts or models.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

_WHITESPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the reply's content."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The start of a call, with id and name; or, with neither, more of its arguments."""

    index: int
    """Index of the call within the reply."""
    id: str | None
    name: str | None
    arguments: str
    """A piece of the arguments' JSON text, exactly as written."""


class _Malformed(Exception):
    """The text is not a call. `char` is the first character that does not fit; it is not consumed."""

    def __init__(self, char: str) -> None:
        self.char = char


Parsing = Generator[None, str, str]  # receives characters, "" at the end; returns the first one not consumed
Sink = Callable[[str], None]


class ToolCallParser:
    """Finds `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in text that arrives in pieces.

    The result does not depend on how the text is cut. Content is emitted at once, except for a possible start
    of a tag and for white space, which are held back. White space is dropped only at the start and end of a
    reply with calls. A call starts as soon as its name is known, and its arguments are streamed; a call
    without arguments has `{}`. Other members of the object are ignored.

    If the text between tags is not such an object, the tag and the text up to the first invalid character
    become content, and parsing resumes there. A call that had already started keeps the arguments it has. In
    arguments only strings and brackets are checked; validating them is up to the tool.

    Tags are matched in text. If a tokenizer makes them special tokens (Qwen's does not), generate with
    `skip_special_tokens=False`, or they are never seen.
    """

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self._opening, self._closing = opening, closing
        self._deltas: list[ContentDelta | ToolCallDelta] = []
        self._pieces: list[str] = []  # content, or arguments of the current call, not yet in `_deltas`
        self._calls = 0
        self._has_content = False  # some content was emitted
        self._pending_space: list[str] = []  # white space that becomes content if text follows
        self._partial_tag = ""  # start of a possible opening tag
        self._raw: list[str] = []  # text of a call that has not started
        self._name: str | None = None
        self._early_arguments: list[str] = []  # arguments that precede the name
        self._parsing = self._read()
        next(self._parsing)

    def push(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        """Parse more text and return the new deltas."""
        for char in text:
            self._parsing.send(char)
        return self._collect()

    def finish(self) -> list[ContentDelta | ToolCallDelta]:
        """End the reply and return the remaining deltas."""
        self._parsing.send("")
        if not self._calls:
            self._pieces.extend(self._pending_space)
        self._pending_space.clear()
        return self._collect()

    # -- output

    def _collect(self) -> list[ContentDelta | ToolCallDelta]:
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

    def _start_call(self, literal: list[str]) -> None:
        if not (name := _decode(literal, '"')):
            raise _Malformed('"')
        self._flush()
        self._name = name
        self._deltas.append(ToolCallDelta(self._calls, f"call_{secrets.token_hex(12)}", name, ""))
        self._calls += 1
        self._raw.clear()
        self._pieces.extend(self._early_arguments)

    def _add_arguments(self, text: str) -> None:
        (self._early_arguments if self._name is None else self._pieces).append(text)

    # -- parsing: each receives a character, yields for more, and returns the first one it did not consume

    def _read(self) -> Parsing:
        char = yield
        while (yield from self._read_content(char)):
            char = yield from self._read_call((yield))
        while True:
            yield  # finished: nothing more arrives

    def _read_content(self, char: str) -> Parsing:
        """Parse up to an opening tag; return the tag, or "" at the end."""
        while char:
            if self._opening.startswith(self._partial_tag + char):
                self._partial_tag += char
                if self._partial_tag == self._opening:
                    self._partial_tag = ""
                    return self._opening
            else:
                self._add_content(self._partial_tag)
                self._partial_tag = char if char == self._opening[0] else ""
                self._add_content("" if self._partial_tag else char)
            char = yield
        self._add_content(self._partial_tag)
        return ""

    def _read_call(self, char: str) -> Parsing:
        self._raw, self._name, self._early_arguments = [self._opening], None, []
        try:
            char = yield from self._read_object(char)
        except _Malformed as error:
            char = error.char
            if self._name is None:
                self._add_content("".join(self._raw))
                return char
        self._flush()
        self._name = None
        return (yield from self._read_closing(char))

    def _read_closing(self, char: str) -> Parsing:
        """Skip white space and the closing tag. Anything else is content or another call."""
        self._raw = []
        char = yield from self._skip(char)
        space = "".join(self._raw)
        for count, expected in enumerate(self._closing):
            if char != expected:
                matched = self._closing[:count]
                self._partial_tag = matched if self._opening.startswith(matched) else ""
                self._add_content(space + matched.removeprefix(self._partial_tag))
                break
            char = yield from self._take(char)
        return char

    def _read_object(self, char: str) -> Parsing:
        char = yield from self._skip(char)
        char = yield from self._expect("{", char)
        char = yield from self._skip(char)
        has_arguments = False
        while char != "}":
            key: list[str] = []
            char = yield from self._string(char, key.append)
            char = yield from self._skip(char)
            char = yield from self._expect(":", char)
            char = yield from self._skip(char)
            member = _decode(key, char)
            if member == "name" and self._name is None:
                name: list[str] = []
                char = yield from self._string(char, name.append, partial(self._start_call, name))
            elif member == "arguments" and not has_arguments:
                has_arguments = True
                char = yield from self._value(char, self._add_arguments)
            else:
                char = yield from self._value(char, lambda _: None)
            char = yield from self._skip(char)
            if char != ",":
                break
            char = yield from self._take(char)
            char = yield from self._skip(char)
        if self._name is None:
            raise _Malformed(char)
        char = yield from self._expect("}", char)
        if not has_arguments:
            self._add_arguments("{}")
        return char

    def _value(self, char: str, sink: Sink) -> Parsing:
        """Parse a JSON value, checking only strings and brackets."""
        if char == '"':
            return (yield from self._string(char, sink))
        open_brackets: list[str] = []
        begun = False
        while char:
            if char == '"' and open_brackets:
                char = yield from self._string(char, sink)
                continue
            if char in _CLOSERS:
                if begun and not open_brackets:
                    raise _Malformed(char)
                open_brackets.append(_CLOSERS[char])
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                sink(char)
                char = yield from self._take(char)
                if not open_brackets:
                    return char
                continue
            elif char in '<>"}]' or (not open_brackets and char in ",:" + _WHITESPACE):
                break
            sink(char)
            begun = True
            char = yield from self._take(char)
        if open_brackets or not begun:
            raise _Malformed(char)
        return char

    def _string(self, char: str, sink: Sink, at_end: Callable[[], None] | None = None) -> Parsing:
        """Parse a JSON string with its quotes; call `at_end` at the closing quote."""
        char = yield from self._expect('"', char, sink)
        while char != '"':
            if char == "\\":
                sink(char)
                char = yield from self._take(char)
            if not char:
                raise _Malformed(char)
            sink(char)
            char = yield from self._take(char)
        sink(char)
        if at_end is not None:
            at_end()
        return (yield from self._take(char))

    def _skip(self, char: str) -> Parsing:
        while char and char in _WHITESPACE:
            char = yield from self._take(char)
        return char

    def _expect(self, wanted: str, char: str, sink: Sink | None = None) -> Parsing:
        if char != wanted:
            raise _Malformed(char)
        if sink is not None:
            sink(char)
        return (yield from self._take(char))

    def _take(self, char: str) -> Parsing:
        if self._name is None:
            self._raw.append(char)
        return (yield)


def _decode(literal: list[str], char: str) -> str:
    """Decode a JSON string literal; raw line breaks are allowed."""
    try:
        text = json.loads("".join(literal), strict=False)
        text.encode()
    except ValueError:
        raise _Malformed(char) from None
    return str(text)
