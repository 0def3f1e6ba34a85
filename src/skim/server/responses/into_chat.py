"""Translates a request of the Responses API into the body of a chat request. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skim.server.errors import ApiError
from skim.server.responses.requests import (
    AllowedTools,
    ItemReference,
    NamedChoice,
    ObjectFormat,
    ResponsesRequest,
    SchemaFormat,
)

Item = dict[str, Any]
Message = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"


def items_of(request: ResponsesRequest, find: Callable[[str], Item | None]) -> list[Item]:
    """The request's own items as JSON data. `find` returns the item that a reference names."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    items = []
    for index, item in enumerate(request.input):
        found: Item | None
        if isinstance(item, ItemReference):
            found = find(item.id)
            if found is None:
                raise ApiError(
                    400,
                    f"input[{index}]: no stored response has an item {item.id!r}; send the item itself",
                    param=f"input[{index}]",
                )
        else:
            found = item.model_dump(exclude_none=True)
        items.append(found)
    return items


def chat_body(request: ResponsesRequest, items: Sequence[Item]) -> dict[str, Any]:
    """The fields of a chat request that continues the conversation of `items`."""
    told = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return {
        "model": request.model,
        "messages": [*told, *messages_of(items)],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        **_logprobs(request),
        **_tools(request),
        "response_format": _format(request),
        "stream": request.stream,
        "user": request.user,
    }


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Chat messages. Reasoning, text and calls of one turn, which are items of their own, are joined."""
    messages: list[Message] = []
    turn: Message | None = None  # the assistant's message in progress
    for item in items:
        kind = item["type"]
        role = item.get("role", "assistant")
        if kind == "function_call_output" or role != "assistant":
            turn = None
            if kind == "function_call_output":
                content = _joined(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            else:
                messages.append({"role": role, "content": _content(item["content"])})
            continue
        if turn is None or (kind == "message" and (turn["content"] or "tool_calls" in turn)):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "message":
            turn["content"] = _joined(item["content"])
        elif kind == "reasoning":
            thought = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())
            if thought:
                turn["reasoning_content"] = thought
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return [one for one in messages if one != {"role": "assistant", "content": ""}]


def _content(content: Any) -> Any:
    """A text as such; parts as content parts, which help to find the question."""
    if isinstance(content, str):
        return content
    texts = [_text(part) for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts] or ""


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text, content))


def _text(part: dict[str, str]) -> str:
    return part["refusal"] if part["type"] == "refusal" else part["text"]


def _logprobs(request: ResponsesRequest) -> dict[str, Any]:
    if request.top_logprobs is None and LOGPROBS not in (request.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": request.top_logprobs}


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    tools = request.tools or []
    choice: Any = request.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {one.name for one in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return {}
    if isinstance(choice, NamedChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    functions = [tool.model_dump(exclude={"type"}) for tool in tools]
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text is not None else None
    if isinstance(wanted, SchemaFormat):
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": "json_object"} if isinstance(wanted, ObjectFormat) else None
