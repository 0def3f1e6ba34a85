"""Where every request passes: key and size are checked, the client is watched, the outcome is logged."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Coroutine
from typing import Any
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from skim.config import ServerConfig, parse_bytes
from skim.errors import SkimError
from skim.server.errors import ApiError, ClientGone, from_skim
from skim.server.logs import RequestLog
from skim.server.metrics import Metrics
from skim.server.reply import error_reply

log = logging.getLogger(__name__)

DISCARD_SECONDS = 5.0  # for what a client still sends of a body that is not wanted


class Front:
    """The ASGI application: a router with the same beginning and end for every request."""

    def __init__(self, router: Router, config: ServerConfig, metrics: Metrics) -> None:
        self._router = router
        self._api_key = config.api_key
        self._admin_key = config.admin_key
        self._max_body = parse_bytes("max_body_size", config.max_body_size)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        line = RequestLog(id=uuid4().hex[:24], method=scope["method"], path=scope["path"])
        scope.update({"app": self, "skim.log": line})
        body = CountedBody(receive, self._max_body)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"].append((b"x-request-id", line.id.encode()))
            await send(message)

        try:
            self._check_key(scope)
            body.check_announced(scope)
            await self._router(scope, body.receive, watched_send)
        except ClientGone:
            line.fail("disconnected")
        except asyncio.CancelledError:
            line.fail("shutdown")
            raise
        except Exception as raised:
            error = _as_api_error(raised)
            line.fail(error.reason, error.message)
            if error.status == 500:
                log.error("request %s failed", line.id, exc_info=raised)
            if line.status is None:
                await error_reply(error).send(watched_send, more_body=True)
                await body.discard()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if line.failure is not None:
                self._metrics.failed(line.failure)
            line.write()

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if path == "/health":
            return
        key = _bearer(scope)
        if path.startswith("/admin/"):
            if self._admin_key is None:
                raise _refused(403, "admin routes are off; start the server with --admin-key", "admin_off")
            if not _same(key, self._admin_key):
                known = self._api_key is not None and _same(key, self._api_key)
                raise _refused(403 if known else 401, "this route needs the admin key", "invalid_api_key")
        elif self._api_key is not None and not _same(key, self._api_key):
            raise _refused(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", "invalid_api_key"
            )


class CountedBody:
    """A request's body as it comes in, up to a size."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._taken = 0
        self._complete = False

    def check_announced(self, scope: Scope) -> None:
        """Refuse a body by its Content-Length, before any of it is read."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._limit:
            raise self._too_large(str(int(announced)))

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._taken += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._taken > self._limit:
                raise self._too_large(f"over {self._limit}")
        return message

    async def discard(self) -> None:
        """Read on without keeping: a client that is cut off while sending never sees the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._complete:
                    message = await self._receive()
                    self._complete = not message.get("more_body", False)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; this server takes at most {self._limit} (--max-body-size)",
            code="body_too_large",
            reason="too_large",
        )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless the client hangs up first: then it is cancelled."""
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        leaving.cancel()
        doing.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, timeout: float) -> bytes:
    """All of a body, within the time a request may take."""
    parts = []
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout", reason="timeout") from None


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SkimError):
        return from_skim(error)
    if isinstance(error, HTTPException):
        what = "no such route" if error.status_code == 404 else error.detail
        known = ApiError(error.status_code, what, reason="no_route")
        known.headers = dict(error.headers or {})
        return known
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error", reason="internal")


def _bearer(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    return bytes(key.strip()) if scheme.lower() == b"bearer" else b""


def _same(given: bytes, key: str) -> bool:
    """In the same time wherever they differ."""
    return hmac.compare_digest(given, key.encode())


def _refused(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, code=code, reason="unauthorized")
