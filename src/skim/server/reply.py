"""HTTP responses: a JSON body, an error, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.types import Send

from skim.server.errors import ApiError
from skim.server.service import Generation

DONE = b"data: [DONE]\n\n"
ERROR_GRACE_SECONDS = 2.0  # after the deadline, to send the error event


class Reply:
    """A response sent as one body."""

    def __init__(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}

    async def send(self, send: Send, *, more_body: bool = False) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": encoded(self.headers)})
        await send({"type": "http.response.body", "body": self.body, "more_body": more_body})


def json_reply(value: BaseModel | Mapping[str, Any], status: int = 200) -> Reply:
    if isinstance(value, BaseModel):
        return Reply(value.model_dump_json().encode(), status=status)
    return Reply(dump(value), status=status)


def error_reply(error: ApiError) -> Reply:
    return Reply(dump(error.body()), status=error.status, headers=error.headers)


class EventStream:
    """Server-sent events of a generation in progress.

    Headers are sent with the first event, so an earlier failure still gets its own status code. A later
    failure ends the stream with an error event and without `[DONE]`.
    """

    def __init__(self, generation: Generation, events: AsyncGenerator[Mapping[str, Any], None]) -> None:
        self.generation = generation
        self.events = events

    async def send(self, send: Send) -> None:
        async with self.generation:
            first = await anext(self.events)
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            try:
                async with asyncio.timeout_at(self.generation.deadline + ERROR_GRACE_SECONDS):
                    await send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
                    await self._send_all(send, first)
            except TimeoutError:
                raise ApiError(
                    408, "the client did not read its reply before the deadline", reason="slow_client"
                ) from None

    async def _send_all(self, send: Send, first: Mapping[str, Any]) -> None:
        await _send_event(send, first)
        try:
            async for event in self.events:
                await _send_event(send, event)
        except ApiError as error:
            await _send_event(send, error.body())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_event(send: Send, event: Mapping[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: " + dump(event) + b"\n\n", "more_body": True})


def dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
