"""The contract of a format of reasoning, and the formats that put it into a pair of tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from skim.sampling.grammar import Grammar
from skim.server.formats.deltas import ContentDelta, Delta, ReasoningDelta, ReasoningParser
from skim.server.formats.tags import TagFinder, TokenTags

Message = dict[str, Any]

_WHITESPACE = " \t\r\n"


class ReasoningFormat:
    """The format in which a model family writes its reasoning. `template` is its chat template."""

    special: ClassVar[Sequence[str]] = ()
    """Tags that the parser must see, even where the tokenizer makes them special tokens."""
    stops: ClassVar[Sequence[str]] = ()
    """Tokens that end a reply."""

    def __init__(self, template: str = "") -> None:
        self.template = template

    def parser(self, prompt: str = "") -> ReasoningParser:
        """A parser for one reply to a prompt, of which the end suffices."""
        raise NotImplementedError

    def history(self, message: Mapping[str, Any]) -> Message:
        """An earlier message, with its `reasoning_content` as the family's templates expect it."""
        return dict(message)

    def constrained(
        self, calls: Grammar | None, answer: Grammar | None, prompt: str, tags: TokenTags
    ) -> Grammar:
        """The grammar of a reply: the reasoning that must come first, then calls or an answer.

        Either grammar may be None, but not both.
        """
        raise NotImplementedError


def either(calls: Grammar | None, answer: Grammar | None) -> Grammar:
    """The grammar of calls or of an answer, or of both. At least one is given."""
    if calls is not None and answer is not None:
        return replace(Grammar.either(calls, answer), asked_by=answer.asked_by)
    given = calls if answer is None else answer
    assert given is not None
    return given


class TaggedFormat(ReasoningFormat):
    """Reasoning between two tags at the start of a reply. The prompt may have the opening tag."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    always: ClassVar[bool] = False
    """The reply begins with reasoning, even if neither it nor the prompt has the opening tag."""

    def parser(self, prompt: str = "") -> ThoughtParser:
        return ThoughtParser(self.opening, self.closing, self._begun(prompt))

    def _begun(self, prompt: str) -> bool | None:
        """True if the reply begins with reasoning, False if it has none, None if the reply decides."""
        end = prompt[-200:].rstrip(_WHITESPACE)
        if end.endswith(self.closing):
            return False
        return True if self.always or end.endswith(self.opening) else None

    def constrained(
        self, calls: Grammar | None, answer: Grammar | None, prompt: str, tags: TokenTags
    ) -> Grammar:
        grammar = either(calls, answer)
        if not self._begun(prompt):
            return grammar
        rules = tags.up_to("thought", self.closing)
        return grammar.after("\n".join([r"before: thought /[ \n]{0,4}/", *rules]))


class ThoughtParser:
    """Splits a reply into reasoning and content. White space around the reasoning is dropped.

    `begun` is True inside reasoning, False if there is none, None if the reply may open it.
    """

    def __init__(self, opening: str, closing: str, begun: bool | None) -> None:
        self._opening = opening
        self._closing = TagFinder((closing,))
        self._inside = bool(begun)
        self._start: str | None = "" if begun is not False else None  # text that may open the reasoning
        self._space = ""  # white space that is dropped unless text of the same kind follows
        self._thought = False  # some reasoning was emitted
        self._after = False  # nothing but white space has followed the reasoning
        self._deltas: list[Delta] = []

    @property
    def reasoning(self) -> bool:
        return self._inside

    def push(self, text: str) -> list[Delta]:
        if not self._inside and self._start is None and not self._after:
            return [ContentDelta(text)] if text else []
        for char in text:
            self._feed(char)
        return self._collect()

    def finish(self) -> list[Delta]:
        if self._start is not None:
            self._begin(self._start)
        if self._inside:
            self._think(self._closing.flush())
        return self._collect()

    def _feed(self, char: str) -> None:
        if self._start is not None:
            self._start += char
            begun = self._start.lstrip(_WHITESPACE)
            if begun == self._opening:
                self._start, self._inside = None, True
            elif not self._opening.startswith(begun):
                self._begin(self._start)
        elif self._inside:
            text, tag = self._closing.feed(char)
            self._think(text)
            if tag is not None:
                self._inside, self._after, self._space = False, True, ""
        elif not (self._after and char in _WHITESPACE):
            self._after = False
            self._add(ContentDelta(char))

    def _begin(self, text: str) -> None:
        """The reply does not open its reasoning: it is content, or it was inside all the time."""
        self._start = None
        if not self._inside:
            self._add(ContentDelta(text))
        for char in text if self._inside else "":
            self._feed(char)

    def _think(self, text: str) -> None:
        """Add reasoning, without white space at its start and end."""
        shown = text.rstrip(_WHITESPACE)
        if shown:
            self._add(ReasoningDelta(self._space + shown if self._thought else shown.lstrip(_WHITESPACE)))
            self._space = ""
        self._space += text[len(shown) :]

    def _add(self, delta: ContentDelta | ReasoningDelta) -> None:
        self._thought |= isinstance(delta, ReasoningDelta)
        if delta.text:
            self._deltas.append(delta)

    def _collect(self) -> list[Delta]:
        found, self._deltas = joined(self._deltas), []
        return found


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same deltas, with neighbouring texts of one kind as one."""
    found: list[Delta] = []
    texts: list[str] = []
    for delta in deltas:
        if isinstance(delta, (ContentDelta, ReasoningDelta)):
            if found and type(found[-1]) is type(delta):
                texts.append(delta.text)
                continue
            _settle(found, texts)
            texts = [delta.text]
        else:
            _settle(found, texts)
            texts = []
        found.append(delta)
    _settle(found, texts)
    return found


def _settle(found: list[Delta], texts: list[str]) -> None:
    if len(texts) > 1:
        found[-1] = type(found[-1])("".join(texts))  # type: ignore[call-arg, arg-type]
