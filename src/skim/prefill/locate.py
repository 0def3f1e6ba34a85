"""Locate the messages of a conversation in the text that a chat template rendered.

Templates are programs, so their output is searched, not modelled. Contents appear in the order of the
messages, each after a marker that names its role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skim.errors import RequestError

Message = Mapping[str, Any]

# Role markers of known templates. A content is searched after its marker, so that a short one is not found
# inside the marker or in the preamble.
_MARKERS = {
    "user": ("user", "human", "[inst]"),
    "assistant": ("assistant", "model", "[/inst]", "chatbot", "gpt"),
    "system": ("system", "developer", "<<sys>>"),
    "developer": ("developer", "system", "<<sys>>"),
    "tool": ("tool", "function", "ipython", "observation"),
    "function": ("function", "tool", "ipython", "observation"),
}
_TOOL_RESULT, _END_OF_RESULT = "<tool_response>", "</tool_response>"
_END_OF_THOUGHT = "</think>"


class UnmappableError(RequestError):
    """The parts of a prompt cannot be distinguished, so it must be read densely."""


def locate(messages: Sequence[Message], rendered: str) -> list[range]:
    """Character range of each message's content in the rendered text; empty for a message without content.

    Templates may strip contents, drop the thoughts of earlier replies, and move or omit messages that are not
    plain (see `is_plain`). A plain content that is not found in order raises `UnmappableError`. Markers and
    the other messages only guide the search. If it fails, it is repeated without them. Then a system text is
    searched everywhere: Mistral's templates move it into the last user message.
    """
    guided = _Search(messages, rendered, markers=True, others=True)
    try:
        return guided.run()
    except UnmappableError as error:
        for markers, others in ((True, False), (False, True), (False, False)):
            try:
                found = _Search(messages, rendered, markers=markers, others=others).run()
            except UnmappableError:
                continue
            return [
                place or _only_place(messages, index, rendered, found) for index, place in enumerate(found)
            ]
        raise error


def _only_place(messages: Sequence[Message], index: int, rendered: str, places: Sequence[range]) -> range:
    """The place of a system text, if it is there once and outside the other places; else an empty range."""
    text = content_of(messages, index).strip()
    start = rendered.find(text) if is_system(messages[index]) and text else -1
    place = range(start, start + len(text))
    if start < 0 or rendered.find(text, start + 1) >= 0:
        return range(0)
    return range(0) if any(p.start < place.stop and place.start < p.stop for p in places if p) else place


def content_of(messages: Sequence[Message], index: int) -> str:
    """The text of a message, or ""."""
    content = messages[index].get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        kind = type(content).__name__
        raise UnmappableError(
            f"the content of message {index} is a {kind}; join its parts into one text first"
        )
    return content


def is_plain(message: Message) -> bool:
    """True for a user's message, and for a reply without tool calls."""
    role = message.get("role")
    if role == "assistant":
        called = message.get("tool_calls") or message.get("function_call")
        return not called and "<tool_call>" not in str(message.get("content"))
    return role == "user"


def is_system(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def is_result(message: Message) -> bool:
    """True for a message that is a tool's result."""
    return message.get("role") in ("tool", "function")


def tool_results(text: str) -> list[range]:
    """Character ranges of tool results inside a message's text; some templates put them there."""
    found: list[range] = []
    end = 0
    while (start := text.find(_TOOL_RESULT, end)) >= 0 and (close := text.find(_END_OF_RESULT, start)) >= 0:
        end = close + len(_END_OF_RESULT)
        found.append(range(start, end))
    return found


def last_question(messages: Sequence[Message]) -> int:
    """Index of the last user message that has text besides tool results."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "user":
            text = content_of(messages, index)
            edges = [0, *(edge for r in tool_results(text) for edge in (r.start, r.stop)), len(text)]
            if any(text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)):
                return index
    raise UnmappableError("no user message has any text, so there is no question to read the prompt for")


class _Search:
    """One pass over the rendered text, content by content.

    Each content is placed at its first match. So if the true places match, the search never passes one of
    them and cannot fail.
    """

    def __init__(self, messages: Sequence[Message], rendered: str, *, markers: bool, others: bool) -> None:
        self._messages = messages
        self._rendered = rendered
        self._others = others  # search for messages that are not plain, too
        self._markers = {
            role: re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
            for role, words in (_MARKERS.items() if markers else ())
        }
        self._cursor = 0

    def run(self) -> list[range]:
        found: list[range] = []
        for index, message in enumerate(self._messages):
            role, text = str(message.get("role")), content_of(self._messages, index)
            place = range(0)
            if text.strip() and (self._others or is_plain(message)):
                place = self._find(role, text)
                if not place and is_plain(message):
                    raise UnmappableError(
                        f"the content of message {index} ({role}) is not in the chat template's text;"
                        " without it the question and the documents cannot be distinguished"
                    )
            self._cursor = max(self._cursor, place.stop)
            found.append(place)
        return found

    def _find(self, role: str, text: str) -> range:
        for variant in _variants(role, text):
            first = self._rendered.find(variant, self._cursor)
            if first >= 0:
                behind = self._rendered.find(variant, self._announced(role))
                start = behind if behind >= 0 else first
                return range(start, start + len(variant))
        return range(0)

    def _announced(self, role: str) -> int:
        """End of the role's next marker, or the cursor. A role without markers left is not searched again."""
        if role in self._markers:
            if match := self._markers[role].search(self._rendered, self._cursor):
                return match.end()
            del self._markers[role]
        return self._cursor


def _variants(role: str, text: str) -> Iterator[str]:
    yield text
    yield text.strip()
    if role == "assistant" and (said := text.rpartition(_END_OF_THOUGHT)[2].strip()):
        yield said
