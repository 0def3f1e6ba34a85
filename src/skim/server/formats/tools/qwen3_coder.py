"""Calls in XML: `<function=name>`, then `<parameter=key>`, the value and `</parameter>` for each argument.

The format of Qwen3-Coder. Values are text: their types come from the tool's schema.
JSON between the tags is read too. Forced calls have it if the schema says more than types and choices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.server.formats.scanner import Found, Malformed, Parsing, Scanner
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import JsonFormat, Tool, function_of, json_text, parameters_of
from skim.server.formats.types import STRING, choices_of, is_closed, typed, types_of

PARSER = ParserDeclaration(
    help="`<function=name>` with `<parameter=key>` tags, typed by the tool's schema",
    families="Qwen3-Coder",
    template=r"<function=.*<parameter=",
    order=50,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_ENDS = (PARAMETER_END, f"\n{PARAMETER_END}", f"\n{PARAMETER}", f"\n{FUNCTION_END}")


class Format(JsonFormat):
    special = (OPENING, CLOSING)
    opening = OPENING
    separator = "\n"
    rules = (
        "value[lazy]: VALUE",
        r"VALUE: /(?s:.*)\n<\/parameter>\n/"
        r" & ~/(?s:.*(<\/parameter>|\n<\/function>|\n<parameter=).*)\n<\/parameter>\n/",
    )

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{OPENING}\n{self._function(*call)}\n{CLOSING}" for call in calls)

    def _function(self, name: str, arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return self.object(name, arguments)
        values = "".join(
            f"{PARAMETER}{key}>\n{json_text(value)}\n{PARAMETER_END}\n" for key, value in arguments.items()
        )
        return f"{FUNCTION}{name}>\n{values}{FUNCTION_END}"

    def body(self, max_calls: int, tags: TokenTags) -> str:
        return rf'"\n" call "\n" {tags.literal(CLOSING)}'

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        name, schema = function_of(tool)["name"], parameters_of(tool)
        if set(name) & set(">\n<") or not is_closed(schema, ">\n<"):
            return super().rule(index, tool, tags)
        parts, schemas = [json.dumps(f"{FUNCTION}{name}>\n")], {}
        for number, (key, given) in enumerate(schema.get("properties", {}).items()):
            written = json.dumps(f"{PARAMETER}{key}>\n")
            if choices := choices_of(given):
                value = "(" + " | ".join(map(json.dumps, choices)) + rf') "\n{PARAMETER_END}\n"'
            elif types_of(given, schema) == STRING:
                value = "value"
            else:
                rule = f"value_{number}_{index}"
                value = rf'{rule} "\n{PARAMETER_END}\n"'
                schemas[rule] = {**given, **{name: schema[name] for name in ("$defs",) if name in schema}}
            parts.append(
                f"{written} {value}" if key in schema.get("required", ()) else f"({written} {value})?"
            )
        return " ".join([*parts, f'"{FUNCTION_END}"']), schemas

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return Qwen3CoderParser(tools, self.new_id)


class Qwen3CoderParser(Scanner):
    """The outer tags may be missing. A value also ends before the next parameter or the function's end."""

    openings = (OPENING, FUNCTION)

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        self._functions = {function_of(tool)["name"]: function_of(tool) for tool in tools}
        super().__init__(new_id)

    def read_calls(self, tag: str, char: str) -> Parsing:
        if tag == OPENING:
            char = yield from self.skip(char)
            if char == "{":
                return (yield from self.call_in_tags(char, CLOSING))
            char = yield from self.expect(FUNCTION, char)
        return (yield from self.call_list(char, self._function, FUNCTION, CLOSING))

    def _function(self, char: str) -> Parsing:
        name, char = yield from self.word(char, ">\n<")
        if char != ">" or not name:
            raise Malformed(char)
        char = yield from self.take(char)
        self.begin_call(name)
        schema = self._functions.get(name, {}).get("parameters") or {}
        self.add_arguments("{")
        tag, first = "", True
        while True:
            if tag not in (PARAMETER, FUNCTION_END):
                char = yield from self.skip(char)
                tag, char = yield from self.one_of((PARAMETER, FUNCTION_END), char)
            if tag == FUNCTION_END:
                self.add_arguments("}")
                self.end_call()
                return char
            key, char = yield from self.word(char, ">\n<")
            if char != ">":
                raise Malformed(char, f"{PARAMETER}{key}")
            self.add_arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            char = yield from self.take(char)
            if char == "\n":
                char = yield from self.take(char)
            types = types_of((schema.get("properties") or {}).get(key), schema)
            tag, char = yield from self._value(char, types)
            tag = tag.strip()

    def _value(self, char: str, types: frozenset[str]) -> Found:
        """Read a value up to the tag that ends it; return the tag. Strings are streamed."""
        if types == STRING:
            self.add_arguments('"')
            found = yield from self.up_to(VALUE_ENDS, char, lambda text: self.add_arguments(_escaped(text)))
            self.add_arguments('"' if found[0] else "")
        else:
            pieces: list[str] = []
            found = yield from self.up_to(VALUE_ENDS, char, pieces.append)
            text = "".join(pieces)
            self.add_arguments(typed(text, types) if found[0] else text)
        if not found[0]:
            raise Malformed("")
        return found


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
