"""`[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

The formats of Mistral AI's models, old and new. Ids have nine letters and digits, as the templates demand.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from skim.registry import ParserDeclaration
from skim.server.formats.scanner import Malformed, Parsing, Scanner
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import (
    JsonFormat,
    Message,
    Tool,
    function_of,
    json_text,
    parameters_of,
)

PARSER = ParserDeclaration(
    help="`[TOOL_CALLS]` with a JSON list, or `[TOOL_CALLS]name[ARGS]{...}`",
    families="Mistral, Magistral, Devstral",
    template=r"\[TOOL_CALLS\]",
    order=30,
)

OPENING, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LETTERS = string.ascii_letters + string.digits
NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class Format(JsonFormat):
    special = (OPENING, ARGS, CALL_ID)
    opening = OPENING

    def __init__(self, template: str = "") -> None:
        super().__init__(template)
        self._named = ARGS in template
        self.separator = "" if self._named else None

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        if self._named:
            return "".join(f"{OPENING}{name}{ARGS}{json_text(arguments)}" for name, arguments in calls)
        return f"{OPENING}[{', '.join(self.object(*call) for call in calls)}]"

    def new_id(self) -> str:
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    def history(self, messages: Sequence[Message]) -> list[Message]:
        return [_with_short_ids(message) for message in messages]

    def body(self, max_calls: int, tags: TokenTags) -> str:
        if self._named:
            return "call"
        more = f' (", " call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        return f'"[" call{more} "]"'

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        name = function_of(tool)["name"]
        if not self._named or not NAME.issuperset(name):
            return super().rule(index, tool, tags)
        expression = f"{json.dumps(name)} {tags.literal(ARGS)} arguments_{index}"
        return expression, {f"arguments_{index}": parameters_of(tool)}

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        return MistralParser(self.new_id)


class MistralParser(Scanner):
    """Also reads a single object after the tag, and a name without `[ARGS]`, as some versions write."""

    openings = (OPENING,)

    def read_calls(self, tag: str, char: str) -> Parsing:
        char = yield from self.skip(char)
        if char == "[":
            return (yield from self._list(char))
        if char == "{":
            return (yield from self.call_object(char))
        return (yield from self._named(char))

    def _list(self, char: str) -> Parsing:
        char = yield from self.take(char)
        return (yield from self.call_list(char, self._object, ",", "]"))

    def _object(self, char: str) -> Parsing:
        char = yield from self.skip(char)
        return (yield from self.call_object(char))

    def _named(self, char: str) -> Parsing:
        name = ""
        while char and char in NAME:
            name += char
            char = yield from self.take(char)
        if not name:
            raise Malformed(char)
        while char == "[":
            tag, char = yield from self.one_of((ARGS, CALL_ID), char)
            while tag == CALL_ID and char and char in NAME:
                char = yield from self.take(char)
            if tag == ARGS:
                break
        char = yield from self.skip(char)
        if char != "{":
            raise Malformed(char)
        self.begin_call(name)
        char = yield from self.value(char, self.add_arguments)
        self.end_call()
        return char


def _with_short_ids(message: Message) -> Message:
    message = dict(message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "id": _short(call.get("id", ""))} for call in calls]
    if "tool_call_id" in message:
        message["tool_call_id"] = _short(message["tool_call_id"])
    return message


def _short(call_id: str) -> str:
    """The id itself if it is short enough, otherwise nine letters and digits that depend on it alone."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
