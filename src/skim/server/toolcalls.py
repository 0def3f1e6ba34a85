"""Tool calls in a reply that is still being written: what is content, what is a call, as soon as it is known.

Knows the tags around a call and the shape of what is between them, and nothing of HTTP, prompts or models.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

_BLANK = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class ContentDelta:
    """More text for the reader."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A call that begins, with its id and name, or more of the arguments of one that has begun."""

    index: int
    """Which of the reply's calls."""
    id: str | None
    name: str | None
    arguments: str
    """More of their JSON text, exactly as it was written."""


class _Malformed(Exception):
    """What was read is not the beginning of a call. The character that shows it was not taken."""

    def __init__(self, char: str) -> None:
        self.char = char


Reading = Generator[None, str, str]  # is sent characters, "" at the end; returns the first it did not take
Giver = Callable[[str], None]


class ToolCallParser:
    """Finds calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in text that comes in
    pieces.

    How the text is cut into pieces makes no difference to what is found. Content is given at once, but for
    what may be the beginning of a tag, and white space, which is dropped at the ends of a reply with calls
    and kept everywhere else. A call is announced as soon as its name is known, and its arguments follow as
    they come; a call without any has `{}`. Other members of the object are passed over.

    What is between tags and not such an object is content, tags and all, up to the first character that
    cannot be; reading goes on there. A call that was announced by then keeps the arguments that came. Of the
    arguments only the strings and brackets are checked: whether they are valid is for the tool to say.

    The tags are looked for in text. Where a tokenizer makes them special tokens (Qwen's does not), the
    request has to be generated with `skip_special_tokens=False`, or they are never seen.
    """

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self._opening, self._closing = opening, closing
        self._found: list[ContentDelta | ToolCallDelta] = []
        self._pieces: list[str] = []  # of content or of the current call's arguments, not yet in `_found`
        self._calls = 0
        self._spoke = False  # some content was given
        self._blank: list[str] = []  # white space that is content if text follows
        self._matched = ""  # the beginning of an opening tag
        self._raw: list[str] = []  # of a call that is not announced
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        """What became known with this text."""
        for char in text:
            self._reading.send(char)
        return self._collect()

    def finish(self) -> list[ContentDelta | ToolCallDelta]:
        """What is left when no more is to come."""
        self._reading.send("")
        if not self._calls:
            self._pieces.extend(self._blank)
        self._blank.clear()
        return self._collect()

    # -- what was found

    def _collect(self) -> list[ContentDelta | ToolCallDelta]:
        self._flush()
        found, self._found = self._found, []
        return found

    def _flush(self) -> None:
        if text := "".join(self._pieces):
            self._found.append(
                ContentDelta(text) if self._name is None else ToolCallDelta(self._calls - 1, None, None, text)
            )
        self._pieces.clear()

    def _say(self, text: str) -> None:
        """Give content; white space waits for what follows it."""
        shown = text.rstrip(_BLANK)
        if shown:
            if self._spoke or not self._calls:
                self._pieces.extend([*self._blank, shown])
            else:
                self._pieces.append(shown.lstrip(_BLANK))
            self._blank.clear()
            self._spoke = True
        self._blank.append(text[len(shown) :])

    def _announce(self, literal: list[str]) -> None:
        if not (name := _decode(literal, '"')):
            raise _Malformed('"')
        self._flush()
        self._name = name
        self._found.append(ToolCallDelta(self._calls, f"call_{secrets.token_hex(12)}", name, ""))
        self._calls += 1
        self._raw.clear()
        self._pieces.extend(self._early)

    def _argue(self, text: str) -> None:
        (self._early if self._name is None else self._pieces).append(text)

    # -- reading: each takes a character it was given, asks for more, and hands back the first it did not take

    def _read(self) -> Reading:
        char = yield
        while (yield from self._read_content(char)):
            char = yield from self._read_call((yield))
        while True:
            yield  # the end was told; nothing more comes

    def _read_content(self, char: str) -> Reading:
        """Everything before an opening tag; returns that tag, or "" at the end."""
        while char:
            if self._opening.startswith(self._matched + char):
                self._matched += char
                if self._matched == self._opening:
                    self._matched = ""
                    return self._opening
            else:
                self._say(self._matched)
                self._matched = char if char == self._opening[0] else ""
                self._say("" if self._matched else char)
            char = yield
        self._say(self._matched)
        return ""

    def _read_call(self, char: str) -> Reading:
        self._raw, self._name, self._early = [self._opening], None, []
        try:
            char = yield from self._read_object(char)
        except _Malformed as stopped:
            char = stopped.char
            if self._name is None:
                self._say("".join(self._raw))
                return char
        self._flush()
        self._name = None
        return (yield from self._read_closing(char))

    def _read_closing(self, char: str) -> Reading:
        """White space and the closing tag, if they come; what comes instead is content, or another call."""
        self._raw = []
        char = yield from self._skip(char)
        blank = "".join(self._raw)
        for count, expected in enumerate(self._closing):
            if char != expected:
                matched = self._closing[:count]
                self._matched = matched if self._opening.startswith(matched) else ""
                self._say(blank + matched.removeprefix(self._matched))
                break
            char = yield from self._take(char)
        return char

    def _read_object(self, char: str) -> Reading:
        char = yield from self._skip(char)
        char = yield from self._expect("{", char)
        char = yield from self._skip(char)
        argued = False
        while char != "}":
            key: list[str] = []
            char = yield from self._string(char, key.append)
            char = yield from self._skip(char)
            char = yield from self._expect(":", char)
            char = yield from self._skip(char)
            member = _decode(key, char)
            if member == "name" and self._name is None:
                name: list[str] = []
                char = yield from self._string(char, name.append, partial(self._announce, name))
            elif member == "arguments" and not argued:
                argued = True
                char = yield from self._value(char, self._argue)
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
        if not argued:
            self._argue("{}")
        return char

    def _value(self, char: str, give: Giver) -> Reading:
        """A JSON value, of which only strings and brackets are checked."""
        if char == '"':
            return (yield from self._string(char, give))
        open_brackets: list[str] = []
        begun = False
        while char:
            if char == '"' and open_brackets:
                char = yield from self._string(char, give)
                continue
            if char in _CLOSERS:
                if begun and not open_brackets:
                    raise _Malformed(char)
                open_brackets.append(_CLOSERS[char])
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                give(char)
                char = yield from self._take(char)
                if not open_brackets:
                    return char
                continue
            elif char in '<>"}]' or (not open_brackets and char in ",:" + _BLANK):
                break
            give(char)
            begun = True
            char = yield from self._take(char)
        if open_brackets or not begun:
            raise _Malformed(char)
        return char

    def _string(self, char: str, give: Giver, at_end: Callable[[], None] | None = None) -> Reading:
        """A JSON string, quotes and all; `at_end` is called with its last quote, before anything follows."""
        char = yield from self._expect('"', char, give)
        while char != '"':
            if char == "\\":
                give(char)
                char = yield from self._take(char)
            if not char:
                raise _Malformed(char)
            give(char)
            char = yield from self._take(char)
        give(char)
        if at_end is not None:
            at_end()
        return (yield from self._take(char))

    def _skip(self, char: str) -> Reading:
        while char and char in _BLANK:
            char = yield from self._take(char)
        return char

    def _expect(self, wanted: str, char: str, give: Giver | None = None) -> Reading:
        if char != wanted:
            raise _Malformed(char)
        if give is not None:
            give(char)
        return (yield from self._take(char))

    def _take(self, char: str) -> Reading:
        if self._name is None:
            self._raw.append(char)
        return (yield)


def _decode(literal: list[str], char: str) -> str:
    """The text that a JSON string means; raw line breaks in it are let through."""
    try:
        text = json.loads("".join(literal), strict=False)
        text.encode()
    except ValueError:
        raise _Malformed(char) from None
    return str(text)
