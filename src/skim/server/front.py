"""The ASGI application around the routes: checks key and body size, detects disconnects, logs the outcome."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Coroutine
from typing import Any
from uuid import uuid4

from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from skim.config import ServerConfig, parse_bytes
from skim.errors import MoveError, shown
from skim.server import pages
from skim.server.body import BodyRoom, IncomingBody
from skim.server.errors import ApiError, ClientDisconnected, as_api_error
from skim.server.logs import RequestLog
from skim.server.messages.replies import error_body as message_error
from skim.server.metrics.registry import Metrics
from skim.server.origin import HostCheck
from skim.server.reply import error_reply

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", *pages.PATHS)
"""Paths that need no key."""
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")
MOST_NAMED = 1000
"""Ignored fields that the log names before it stops: clients choose their names."""


class Front:
    """The ASGI application: the router, with authentication, error handling and logging for every request."""

    def __init__(self, router: Router, config: ServerConfig, metrics: Metrics) -> None:
        self._router = router
        self._api_key = config.api_key
        self._admin_key = config.admin_key
        self._hosts = HostCheck(config)
        self._max_body = parse_bytes("max_body_size", config.max_body_size)
        self._room = BodyRoom(parse_bytes("max_body_memory", config.max_body_memory))
        self._metrics = metrics
        self._named: set[str] = set()  # ignored fields that the log has named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        line = RequestLog(id=_request_id(scope), method=scope["method"], path=scope["path"])
        body = IncomingBody(scope, receive, self._max_body, self._room)
        scope.update({"app": self, "skim.log": line, "skim.body": body})

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"] += [(name, line.id.encode()) for name in _id_headers(line.path)]
                if line.ignored:
                    names = ", ".join(sorted(line.ignored)).encode("latin-1")
                    message["headers"].append((b"x-skim-ignored", names))
            await send(message)

        try:
            self._check_key(scope)
            if scope["path"] != "/health":
                self._hosts.check(scope["headers"])
            body.check_announced()
            await self._router(scope, body.receive, watched_send)
        except ClientDisconnected:
            line.fail("disconnected")
        except asyncio.CancelledError:
            line.fail("shutdown")
            raise
        except Exception as raised:
            error = as_api_error(raised, f"{line.method} {shown(line.path, quoted=False)}")
            line.fail(error.reason, error.message)
            if error.status == 500 and not isinstance(raised, MoveError):  # the reason says it all
                log.error("request %s failed", line.id, exc_info=raised)
            if line.status is None:
                await error_reply(error, _error_body(error, line)).send(watched_send, more_body=True)
                await body.discard()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            body.release()
            if line.failure is not None:
                self._metrics.failed(line.failure)
            self._name_ignored(line)
            line.write()

    def _name_ignored(self, line: RequestLog) -> None:
        """Log each ignored field once, with the first request that has it."""
        new = line.ignored - self._named
        if new and len(self._named) < MOST_NAMED:
            self._named |= new
            line.fields["ignored"] = sorted(new)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return
        key = _key_of(scope)
        if path.startswith("/admin/"):
            if self._admin_key is None:
                raise _auth_error(403, "admin routes are off; start the server with --admin-key", "admin_off")
            if not _keys_equal(key, self._admin_key):
                known = self._api_key is not None and _keys_equal(key, self._api_key)
                raise _auth_error(403 if known else 401, "this route needs the admin key", "invalid_api_key")
        elif self._api_key is not None and not _keys_equal(key, self._api_key):
            raise _auth_error(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                "invalid_api_key",
            )


async def run_unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. If the client disconnects first, cancel it and raise `ClientDisconnected`."""
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        disconnecting.cancel()
        working.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _key_of(scope: Scope) -> bytes:
    """The key in `Authorization`, as OpenAI's clients send it, or in `x-api-key`, as Anthropic's do."""
    headers = dict(reversed(scope["headers"]))  # the first of each name
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return bytes(key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip())


def _request_id(scope: Scope) -> str:
    """The client's `X-Request-Id`, or a new one if it has none that is fit for headers, logs and replies."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _CLIENT_ID.fullmatch(given) else uuid4().hex[:24]


def _is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _id_headers(path: str) -> tuple[bytes, ...]:
    """Headers with the request's id; Anthropic's clients have their own."""
    return (b"x-request-id", b"request-id") if _is_anthropic(path) else (b"x-request-id",)


def _error_body(error: ApiError, line: RequestLog) -> dict[str, Any]:
    """The error in the shape of the route's protocol."""
    return message_error(error, line.id) if _is_anthropic(line.path) else error.body()


def _keys_equal(given: bytes, key: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, key.encode())


def _auth_error(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, code=code, reason="unauthorized")
