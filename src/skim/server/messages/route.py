"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any
from uuid import uuid4

from skim.server.chat import OpenedChat, count_tokens, open_chat
from skim.server.endpoint import GENERATION_ERRORS, TEXT_ERRORS, Call, Endpoint
from skim.server.messages.events import MessageEvents, MessageFraming
from skim.server.messages.into_chat import chat_body, prompt_body
from skim.server.messages.replies import MessageError, MessageResponse, TokenCount, message_of
from skim.server.messages.requests import CountTokensRequest, MessagesRequest
from skim.server.options import refuse_progress
from skim.server.parse import validated
from skim.server.protocol import Checking
from skim.server.protocol.requests import ChatRequest
from skim.server.reply import EventStream, Reply, json_reply


async def post_message(call: Call) -> Reply | EventStream:
    service, request = call.service, call.body
    refuse_progress(request.skim)
    chat = await _translated(call, chat_body)
    chat.skim = request.skim
    opened = await open_chat(service, chat, call.log)
    message_id = f"msg_{uuid4().hex[:24]}"
    if request.stream:
        events = _events(opened, MessageEvents(message_id, service.model_name))
        return EventStream(
            opened.generation, events, framing=MessageFraming(), keepalive=service.config.keepalive
        )
    async with opened.generation:
        return json_reply(message_of(await opened.reply.whole(opened.generation), message_id))


async def _translated(call: Call, body_of: Callable[[Any], dict[str, Any]]) -> ChatRequest:
    """The checked chat request. A long one is translated and checked off the event loop."""

    def translate() -> ChatRequest:
        return validated(ChatRequest, body_of(call.body), Checking(call.service.config))

    return await call.service.on_text(translate, call.log.size)


async def _events(opened: OpenedChat, events: MessageEvents) -> AsyncGenerator[dict[str, Any], None]:
    for event in events.begin(opened.generation.prompt_tokens):
        yield event
    async for chunk in opened.reply.stream(opened.generation, include_usage=True):
        for event in events.push(chunk):
            yield event


async def post_count_tokens(call: Call) -> Reply:
    chat = await _translated(call, prompt_body)
    return json_reply(TokenCount(input_tokens=await count_tokens(call.service, chat, call.log.size)))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        "Reply to a conversation, by Anthropic's protocol",
        post_message,
        MessageResponse,
        MessagesRequest,
        GENERATION_ERRORS,
        streams=True,
        error=MessageError,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        "Count the prompt tokens of a conversation, by Anthropic's protocol",
        post_count_tokens,
        TokenCount,
        CountTokensRequest,
        TEXT_ERRORS,
        error=MessageError,
    ),
)
