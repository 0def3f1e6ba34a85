"""Messages to functions in OpenAI's harmony format: `<|channel|>commentary to=functions.name ...`.

The format of gpt-oss. The recipient stands in the channel or, as the chat template writes it, after the role.
The arguments are the message. The reasoning format `gpt_oss` takes out the other messages before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.sampling.grammar import Grammar
from skim.server.formats.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MESSAGE,
    RETURN,
    START,
    TAGS,
    may_continue,
    read_header,
)
from skim.server.formats.history import one_call_each
from skim.server.formats.scanner import Malformed, Parsing, Scanner
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import (
    NO_TOKENS,
    Message,
    Tool,
    ToolFormat,
    function_of,
    json_text,
    parameters_of,
)

PARSER = ParserDeclaration(
    help="harmony messages `to=functions.name`",
    families="gpt-oss",
    template=r"<\|channel\|>.*to=functions\.",
    order=10,
)


class Format(ToolFormat):
    special = TAGS
    stops = (RETURN, CALL)

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"{START}assistant".join(self._call(name, arguments) for name, arguments in calls)

    def _call(self, name: str, arguments: Any) -> str:
        head = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
        return f"{head}{json_text(arguments)}{CALL}"

    def history(self, messages: Sequence[Message]) -> list[Message]:
        """One call a message: the template shows only the first."""
        return list(one_call_each(messages))

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return HarmonyCallParser(self.new_id)

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, *, among_text: bool = False, tags: TokenTags = NO_TOKENS
    ) -> Grammar:
        """One call: the token that ends a call ends the reply. Text is an answer in the channel `final`."""
        final = f'{tags.literal(CHANNEL)} "final" {tags.literal(MESSAGE)} /(?s:.*)/'
        rules = [f"start: call{f' | {final}' if among_text else ''}"]
        return self.with_calls(rules, tools, tags)

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        head = json.dumps(f"commentary to=functions.{function_of(tool)['name']} ")
        parts = [tags.literal(CHANNEL), head, tags.literal(CONSTRAIN), '"json"', tags.literal(MESSAGE)]
        return f"{' '.join(parts)} arguments_{index}", {f"arguments_{index}": parameters_of(tool)}


class HarmonyCallParser(Scanner):
    openings = (CHANNEL, START)

    def read_start(self, char: str) -> Parsing:
        """Read a recipient right after the role, which ends the prompt."""
        if char not in (" ", "t"):
            return char
        if char == " ":
            char = yield from self.take(char)
        char = yield from self.expect("to=functions.", char)
        return (yield from self._message("to=functions.", char))

    def read_calls(self, tag: str, char: str) -> Parsing:
        return (yield from self._message(tag, char))

    def _message(self, header: str, char: str) -> Parsing:
        """Read a message to a function. Another may begin before it has ended."""
        while True:
            while not header.endswith(MESSAGE):
                if not char or not may_continue(header):
                    raise Malformed(char)
                header += char
                char = yield from self.take(char)
            found = read_header(header)
            if found is None or found.function is None:
                raise Malformed(char)
            self.begin_call(found.function)
            header, char = yield from self.up_to((*ENDS, START), char, self.add_arguments)
            self.end_call()
            if header != START:
                return char
            self.unclaimed(START)
