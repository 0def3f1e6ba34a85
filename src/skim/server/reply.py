"""HTTP responses: a JSON body, an error, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.types import Send

from skim.engine.tracking import Progress
from skim.server.errors import ApiError, as_api_error
from skim.server.generation import Generation
from skim.server.protocol.replies import SkimProgress

ERROR_GRACE_SECONDS = 2.0  # after the deadline, to send the error event
PROGRESS_SECONDS = 0.25  # shortest time between two progress events

Event = Mapping[str, Any]


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


def error_reply(error: ApiError, body: Mapping[str, Any] | None = None) -> Reply:
    """The response to a failed request: OpenAI's error object, or the `body` of another protocol."""
    return Reply(dump(body or error.body()), status=error.status, headers=error.headers)


class Framing(Protocol):
    """How a protocol writes the events of a stream."""

    @property
    def end(self) -> bytes: ...  # after the last event
    def event(self, event: Event) -> bytes: ...
    def error(self, error: ApiError) -> bytes: ...
    def silence(self, progress: Progress) -> bytes:
        """Sent after `keepalive` seconds without an event."""


class DataFraming:
    """OpenAI's chunks: data without an event name, `[DONE]` at the end. Comments break the silence."""

    end = b"data: [DONE]\n\n"

    def event(self, event: Event) -> bytes:
        return b"data: " + dump(event) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        return self.event(error.body())

    def silence(self, progress: Progress) -> bytes:
        return f": {progress}\n\n".encode()


DATA: Framing = DataFraming()


def named_event(event: Event) -> bytes:
    """An event that is named by its `type`."""
    return f"event: {event['type']}\ndata: ".encode() + dump(event) + b"\n\n"


class EventStream:
    """Server-sent events of a generation in progress.

    Headers are sent at once, so every failure from here on is an error event, and the last one. After
    `keepalive` seconds of silence the framing breaks it (0: never). With `progress_head`, the fields that all
    chunks share, chunks tell of every change of the progress.
    """

    def __init__(
        self,
        generation: Generation,
        events: AsyncGenerator[Event, None],
        *,
        framing: Framing = DATA,
        keepalive: float = 0.0,
        progress_head: Mapping[str, Any] | None = None,
    ) -> None:
        self.generation = generation
        self.events = events
        self._framing = framing
        self._keepalive = keepalive
        self._progress_head = progress_head
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0

    async def send(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx passes on every chunk at once
        }
        async with self.generation:
            try:
                async with asyncio.timeout_at(self.generation.deadline + ERROR_GRACE_SECONDS):
                    await send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
                    self._sent_at = self._loop.time()
                    await self._send_all(send)
            except TimeoutError:
                raise ApiError(
                    408, "the client did not read its reply before the deadline", reason="slow_client"
                ) from None

    async def _send_all(self, send: Send) -> None:
        try:
            async with self._speaking(send):
                async for event in self.events:
                    await self._send_body(send, self._framing.event(event))
        except Exception as error:
            await self._send_body(send, self._framing.error(as_api_error(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})

    async def _send_body(self, send: Send, body: bytes) -> None:
        self._sent_at = self._loop.time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    @contextlib.asynccontextmanager
    async def _speaking(self, send: Send) -> AsyncIterator[None]:
        """Send comments and progress events beside the chunks. Each is one write, so none is torn."""
        if not self._keepalive and self._progress_head is None:
            yield
            return
        speaking = asyncio.create_task(self._speak(send))
        try:
            yield
        finally:
            speaking.cancel()
            await asyncio.wait({speaking})

    async def _speak(self, send: Send) -> None:
        head, shown = self._progress_head, None
        while True:
            latest = self.generation.progress
            if head is not None and latest != shown:
                shown = latest
                await self._send_body(send, self._framing.event(_progress_chunk(head, latest)))
            silent = self._loop.time() - self._sent_at
            if 0 < self._keepalive <= silent:
                await self._send_body(send, self._framing.silence(latest))
                silent = 0.0
            wait = self._keepalive - silent if self._keepalive else PROGRESS_SECONDS
            await asyncio.sleep(wait if head is None else min(wait, PROGRESS_SECONDS))


def _progress_chunk(head: Mapping[str, Any], latest: Progress) -> Event:
    shown = SkimProgress(phase=latest.phase, computed_tokens=latest.computed, total_tokens=latest.total)
    return {**head, "choices": [], "skim": {"progress": shown.model_dump()}}


def dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
