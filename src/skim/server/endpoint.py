"""A route as data: path, request model, response model and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from skim.server.logs import RequestLog
from skim.server.protocol.replies import ErrorResponse
from skim.server.reply import EventStream, Reply
from skim.server.service import Service

GENERATION_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
TEXT_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 503)


@dataclass(frozen=True)
class Call:
    """One request, as handlers receive it."""

    service: Service
    body: Any  # an instance of the endpoint's body model
    log: RequestLog
    path: dict[str, str]


@dataclass(frozen=True)
class Endpoint:
    """A route. `reply` is the model of a JSON response, or the content type of any other."""

    method: str
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[Reply | EventStream]]
    reply: type[BaseModel] | str
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    streams: bool = False
    bodiless: bool = False  # True if an empty body stands for `{}`
    error: type[BaseModel] = ErrorResponse  # the shape of its errors
