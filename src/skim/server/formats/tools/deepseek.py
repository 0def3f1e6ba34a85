"""Calls in DeepSeek's special tokens, in the form of V3 and R1 or in that of V3.1.

V3 writes a type, the name on its line, and the arguments in a fence of Markdown; V3.1 the name and arguments.
Both are read. Forced calls follow the form in the template.
"""

# ruff: noqa: RUF001  (the tokens have wide bars)
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.server.formats.scanner import Malformed, Parsing, Scanner
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import Tool, ToolFormat, function_of, json_text, parameters_of

PARSER = ParserDeclaration(
    help="`<｜tool▁calls▁begin｜>` and the other special tokens of V3, R1 and V3.1",
    families="DeepSeek V3, R1, V3.1",
    template=r"<｜tool▁calls▁begin｜>",
    order=20,
)

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
TYPE, FENCE = "function", "```"


class Format(ToolFormat):
    special = (ALL_BEGIN, ALL_END, BEGIN, END, SEP)
    opening = ALL_BEGIN

    def __init__(self, template: str = "") -> None:
        super().__init__(template)
        self._fenced = f"{FENCE}json" in template

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"{ALL_BEGIN}{''.join(self._call(name, arguments) for name, arguments in calls)}{ALL_END}"

    def _call(self, name: str, arguments: Any) -> str:
        head, tail = self._around(name)
        return f"{BEGIN}{head[0]}{SEP}{head[1]}{json_text(arguments)}{tail}{END}"

    def _around(self, name: str) -> tuple[tuple[str, str], str]:
        """The texts before and after the separator, and after the arguments."""
        if self._fenced:
            return (TYPE, f"{name}\n{FENCE}json\n"), f"\n{FENCE}"
        return (name, ""), ""

    def body(self, max_calls: int, tags: TokenTags) -> str:
        return f"call{{1,{max_calls}}} {tags.literal(ALL_END)}"

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        (before, after), tail = self._around(function_of(tool)["name"])
        parts = [tags.literal(BEGIN), _quoted(before), tags.literal(SEP), _quoted(after)]
        parts += [f"arguments_{index}", _quoted(tail), tags.literal(END)]
        return " ".join(filter(None, parts)), {f"arguments_{index}": parameters_of(tool)}

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return DeepSeekParser(self.new_id)


class DeepSeekParser(Scanner):
    openings = (ALL_BEGIN, BEGIN)

    def read_calls(self, tag: str, char: str) -> Parsing:
        if tag == ALL_BEGIN:
            char = yield from self.skip(char)
            char = yield from self.expect(BEGIN, char)
        return (yield from self.call_list(char, self._call, BEGIN, ALL_END))

    def _call(self, char: str) -> Parsing:
        """Read a call after its opening, with its closing tag."""
        name, char = yield from self.word(char, "\n<{")
        char = yield from self.expect(SEP, char)
        char = yield from self.skip(char)
        fenced = name.strip() == TYPE
        if fenced:
            name, char = yield from self.word(char, "\n<{")
            char = yield from self.skip(char)
            char = yield from self.expect(f"{FENCE}json", char)
            char = yield from self.skip(char)
        if not name.strip() or char != "{":
            raise Malformed(char)
        self.begin_call(name.strip())
        char = yield from self.value(char, self.add_arguments)
        self.end_call()
        char = yield from self.skip(char)
        if fenced:
            char = yield from self.expect(FENCE, char)
            char = yield from self.skip(char)
        char = yield from self.expect(END, char)
        self.accept()
        return char


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
