"""JSON objects in tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format of Nous Research's Hermes and of Alibaba's Qwen models. Most models can follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.server.formats.scanner import Parsing, Scanner
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import JsonFormat, Tool

PARSER = ParserDeclaration(
    help="JSON in `<tool_call>` tags; also for templates that show no other format",
    families="Hermes, Qwen2.5, Qwen3",
    template=r"<tool_call>",
    order=90,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Format(JsonFormat):
    special = (OPENING, CLOSING)
    opening = OPENING
    separator = "\n"

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{OPENING}\n{self.object(*call)}\n{CLOSING}" for call in calls)

    def body(self, max_calls: int, tags: TokenTags) -> str:
        return rf'"\n" call "\n" {tags.literal(CLOSING)}'

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return HermesParser(self.new_id)


class HermesParser(Scanner):
    """A call without arguments has `{}`. Other members of the object are ignored."""

    openings = (OPENING,)

    def read_calls(self, tag: str, char: str) -> Parsing:
        return (yield from self.call_in_tags(char, CLOSING))
