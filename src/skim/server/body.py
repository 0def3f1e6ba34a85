"""Receives request bodies: up to `max_body_size` each, `max_body_memory` in all, within `body_timeout`."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Message, Receive, Scope

from skim.server.errors import ApiError, ClientDisconnected

SMALL_BODY = 64 * 1024
"""Bytes. Up to here a body always finds room, and parsing on the event loop is faster than in a thread."""
DISCARD_SECONDS = 5.0  # longest time spent reading the rest of a refused body


class BodyRoom:
    """The memory for bodies that are being received and parsed, without the first `SMALL_BODY` of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    def take(self, count: int) -> None:
        if self.used + count > self.size:
            raise ApiError(
                503,
                f"large bodies of other requests fill this server's {self.size} bytes for them "
                "(--max-body-memory); try again",
                code="no_room_for_body",
                reason="no_room",
                retry_after=1,
            )
        self.used += count


class IncomingBody:
    """The body of one request. `release` must be called in the end."""

    def __init__(self, scope: Scope, receive: Receive, limit: int, room: BodyRoom) -> None:
        found = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._announced = int(found) if found.isdigit() else 0
        self._receive = receive
        self._limit = limit
        self._room = room
        self._taken = 0  # from the room
        self._received = 0
        self._complete = False

    def check_announced(self, limit: int | None = None) -> None:
        """Refuse a body by its Content-Length, before reading any of it. A `limit` lowers the server's."""
        self._limit = min(self._limit, limit if limit is not None else self._limit)
        if self._announced > self._limit:
            raise self._too_large(str(self._announced))

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._received > self._limit:
                raise self._too_large(f"over {self._limit}")
            needed = self._received - SMALL_BODY - self._taken
            if needed > 0:
                self._room.take(needed)
                self._taken += needed
        return message

    async def read(self, timeout: float) -> bytearray:
        """Read the whole body within `timeout` seconds."""
        raw = bytearray()
        try:
            async with asyncio.timeout(timeout):
                while not self._complete:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    raw += message.get("body", b"")
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout:g} seconds (--body-timeout)",
                code="timeout",
                reason="timeout",
            ) from None
        finally:
            if not self._complete:
                raw.clear()  # the error's traceback keeps it while the rest is discarded
        return raw

    def release(self) -> None:
        """Give back the room: the body was parsed or dropped. Idempotent."""
        self._room.used -= self._taken
        self._taken = 0

    async def discard(self) -> None:
        """Read and drop the rest of the body. A client cut off while sending would never see the error."""
        self.release()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._complete:
                    message = await self._receive()
                    self._complete = not message.get("more_body", False)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; at most {self._limit} are accepted here (--max-body-size)",
            code="body_too_large",
            reason="too_large",
        )
