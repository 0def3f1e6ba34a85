"""Pieces of a parsed reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the reply's content."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reply's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The start of a call, with id and name; or, with neither, more of its arguments."""

    index: int
    """Index of the call within the reply."""
    id: str | None
    name: str | None
    arguments: str
    """A piece of the arguments' JSON text."""


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class Parser(Protocol):
    """Parses one reply that arrives in pieces. The result does not depend on how the text is cut."""

    def push(self, text: str) -> list[Delta]:
        """Parse more text and return the new deltas."""

    def finish(self) -> list[Delta]:
        """End the reply and return the remaining deltas."""


class ReasoningParser(Parser, Protocol):
    """Separates reasoning from the rest of a reply. It makes no deltas of calls."""

    @property
    def reasoning(self) -> bool:
        """True while the text is reasoning."""
