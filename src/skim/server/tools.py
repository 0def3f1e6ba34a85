"""Tools in a chat: showing them to the model, constraining its calls, parsing its calls.

Each model family writes calls in its own `ToolFormat`. Functions here take messages and tools as plain dicts
in OpenAI's format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from skim.errors import RequestError, shown
from skim.sampling.grammar import Grammar
from skim.server.toolcalls import ContentDelta, ToolCallDelta, ToolCallParser

__all__ = [
    "FORMATS",
    "HERMES",
    "ContentDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolFormat",
    "parse_tool_calls",
    "prepare_messages",
    "template_uses_tools",
    "tool_format",
    "tool_grammar",
]

Message = dict[str, Any]
Tool = Mapping[str, Any]

MAX_FORCED_CALLS = 16
"""Most calls in a reply that a grammar constrains. Without a limit, small models never stop calling."""


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolFormat(Protocol):
    """The format in which a model family reads tools and writes calls."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Text for the system message, for templates without tool support."""

    def call(self, name: str, arguments: Any) -> str:
        """A call as the model writes it."""

    def result(self, content: str) -> str:
        """A tool's result as the model reads it."""

    def grammar(self, tools: Sequence[Tool], max_calls: int, *, among_text: bool = False) -> Grammar:
        """One to `max_calls` calls and nothing else; with `among_text`, zero to `max_calls` amid text."""

    def parser(self) -> ToolCallParser:
        """A parser for one reply."""


class Hermes:
    """JSON objects in tags, the format of Nous Research's Hermes and Alibaba's Qwen models."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = self.call("function_name", {"parameter": "value"})
        return (
            "You may call functions to help with the user's request. These are the functions there are, each "
            f"as JSON on a line of its own:\n<tools>\n{listed}\n</tools>\n"
            "To call a function, write its name and arguments as a JSON object in tags, one pair of tags for "
            f"each call:\n{example}\n"
            "The results will be given to you in <tool_response> tags. Where no function is needed, answer "
            "in plain text."
        )

    def call(self, name: str, arguments: Any) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def grammar(self, tools: Sequence[Tool], max_calls: int, *, among_text: bool = False) -> Grammar:
        any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
        if among_text:
            rules = [
                f"start: (opened body){{0,{max_calls}}} TEXT",
                "opened[lazy]: /(?s:.*)<tool_call>/",
                "TEXT: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/",
            ]
        else:
            more = f' ("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
            rules = [f"start: call{more}", 'call: "<tool_call>" body']
        rules.append(f'body: "\\n" ({any_call}) "\\n</tool_call>"')
        for i, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(_function(tool)["name"], ensure_ascii=False)}, "arguments": '
            rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        schemas = {f"arguments_{i}": _parameters(tool) for i, tool in enumerate(tools)}
        return Grammar.lark("\n".join(rules), schemas)

    def parser(self) -> ToolCallParser:
        return ToolCallParser()


HERMES: ToolFormat = Hermes()
FORMATS = {"hermes": HERMES}
"""By name: the choices of `ServerConfig.tool_parser` besides `auto`."""
_FAMILIES = {"qwen2": HERMES, "qwen2_moe": HERMES, "qwen3": HERMES, "qwen3_moe": HERMES}


def tool_format(name: str = "auto", model_type: str | None = None) -> ToolFormat:
    """The format for a `tool_parser`; `auto` picks the family's, or Hermes, which most models can follow."""
    if name == "auto":
        return _FAMILIES.get(model_type or "", HERMES)
    return FORMATS[name]


# -- prompt


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] | None,
    chat_template: str | Mapping[str, str] | None,
    form: ToolFormat = HERMES,
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """(messages, tools) for the chat template; the inputs are not modified.

    A template with tool support gets both. Arguments of earlier calls become objects, as templates expect;
    clients send them as JSON text. For a template without it, everything becomes text: tools go into the
    system message, calls into the assistant's message, and results into a user message.
    """
    if template_uses_tools(chat_template):
        return [_with_objects(message) for message in messages], [dict(tool) for tool in tools or ()] or None
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = form.result(_text(message))
            if after_result:
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [_text(message)] if _text(message) else []
            texts += [form.call(call["function"]["name"], _arguments(call)) for call in calls]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**kept, "content": "\n".join(texts)})
        else:
            written.append(dict(message))
        after_result = is_result
    if tools:
        text = form.instructions(tools)
        if written and written[0]["role"] == "system":
            written[0]["content"] = f"{text}\n\n{_text(written[0])}"
        else:
            written.insert(0, {"role": "system", "content": text})
    return written, None


def template_uses_tools(chat_template: str | Mapping[str, str] | None) -> bool:
    """True if a chat template uses tools. Of several named templates, transformers chooses one."""
    if isinstance(chat_template, Mapping):
        return "tool_use" in chat_template or any(map(_mentions_tools, chat_template.values()))
    return chat_template is not None and _mentions_tools(chat_template)


@lru_cache(maxsize=8)
def _mentions_tools(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # transformers adds its own tags
        return re.search(r"\btools\b", template) is not None
    return "tools" in find_undeclared_variables(parsed)


def _with_objects(message: Mapping[str, Any]) -> Message:
    """A copy of the message in which call arguments are objects."""
    if not (calls := message.get("tool_calls")):
        return dict(message)
    objects = [{**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": objects}


def _arguments(call: Mapping[str, Any]) -> Any:
    """A call's arguments as an object, or as the original text if it is not JSON."""
    given = call["function"].get("arguments")
    if not isinstance(given, str):
        return given if given is not None else {}
    try:
        return json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return given


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content) if content is not None else ""


# -- calls


def tool_grammar(
    tools: Sequence[Tool],
    choice: str | Mapping[str, Any],
    *,
    parallel: bool = True,
    form: ToolFormat = HERMES,
) -> Grammar | None:
    """The grammar that enforces `tool_choice`, or None if the reply is unconstrained.

    `choice` is `auto`, `none`, `required`, a function's name, or OpenAI's object with that name. With `auto`
    the model decides whether to call; if any tool is `strict`, every call must be well-formed. `required`
    means one or more calls, or exactly one unless `parallel`. A name means exactly one call of that function.
    """
    if choice == "none" or (choice == "auto" and not any(_function(tool).get("strict") for tool in tools)):
        return None
    if not tools:
        raise RequestError(f"tool_choice {shown(choice)} needs tools", fields="tool_choice")
    max_calls = MAX_FORCED_CALLS if parallel else 1
    if choice in ("auto", "required"):
        return form.grammar(tools, max_calls, among_text=choice == "auto")
    name = choice if isinstance(choice, str) else _function(choice)["name"]
    named = [tool for tool in tools if _function(tool)["name"] == name]
    if not named:
        known = ", ".join(_function(tool)["name"] for tool in tools)
        raise RequestError(
            f"tool_choice names {shown(name)}, but the tools are {shown(known, quoted=False)}",
            fields="tool_choice",
        )
    return form.grammar(named[:1], 1)


def parse_tool_calls(text: str, form: ToolFormat = HERMES) -> tuple[str | None, list[ToolCall]]:
    """(content, calls) of a complete reply; content is None if the reply has only calls."""
    parser = form.parser()
    content: list[str] = []
    begun: list[ToolCallDelta] = []
    arguments: list[str] = []
    for delta in [*parser.push(text), *parser.finish()]:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif delta.id is not None:
            begun.append(delta)
            arguments.append(delta.arguments)
        else:
            arguments[delta.index] += delta.arguments
    calls = [
        ToolCall(delta.id or "", delta.name or "", text) for delta, text in zip(begun, arguments, strict=True)
    ]
    return "".join(content) or (None if calls else ""), calls


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `function` object of a tool or a tool choice."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"a tool must have a function with a name, got {tool!r:.80}", fields="tools")
    return function


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments, always an object. Without a schema the tool takes no arguments."""
    function = _function(tool)
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of tool {function['name']!r} must be a JSON schema of an object", fields="tools"
        )
    return {**schema, "type": "object"}
