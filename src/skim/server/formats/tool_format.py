"""The contract of a format of tool calls, and the parts that formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skim.errors import RequestError
from skim.sampling.grammar import Grammar
from skim.server.formats.scanner import Scanner, new_call_id
from skim.server.formats.tags import TokenTags, without

Message = dict[str, Any]
Tool = Mapping[str, Any]

NO_TOKENS = TokenTags()


class ToolFormat:
    """The format in which a model family reads tools and writes calls. `template` is its chat template.

    The defaults of `grammar` suit formats in which each call, or all calls together, have an opening tag.
    """

    special: ClassVar[Sequence[str]] = ()
    """Tags that the parser must see, even where the tokenizer makes them special tokens."""
    stops: ClassVar[Sequence[str]] = ()
    """Tokens that end a reply with calls."""
    opening: ClassVar[str] = ""
    separator: str | None = None
    """Text between two calls; None if one opening is for all calls."""

    rules: ClassVar[Sequence[str]] = ()
    """Rules that the rules of calls use."""

    def __init__(self, template: str = "") -> None:
        self.template = template

    # -- prompt

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Text for the system message, for templates without tool support."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = self.calls([("function_name", {"parameter": "value"})])
        return (
            "You may call functions to help with the user's request. These are the functions there are, each "
            f"as JSON on a line of its own:\n<tools>\n{listed}\n</tools>\n"
            f"To call a function, write its name and arguments like this, for each call:\n{example}\n"
            "The results will be given to you in <tool_response> tags. Where no function is needed, answer "
            "in plain text."
        )

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them, from names and arguments."""
        raise NotImplementedError

    def call(self, name: str, arguments: Any) -> str:
        """One call as the model writes it."""
        return self.calls([(name, arguments)])

    def result(self, content: str) -> str:
        """A tool's result as the model reads it, for templates without tool support."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def history(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with calls and results as the family's templates accept them."""
        return list(messages)

    def new_id(self) -> str:
        return new_call_id()

    # -- reply

    def parser(self, tools: Sequence[Tool] = ()) -> Scanner:
        """A parser for one reply to a request with these tools."""
        raise NotImplementedError

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, *, among_text: bool = False, tags: TokenTags = NO_TOKENS
    ) -> Grammar:
        """One to `max_calls` calls and nothing else; with `among_text`, zero to `max_calls` amid text."""
        opening, one_opening = tags.literal(self.opening), self.separator is None
        if among_text:
            most = 1 if one_opening else max_calls
            rules = [
                f"start: (opened body){{0,{most}}} TEXT",
                *tags.up_to("opened", self.opening),
                without("TEXT", self.opening),
            ]
        else:
            again = f"{json.dumps(self.separator)} {opening} body"
            more = "" if one_opening or max_calls == 1 else f" ({again}){{0,{max_calls - 1}}}"
            rules = [f"start: {opening} body{more}"]
        rules.append(f"body: {self.body(max_calls, tags)}")
        return self.with_calls(rules, tools, tags)

    def with_calls(self, rules: Sequence[str], tools: Sequence[Tool], tags: TokenTags) -> Grammar:
        """A grammar of these rules, with `call` for a call of one of the tools."""
        calls = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        schemas: dict[str, Any] = {}
        for i, tool in enumerate(tools):
            expression, needed = self.rule(i, tool, tags)
            calls.append(f"call_{i}: {expression}")
            schemas |= needed
        return Grammar.lark("\n".join([*rules, *calls, *self.rules]), schemas)

    def body(self, max_calls: int, tags: TokenTags) -> str:
        """The text after an opening tag, as a rule with `call` in it."""
        raise NotImplementedError

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        """A call of a tool as a rule, and the schemas of the rules it uses, which end in `_{index}`."""
        raise NotImplementedError


class JsonFormat(ToolFormat):
    """Calls that are JSON objects with a name and arguments."""

    key: ClassVar[str] = "arguments"

    def object(self, name: str, arguments: Any) -> str:
        return json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)

    def rule(self, index: int, tool: Tool, tags: TokenTags) -> tuple[str, dict[str, Any]]:
        name = json.dumps(function_of(tool)["name"], ensure_ascii=False)
        head = json.dumps(f'{{"name": {name}, "{self.key}": ')
        return f'{head} arguments_{index} "}}"', {f"arguments_{index}": parameters_of(tool)}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `function` object of a tool or a tool choice."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"a tool must have a function with a name, got {tool!r:.80}", fields="tools")
    return function


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments, always an object. Without a schema the tool takes no arguments."""
    function = function_of(tool)
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of tool {function['name']!r} must be a JSON schema of an object", fields="tools"
        )
    return {**schema, "type": "object"}


def json_text(arguments: Any) -> str:
    """Arguments as JSON; text that is not JSON stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
