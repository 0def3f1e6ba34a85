"""The messages of a sample's turns, in the form that the model's chat template renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from skim.errors import RequestError
from skim.evals.room import Message, Turn, Turns


class Renders(Protocol):
    """Renders conversations with a model's chat template."""

    def render_chat(self, messages: Sequence[Message], /) -> str: ...


def called(name: str, arguments: Mapping[str, Any], content: str = "") -> Message:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": dict(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(content: str) -> Message:
    """The result of the call before it."""
    return {"role": "tool", "tool_call_id": "call00000", "content": content}


_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Look it up."},
    called("probed_name", {"key": "value"}),
    result("probed_result"),
)


def messages_of(llm: Renders, turn: Turn) -> list[dict[str, Any]]:
    """The messages of one turn. The user's last message keeps its parts.

    If the chat template does not render tool calls, they are written as text: calls in `<tool_call>` tags,
    results as user messages in `<tool_response>` tags.
    """
    before = [dict(one) for one in turn if not isinstance(one, str)]
    parts = [{"type": "text", "text": one} for one in turn if isinstance(one, str)]
    if any(one["role"] == "tool" for one in before) and not renders_tools(llm):
        before = [_as_text(one) for one in before]
    return [*before, {"role": "user", "content": parts}]


def text_of(llm: Renders, turns: Turns) -> str:
    """The last prompt of a conversation, with empty replies, as text."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        *before, asked = messages_of(llm, turn)
        joined = "\n".join(part["text"] for part in asked["content"])
        messages += [*before, {**asked, "content": joined}, {"role": "assistant", "content": ""}]
    return llm.render_chat(messages[:-1])


def renders_tools(llm: Renders) -> bool:
    """True if the chat template renders tool calls and their results."""
    try:
        text = llm.render_chat(_PROBE)
    except RequestError:
        return False
    return "probed_name" in text and "probed_result" in text


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message["content"], *(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in calls)]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}
