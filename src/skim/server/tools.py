"""Tools in a chat: showing them to the model, and constraining its calls.

Functions here take messages and tools as plain dicts in OpenAI's format. Each model family has a `ToolFormat`
for its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from skim.errors import RequestError, shown
from skim.sampling.grammar import Grammar
from skim.server.formats.history import arguments_of, with_arguments
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import NO_TOKENS, Tool, ToolFormat, function_of
from skim.server.formats.tools.hermes import Format as Hermes

Message = dict[str, Any]

MAX_FORCED_CALLS = 16
"""Most calls in a reply that a grammar constrains. Without a limit, small models never stop calling."""

HERMES: ToolFormat = Hermes()
"""The format that most models can follow, for templates that show none."""


# -- prompt


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] | None,
    chat_template: str | Mapping[str, str] | None,
    form: ToolFormat = HERMES,
    *,
    as_text: bool = False,
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """(messages, tools) for the chat template; the inputs are not modified.

    A template with tool support gets both. Arguments of earlier calls become objects, as most templates
    expect, or JSON `as_text`, as clients send them. For a template without it, everything becomes text: tools
    go into the system message, calls into the assistant's message, and results into a user message. Some
    templates have calls and results but no tools.
    """
    if template_uses_tools(chat_template):
        known = [with_arguments(message, as_text=as_text) for message in messages]
        return form.history(known), [dict(tool) for tool in tools or ()] or None
    if template_uses(chat_template, "tool_calls"):
        written = form.history([with_arguments(message, as_text=as_text) for message in messages])
    else:
        written = _as_text(messages, form)
    return _instructed(written, tools, form) if tools else written, None


def _as_text(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Message]:
    """Messages with calls and results as text."""
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
            texts.append(form.calls([(call["function"]["name"], arguments_of(call)) for call in calls]))
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**kept, "content": "\n".join(texts)})
        else:
            written.append(dict(message))
        after_result = is_result
    return written


def _instructed(messages: list[Message], tools: Sequence[Tool], form: ToolFormat) -> list[Message]:
    """Messages with the tools described in the system message."""
    text = form.instructions(tools)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{text}\n\n{_text(messages[0])}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def template_uses_tools(chat_template: str | Mapping[str, str] | None) -> bool:
    """True if a chat template uses tools. Of several named templates, transformers chooses one."""
    if isinstance(chat_template, Mapping):
        return "tool_use" in chat_template or any(map(_mentions_tools, chat_template.values()))
    return chat_template is not None and _mentions_tools(chat_template)


def template_uses(chat_template: str | Mapping[str, str] | None, name: str) -> bool:
    """True if a chat template, or the default of several, has this name."""
    chosen = chat_template.get("default", "") if isinstance(chat_template, Mapping) else chat_template or ""
    return re.search(rf"\b{name}\b", chosen) is not None


@lru_cache(maxsize=8)
def _mentions_tools(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # transformers adds its own tags
        return re.search(r"\btools\b", template) is not None
    return "tools" in find_undeclared_variables(parsed)


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
    tags: TokenTags = NO_TOKENS,
) -> Grammar | None:
    """The grammar that enforces `tool_choice`, or None if the reply is unconstrained.

    `choice` is `auto`, `none`, `required`, a function's name, or OpenAI's object with that name. With `auto`
    the model decides whether to call; if any tool is `strict`, every call must be well-formed. `required`
    means one or more calls, or exactly one unless `parallel`. A name means exactly one call of that function.
    """
    if choice == "none" or (choice == "auto" and not any(function_of(tool).get("strict") for tool in tools)):
        return None
    if not tools:
        raise RequestError(f"tool_choice {shown(choice)} needs tools", fields="tool_choice")
    max_calls = MAX_FORCED_CALLS if parallel else 1
    if choice in ("auto", "required"):
        return form.grammar(tools, max_calls, among_text=choice == "auto", tags=tags)
    name = choice if isinstance(choice, str) else function_of(choice)["name"]
    named = [tool for tool in tools if function_of(tool)["name"] == name]
    if not named:
        known = ", ".join(function_of(tool)["name"] for tool in tools)
        raise RequestError(
            f"tool_choice names {shown(name)}, but the tools are {shown(known, quoted=False)}",
            fields="tool_choice",
        )
    return form.grammar(named[:1], 1, tags=tags)
