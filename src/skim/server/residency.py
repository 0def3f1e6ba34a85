"""`/admin/park` and `/admin/unpark`: weights leave the device and come back at an administrator's word.

A park waits until no request runs, and refuses new ones meanwhile. It holds until an unpark: `--idle-park`
and the policy do not undo it. Keys and values stay in the KV pool.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, Any, Literal

from pydantic import Field

from skim.engine.turns import ROLES
from skim.server.endpoint import Call, Endpoint
from skim.server.protocol import StrictBody
from skim.server.protocol.state import Residency
from skim.server.reply import Reply, json_reply

MOST_SECONDS = 86_400
"""Longest `timeout` of a park: a day."""
ERRORS = (400, 401, 403, 413, 415, 500, 503)

Models = Annotated[list[Literal["target", "drafter"]], Field(min_length=1, max_length=2)]


class UnparkRequest(StrictBody):
    """Models to bring to the device."""

    models: Models | None = Field(default=None, description="`target`, `drafter` or both. Default: all.")


class ParkRequest(StrictBody):
    """Models to move off the device, and how."""

    models: Models | None = Field(default=None, description="`target`, `drafter` or both. Default: all.")
    to: Literal["parked", "released"] | None = Field(
        default=None,
        description="`parked` keeps the weights in host memory, `released` on disk only. A model on a CPU is "
        "on disk in both. Default: `parked`.",
    )
    wait: bool | None = Field(
        default=None, description="False answers 409 at once if requests are running. Default: wait for them."
    )
    timeout: Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Seconds to wait for running requests, then 409. Default: `request_timeout`.",
    )


async def post_park(call: Call) -> Reply:
    body: ParkRequest = call.body
    service = call.service
    parked = service.llm.engine.parks.park(
        body.models or ROLES,
        to=body.to or "parked",
        wait=body.wait is not False,
        timeout=body.timeout or service.config.request_timeout,
    )
    return await _moved(call, parked)


async def post_unpark(call: Call) -> Reply:
    return await _moved(call, call.service.llm.engine.parks.unpark(call.body.models or ROLES))


async def _moved(call: Call, move: Future[Any]) -> Reply:
    """Wait for the engine to move models, and answer with their places.

    A client that disconnects withdraws a park that still waits for requests.
    """
    await asyncio.wrap_future(move)
    found = Residency.of(call.service.llm.engine.stats())
    call.log.fields.update({one.role: one.place for one in found.models})
    return json_reply(found)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/admin/park",
        "Move models off the device, once no request runs",
        post_park,
        Residency,
        ParkRequest,
        (*ERRORS, 409),
        bodiless=True,
    ),
    Endpoint(
        "POST",
        "/admin/unpark",
        "Bring models back to the device",
        post_unpark,
        Residency,
        UnparkRequest,
        ERRORS,
        bodiless=True,
    ),
)
