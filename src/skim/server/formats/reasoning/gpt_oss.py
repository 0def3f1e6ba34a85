"""The channels of OpenAI's harmony format: `analysis` is reasoning; `final` and `commentary` are content.

Messages to functions are passed on as they are, for the tool format `gpt_oss`. Texts of several messages are
joined by line breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skim.registry import ParserDeclaration
from skim.sampling.grammar import Grammar
from skim.server.formats.deltas import ContentDelta, Delta, ReasoningDelta
from skim.server.formats.harmony import (
    CALL,
    CHANNEL,
    END,
    ENDS,
    MESSAGE,
    RETURN,
    START,
    TAGS,
    may_continue,
    read_header,
)
from skim.server.formats.reasoning_format import Message, ReasoningFormat, either, joined
from skim.server.formats.tags import TagFinder, TokenTags

PARSER = ParserDeclaration(
    help="harmony channels: `analysis` is reasoning",
    families="gpt-oss",
    template=r"<\|channel\|>analysis",
    order=10,
)

_BEGINNINGS = (CHANNEL, START, " to=", "to=")


class Format(ReasoningFormat):
    special = TAGS
    stops = (RETURN, CALL)

    def parser(self, prompt: str = "") -> HarmonyParser:
        return HarmonyParser()

    def history(self, message: Mapping[str, Any]) -> Message:
        """The template reads `thinking`. In a message with calls it refuses content beside it."""
        kept = {key: value for key, value in message.items() if key != "reasoning_content"}
        if thought := message.get("reasoning_content"):
            content = message.get("content")
            if message.get("tool_calls") and content and isinstance(content, str):
                thought, kept["content"] = f"{thought}\n{content}", ""
            kept["thinking"] = thought
        return kept

    def constrained(
        self, calls: Grammar | None, answer: Grammar | None, prompt: str, tags: TokenTags
    ) -> Grammar:
        """Reasoning may come first. An answer has the header of the channel `final`."""
        channel, message = tags.literal(CHANNEL), tags.literal(MESSAGE)
        if answer is not None:
            answer = answer.after(f'before: {channel} "final" {message}')
        rules = [
            "before: analysis?",
            f'analysis: {channel} "analysis" {message} thought {tags.literal(START)} "assistant"',
            *tags.up_to("thought", END),
        ]
        return either(calls, answer).after("\n".join(rules))


class HarmonyParser:
    """Text outside of messages is content, and so is a header that is none."""

    def __init__(self) -> None:
        self._header: str | None = ""  # the header in progress; None in a text
        self._kind: type[ContentDelta | ReasoningDelta] | None = None  # of the message in progress
        self._is_call = False
        self._tags = TagFinder((*ENDS, START, CHANNEL))
        self._seen: set[type] = set()
        self._parting = ""  # goes before the next text of the message
        self._deltas: list[Delta] = []

    @property
    def reasoning(self) -> bool:
        return self._kind is ReasoningDelta

    def push(self, text: str) -> list[Delta]:
        for char in text:
            self._feed(char)
        return self._collect()

    def finish(self) -> list[Delta]:
        self._add(ContentDelta, self._header or "")
        self._text(self._tags.flush())
        return self._collect()

    def _feed(self, char: str) -> None:
        if self._header is None:
            text, tag = self._tags.feed(char)
            self._text(text)
            if tag is not None:
                self._end(tag)
            return
        header = self._header = self._header + char
        if header.endswith(MESSAGE):
            self._begin(header)
        elif not may_continue(header) or not _may_begin(header):
            self._header = None
            for one in header:  # the end may begin a tag
                self._feed_text(one)

    def _feed_text(self, char: str) -> None:
        text, tag = self._tags.feed(char)
        self._text(text + (tag or ""))

    def _begin(self, header: str) -> None:
        """Begin the message of a complete header."""
        found = read_header(header)
        self._header = None
        if found is None:
            self._add(ContentDelta, header)
            return
        self._is_call = found.function is not None
        self._kind = ReasoningDelta if found.channel == "analysis" and not self._is_call else ContentDelta
        self._parting = "\n" if self._kind in self._seen and not self._is_call else ""
        if self._is_call:
            self._add(ContentDelta, header)

    def _text(self, text: str) -> None:
        if text:
            kind = self._kind or ContentDelta
            self._add(kind, self._parting + text)
            self._parting = ""
            if not self._is_call:
                self._seen.add(kind)

    def _end(self, tag: str) -> None:
        """End the message in progress; a tag that begins a header begins the next."""
        opens = tag in (START, CHANNEL)
        if self._is_call:
            self._add(ContentDelta, CALL if opens else tag)
        elif self._kind is None and not opens:
            self._add(ContentDelta, tag)
        self._kind, self._is_call, self._parting = None, False, ""
        self._header = tag if opens else None

    def _add(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._deltas.append(kind(text))

    def _collect(self) -> list[Delta]:
        found, self._deltas = joined(self._deltas), []
        return found


def _may_begin(header: str) -> bool:
    return any(header.startswith(one) or one.startswith(header) for one in _BEGINNINGS)
