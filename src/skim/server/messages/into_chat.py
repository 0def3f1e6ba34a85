"""Translates a request of Anthropic's API into the body of a chat request. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from skim.server.errors import ApiError
from skim.server.messages.requests import (
    BlocksSource,
    CountTokensRequest,
    DocumentBlock,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Message = dict[str, Any]


def chat_body(request: MessagesRequest) -> dict[str, Any]:
    """The fields of a chat request that asks for the same reply."""
    return {
        **prompt_body(request),
        "max_completion_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or None,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "user": request.metadata.user_id if request.metadata is not None else None,
    }


def prompt_body(request: CountTokensRequest) -> dict[str, Any]:
    """The fields of a chat request that make its prompt, and what may follow it."""
    told = _system(request.system)
    messages = [*told, *(one for message in request.messages for one in _messages(message))]
    config, thinking = request.output_config, request.thinking
    return {
        "model": request.model,
        "messages": messages,
        "continue_final_message": _is_continued(messages) or None,
        "chat_template_kwargs": {"enable_thinking": thinking.type != "disabled"} if thinking else None,
        **_tools(request),
        "response_format": _format(config.format.schema_) if config is not None and config.format else None,
    }


def _is_continued(messages: Sequence[Message]) -> bool:
    """True if the reply continues the last message: Anthropic's clients begin replies so."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def _system(given: str | Sequence[TextBlock] | None) -> list[Message]:
    if not given:
        return []
    texts = [given] if isinstance(given, str) else [block.text for block in given]
    return [{"role": "system", "content": _content(texts)}]


def _messages(message: InputMessage) -> Iterator[Message]:
    """A message as one chat message; each tool result in it is a message of its own."""
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
    elif message.role == "assistant":
        yield _assistant(content)
    else:
        texts: list[str] = []
        for block in content:
            if isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": message.role, "content": _content(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            else:
                texts += _texts(block, message.role)
        if texts:
            yield {"role": message.role, "content": _content(texts)}


def _assistant(blocks: Sequence[Any]) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        else:
            texts += _texts(block, "assistant")
    message: Message = {"role": "assistant", "content": _content(texts) if texts else None}
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _texts(block: Any, role: str) -> list[str]:
    if isinstance(block, TextBlock):
        return [block.text]
    if isinstance(block, DocumentBlock):
        return [_document(block)]
    if isinstance(block, (ToolUseBlock, ToolResultBlock)):
        raise ApiError(
            400,
            f"messages: a block of type {block.type} cannot stand in a message of {role}",
            param="messages",
        )
    return []  # thinking is only read in an assistant's message


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(text for one in content for text in _texts(one, "tool"))
    return f"Error: {content}" if block.is_error else content


def _document(block: DocumentBlock) -> str:
    source = block.source
    if isinstance(source, BlocksSource):
        parts = [source.content] if isinstance(source.content, str) else [one.text for one in source.content]
    else:
        parts = [source.data]
    head = [part for part in (block.title, block.context) if part]
    return "\n".join(["<document>", *head, *parts, "</document>"])


def _content(texts: Sequence[str]) -> Any:
    """One text as such; several as content parts, which help to find the question."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise ApiError(400, f"tool_choice {choice.type} needs tools", param="tool_choice")
        return {}
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in request.tools
    ]
    if choice is None:
        return {"tools": tools}
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name is required with the type tool", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    asked: Any = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
    parallel = not choice.disable_parallel_tool_use
    return {"tools": tools, "tool_choice": asked, "parallel_tool_calls": parallel}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
