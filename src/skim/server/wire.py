"""uvicorn's HTTP protocol, with limits for what a client may send before the application sees it.

A request head has at most `max_header_size` bytes and `header_timeout` seconds. At most `max_connections` are
open. A new one then takes the place of the connection that has kept the server waiting longest for bytes, so
clients that send nothing, or half a request, cannot keep others out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from skim.server.errors import ApiError
from skim.server.reply import Reply, encoded, error_reply

log = logging.getLogger(__name__)

ACCEPTS = 64
"""Most connections that the event loop accepts at once. asyncio accepts before it opens any of them."""
RESERVED_FILES = 4 * ACCEPTS  # open files left for accepting, and for everything but connections
FRAMING = 8  # most bytes of chunk headers for each byte of a body
QUIET_SECONDS = 10.0  # between two log lines about connections that could not be accepted


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    except (ValueError, OSError):  # macOS announces no limit, and refuses to set it
        return soft


def most_connections(wanted: int, files: int) -> int:
    """The connections that a limit of open files leaves room for, at most `wanted`."""
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(files - RESERVED_FILES, files // 2)))


@dataclass
class Crowd:
    """The open connections of a server and their limits."""

    max_connections: int
    max_header_size: int
    header_timeout: float
    count: Callable[[str], None]
    """Called with the reason whenever a connection or a head is refused."""
    waiting: dict[Wire, None] = field(default_factory=dict)
    """Connections that must send something next, the longest wait first."""

    def make_room(self, connections: int) -> bool:
        """Close the longest-waiting connection if there are too many. False if all have work to do."""
        if connections <= self.max_connections:
            return True
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        self.count("connections")
        oldest.drop()
        return True


class Wire(HttpToolsProtocol):
    """One connection."""

    def __init__(self, crowd: Crowd, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._crowd = crowd
        self._in_head = True  # of the next request, also before its first byte
        self._began_now = False  # a request began in the bytes that are being parsed
        self._head_size = 0
        self._fed = 0  # bytes of this request, without the first that arrived with its beginning
        self._body = 0
        self._late: asyncio.TimerHandle | None = None

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._crowd.make_room(len(self.connections)):
            self._refuse(503, f"all {self._crowd.max_connections} connections are in use", "connections")
            return
        self._crowd.waiting[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.waiting.pop(self, None)
        self._head_came()
        self._unset_keepalive_if_required()  # type: ignore[no-untyped-call, unused-ignore]
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once. Bytes that are not sent yet are lost."""
        self._crowd.waiting.pop(self, None)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._began_now = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._began_now:
            self._fed += len(data)
            if self._fed > self._crowd.max_header_size + (1 + FRAMING) * self._body:
                self._refuse_head()
                return
        if self._in_head and self._is_free():
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_free() and self.cycle.more_body:
            self.transport.close()  # the rest of the body is not read
        elif self._is_free() or self.cycle.more_body:  # of the next request, which may have come already
            self._crowd.waiting[self] = None

    # -- the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._began_now = True
        self._head_size = self._fed = self._body = 0
        if self._is_free():
            self._crowd.waiting.setdefault(self)

    def on_url(self, url: bytes) -> None:
        self._head_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored
            self._head_size += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_came()
        app = self.app
        if self._head_size > self._crowd.max_header_size:
            self._crowd.count("headers")
            self.app = _answer(self._too_large())  # type: ignore[assignment]
        super().on_headers_complete()
        self.app = app

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        if not self._is_free():
            self._crowd.waiting.pop(self, None)
        super().on_message_complete()

    # -- limits

    def _is_free(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._crowd.header_timeout, self._head_is_late)

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self._late = None
        seconds = self._crowd.header_timeout
        self._refuse(
            408,
            f"the request's headers did not arrive within {seconds:g} seconds (--header-timeout)",
            "headers",
        )

    def _too_large(self) -> ApiError:
        limit = self._crowd.max_header_size
        return ApiError(
            431, f"the request's headers exceed {limit} bytes (--max-header-size)", reason="headers"
        )

    def _refuse_head(self) -> None:
        error = self._too_large()
        self._refuse(error.status, error.message, error.reason)

    def _refuse(self, status: int, message: str, reason: str) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        self._crowd.waiting.pop(self, None)
        self._crowd.count(reason)
        if self._is_free() and not self.transport.is_closing():
            self.transport.write(_written(error_reply(ApiError(status, message, reason=reason))))
            self.transport.close()
        else:
            self.transport.abort()


def _answer(error: ApiError) -> Callable[[Scope, Receive, Send], Any]:
    """An application that answers every request with this error and closes the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        error.headers["connection"] = "close"
        await error_reply(error).send(send)

    return app


def _written(reply: Reply) -> bytes:
    headers = encoded({**reply.headers, "connection": "close"})
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[reply.status] + lines + b"\r\n" + reply.body


class AcceptErrors:
    """Exception handler of the event loop: a line in 10 seconds about connections that are not accepted.

    asyncio reports each attempt with a traceback, which filled disks.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET_SECONDS
            log.error("cannot accept connections: %s; raise `ulimit -n`", error.strerror)
