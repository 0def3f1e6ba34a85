"""OpenAI's older `functions` and `function_call`, as tools on the way in and as calls on the way out.

Pure functions. Messages in the older form are read in `protocol/messages.py`.
"""

from __future__ import annotations

from typing import Any

from skim.errors import shown
from skim.server.errors import ApiError
from skim.server.protocol.messages import NamedFunction, NamedToolChoice, Tool
from skim.server.protocol.replies import ChatChoice, ChatResponse
from skim.server.protocol.requests import ChatRequest


def with_tools(request: ChatRequest) -> ChatRequest:
    """The request with tools instead of functions. A reply then has at most one call."""
    functions, choice = request.functions or [], request.function_call
    if functions and (request.tools or request.tool_choice is not None):
        raise ApiError(400, "functions are the older form of tools; give one of them", param="functions")
    if isinstance(choice, NamedFunction) and choice.name not in (one.name for one in functions):
        known = shown(", ".join(one.name for one in functions) or "none", quoted=False)
        raise ApiError(
            400,
            f"function_call names {choice.name!r}, but the functions are {known}",
            param="function_call",
        )
    if not functions:
        return request
    named = NamedToolChoice(type="function", function=choice) if isinstance(choice, NamedFunction) else None
    return request.model_copy(
        update={
            "tools": [Tool(type="function", function=one) for one in functions],
            "tool_choice": named or choice,
            "parallel_tool_calls": False,
        }
    )


def older_reply(reply: ChatResponse) -> ChatResponse:
    """A reply with `function_call` instead of `tool_calls`."""
    return reply.model_copy(update={"choices": [_older_choice(choice) for choice in reply.choices]})


def _older_choice(choice: ChatChoice) -> ChatChoice:
    message = choice.message
    called = message.tool_calls[0].function if message.tool_calls else None
    return choice.model_copy(
        update={
            "message": message.model_copy(update={"tool_calls": None, "function_call": called}),
            "finish_reason": _older_reason(choice.finish_reason),
        }
    )


def older_chunk(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk with `function_call` instead of `tool_calls`."""
    choices = []
    for choice in chunk["choices"]:
        delta = dict(choice["delta"])
        for call in delta.pop("tool_calls", ()):
            delta["function_call"] = call["function"]
        choices.append({**choice, "delta": delta, "finish_reason": _older_reason(choice["finish_reason"])})
    return {**chunk, "choices": choices}


def _older_reason(reason: Any) -> Any:
    return "function_call" if reason == "tool_calls" else reason
