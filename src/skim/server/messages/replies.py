"""Replies of `/v1/messages` in Anthropic's shapes, made from a chat reply. Pure functions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from skim.server.errors import ApiError
from skim.server.protocol.replies import ChatResponse, SkimReport, Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

INVALID_JSON = "INVALID_JSON"
"""The one key of a call's input if the model's arguments are not an object; its value is their text."""


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ReplyContent = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class MessageUsage(BaseModel):
    """Tokens of the prompt that were computed and those found in the prefix cache; generated tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class MessageResponse(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyContent]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage
    skim: SkimReport


class TokenCount(BaseModel):
    input_tokens: int


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None = None


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's error object for an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = MessageErrorDetail(type=kind, message=error.message)
    return MessageError(error=detail, request_id=request_id).model_dump()


def message_of(reply: ChatResponse, message_id: str) -> MessageResponse:
    """A chat reply as Anthropic's message."""
    [choice] = reply.choices
    message = choice.message
    content: list[TextContent | ThinkingContent | ToolUseContent] = []
    if thought := message.reasoning_content:
        content.append(ThinkingContent(thinking=thought))
    if message.content:
        content.append(TextContent(text=message.content))
    for call in message.tool_calls or ():
        name, given = call.function.name, input_of(call.function.arguments)
        content.append(ToolUseContent(id=call.id, name=name, input=given))
    reason, sequence = stop_of(choice.finish_reason, choice.stop_reason)
    return MessageResponse(
        id=message_id,
        model=reply.model,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=usage_of(reply.usage),
        skim=reply.skim,
    )


def input_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}


def stop_of(finish_reason: str | None, stop: str | int | None) -> tuple[StopReason, str | None]:
    """Anthropic's stop reason, and the stop sequence that was found."""
    if finish_reason == "tool_calls":
        return "tool_use", None
    if finish_reason == "length":
        return "max_tokens", None
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)


def usage_of(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
