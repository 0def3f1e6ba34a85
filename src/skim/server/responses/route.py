"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from skim.errors import shown
from skim.server.chat import OpenedChat, count_tokens, open_chat
from skim.server.endpoint import GENERATION_ERRORS, TEXT_ERRORS, Call, Endpoint
from skim.server.errors import ApiError
from skim.server.options import refuse_progress
from skim.server.parse import validated
from skim.server.protocol import Checking
from skim.server.protocol.requests import ChatRequest
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.responses.events import ResponseEvents, ResponseFraming
from skim.server.responses.into_chat import Item, chat_body, items_of
from skim.server.responses.replies import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    finished,
    new_response,
    output_of,
)
from skim.server.responses.requests import ResponsesRequest
from skim.server.responses.store import Stored
from skim.server.service import Service


async def post_response(call: Call) -> Reply | EventStream:
    service, request = call.service, call.body
    refuse_progress(request.skim)
    chat, items = await _translated(call)
    opened = await open_chat(service, chat, call.log)
    response_id = f"resp_{uuid4().hex[:24]}"
    store = request.store is not False and service.responses.most > 0
    new = new_response(request, response_id, service.model_name, int(time.time()), store=store)
    keep = partial(_keep, service, items, call.log.size)
    if request.stream:
        return EventStream(
            opened.generation,
            _events(opened, ResponseEvents(new), keep),
            framing=ResponseFraming(),
            keepalive=service.config.keepalive,
        )
    async with opened.generation:
        reply = await opened.reply.whole(opened.generation)
    output = output_of(reply, response_id)
    response = finished(new, output, reply.choices[0].finish_reason, reply.usage, reply.skim)
    await keep(response)
    return json_reply(response)


async def _translated(call: Call) -> tuple[ChatRequest, list[Item]]:
    """The chat request, and the items of the whole conversation. Long ones are translated off the loop."""
    service, request = call.service, call.body
    before: list[Item] = []
    if request.previous_response_id is not None:
        stored = service.responses.get(request.previous_response_id)
        if stored is None:
            raise _not_found(request.previous_response_id, service, 400, "previous_response_id")
        before = stored.conversation
        call.log.size += stored.size

    def translate() -> tuple[ChatRequest, list[Item]]:
        items = [*before, *items_of(request, service.responses.find_item)]
        chat = validated(ChatRequest, chat_body(request, items), Checking(service.config))
        chat.skim = request.skim
        return chat, items

    return await service.on_text(translate, call.log.size)


async def _events(
    opened: OpenedChat, events: ResponseEvents, keep: Callable[[ResponseObject], Awaitable[None]]
) -> AsyncGenerator[dict[str, Any], None]:
    for event in events.begin():
        yield event
    async for chunk in opened.reply.stream(opened.generation, include_usage=True):
        found = events.push(chunk)
        if events.response.status != "in_progress":
            await keep(events.response)  # before the client knows of it
        for event in found:
            yield event


async def _keep(service: Service, items: list[Item], size: int, response: ResponseObject) -> None:
    """Store a finished response with its conversation of `size` bytes, unless it alone exceeds the limits.

    The response then says that it is not stored.
    """

    def stored() -> Stored:
        named = tuple(item if "id" in item else {**item, "id": f"item_{uuid4().hex[:24]}"} for item in items)
        return Stored(response.model_dump(), named, size + len(response.model_dump_json()))

    if response.store:
        made = await service.on_text(stored, size, admitted=True)
        response.store = service.responses.put(response.id, made)


async def post_input_tokens(call: Call) -> Reply:
    chat, _ = await _translated(call)
    return json_reply(InputTokens(input_tokens=await count_tokens(call.service, chat, call.log.size)))


async def get_response(call: Call) -> Reply:
    stored = _stored(call)
    return await call.service.on_text(lambda: json_reply(stored.response), stored.size)


async def delete_response(call: Call) -> Reply:
    response_id = call.path["response_id"]
    if not call.service.responses.delete(response_id):
        raise _not_found(response_id, call.service, 404, "response_id")
    return json_reply(DeletedResponse(id=response_id))


async def get_input_items(call: Call) -> Reply:
    """The items that a response answered, the newest first."""
    stored = _stored(call)

    def write() -> Reply:
        items = [*reversed(stored.input)]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return json_reply(ItemList(data=items, first_id=first, last_id=last))

    return await call.service.on_text(write, stored.size)


def _stored(call: Call) -> Stored:
    response_id = call.path["response_id"]
    stored = call.service.responses.get(response_id)
    if stored is None:
        raise _not_found(response_id, call.service, 404, "response_id")
    return stored


def _not_found(response_id: str, service: Service, status: int, param: str) -> ApiError:
    store = service.responses
    return ApiError(
        status,
        f"no response {shown(response_id)} is stored: it was deleted, never stored (store is false), or "
        f"replaced by newer ones; this server keeps {store.most} responses of {store.most_bytes} bytes in "
        "all (--max-stored-responses, --max-stored-bytes), and none through a restart",
        param=param,
        code="previous_response_not_found" if status == 400 else "response_not_found",
        reason="unknown_response",
    )


_ONE = "/v1/responses/{response_id}"
_STORED_ERRORS = (401, 403, 404, 429, 503)
ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        "Reply to a conversation, by the Responses API",
        post_response,
        ResponseObject,
        ResponsesRequest,
        GENERATION_ERRORS,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        "Count the prompt tokens of a response",
        post_input_tokens,
        InputTokens,
        ResponsesRequest,
        TEXT_ERRORS,
    ),
    Endpoint("GET", _ONE, "A stored response", get_response, ResponseObject, errors=_STORED_ERRORS),
    Endpoint("DELETE", _ONE, "Forget a response", delete_response, DeletedResponse, errors=_STORED_ERRORS),
    Endpoint(
        "GET",
        f"{_ONE}/input_items",
        "The items that a stored response answered",
        get_input_items,
        ItemList,
        errors=_STORED_ERRORS,
    ),
)
