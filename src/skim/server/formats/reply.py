"""One reply: its text is parsed into reasoning, content and calls, as it arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skim.server.formats.deltas import ContentDelta, Delta, Parser, ReasoningDelta, ReasoningParser


class ReplyParser:
    """Takes out the reasoning, then the calls; either may be None. Counts the tokens of reasoning."""

    def __init__(self, reasoning: ReasoningParser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.reasoning_tokens = 0

    def push(self, text: str, tokens: int = 0) -> list[Delta]:
        """The deltas of more text. A token counts as reasoning if any of its text is."""
        if self._reasoning is None:
            return self._rest([ContentDelta(text)])
        before = self._reasoning.reasoning
        found = self._reasoning.push(text)
        if before or self._reasoning.reasoning or any(isinstance(one, ReasoningDelta) for one in found):
            self.reasoning_tokens += tokens
        return self._rest(found)

    def finish(self) -> list[Delta]:
        found = self._rest(self._reasoning.finish()) if self._reasoning is not None else []
        return found + self._calls.finish() if self._calls is not None else found

    def _rest(self, deltas: Iterable[Delta]) -> list[Delta]:
        """The deltas, with calls taken out of the content."""
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta) and self._calls is not None:
                found += self._calls.push(delta.text)
            elif isinstance(delta, (ContentDelta, ReasoningDelta)) and delta.text:
                found.append(delta)
        return found


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """A complete reply."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def gathered(deltas: Iterable[Delta]) -> Parsed:
    reasoning: list[str] = []
    content: list[str] = []
    begun: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif delta.id is not None:
            begun.append((delta.id, delta.name or ""))
            arguments.append([delta.arguments])
        else:
            arguments[delta.index].append(delta.arguments)
    calls = (ToolCall(*named, "".join(parts)) for named, parts in zip(begun, arguments, strict=True))
    return Parsed("".join(reasoning), "".join(content), tuple(calls))
