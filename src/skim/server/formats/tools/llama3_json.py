"""JSON objects that are the whole reply: `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`.

The format of Meta's Llama 3.1 to 3.3. Several calls are separated by semicolons. An object without the tag is
a call only at the start of a reply, and only if it names a tool of the request: a reply may be JSON too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.sampling.grammar import Grammar
from skim.server.formats.history import one_call_each
from skim.server.formats.scanner import Malformed, Parsing, Scanner
from skim.server.formats.tags import TokenTags, without
from skim.server.formats.tool_format import NO_TOKENS, JsonFormat, Message, Tool, function_of

PARSER = ParserDeclaration(
    help="JSON with `parameters`, bare or after `<|python_tag|>`",
    families="Llama 3.1, 3.2, 3.3",
    template=r'<\|python_tag\|>|"parameters": dictionary of argument name',
    order=60,
)

TAG = "<|python_tag|>"
SEPARATOR = "; "


class Format(JsonFormat):
    special = (TAG,)
    stops = ("<|eom_id|>", "<|eot_id|>")
    key = "parameters"

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return SEPARATOR.join(self.object(*call) for call in calls)

    def history(self, messages: Sequence[Message]) -> list[Message]:
        return list(one_call_each(messages))

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return Llama3Parser({function_of(tool)["name"] for tool in tools}, self)

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, *, among_text: bool = False, tags: TokenTags = NO_TOKENS
    ) -> Grammar:
        more = f' ("{SEPARATOR}" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        rules = [f"start: calls{' | TEXT' if among_text else ''}", f"calls: call{more}"]
        if among_text:  # no text that begins like a call
            rules.append(without("TEXT", TAG) + r" & /\s*([^{\s](?s:.*))?/")
        return self.with_calls(rules, tools, tags)


class Llama3Parser(Scanner):
    openings = (TAG,)

    def __init__(self, names: Collection[str], form: Format) -> None:
        self._names = names
        super().__init__(form.new_id)

    def read_start(self, char: str) -> Parsing:
        char = yield from self.skip(char)
        if char == "{":
            char = yield from self._objects(char, self._names)
        return char

    def read_calls(self, tag: str, char: str) -> Parsing:
        char = yield from self.skip(char)
        return (yield from self._objects(char, None))

    def _objects(self, char: str, only: Collection[str] | None) -> Parsing:
        while True:
            char = yield from self.call_object(char, ("parameters", "arguments"), only)
            char = yield from self.skip(char)
            while char in (";", ","):
                char = yield from self.take(char)
                char = yield from self.skip(char)
            if char != "{":
                raise Malformed(char)  # separators that no call follows are content
