"""`/admin/checkpoints`: named prefixes are saved, listed, loaded and removed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field

from skim import checkpoints
from skim.memory.checkpoint import Named
from skim.server.endpoint import Call, Endpoint
from skim.server.protocol import Body
from skim.server.protocol.messages import Messages, for_template
from skim.server.reply import Reply, json_reply

ERRORS = (400, 401, 403, 413, 415, 500, 503)
Salt = Annotated[str, Field(max_length=512)]


class SaveRequest(Body):
    """A conversation or a text that prompts begin with. Its last message may be continued by prompts."""

    name: str
    messages: Messages | None = None
    prompt: str | None = None
    cache_salt: Salt | None = None


class LoadRequest(Body):
    cache_salt: Salt | None = None


class Checkpoint(BaseModel):
    name: str
    model: str
    fingerprint: str
    tokens: int
    bytes: int
    created: float


class CheckpointList(BaseModel):
    data: list[Checkpoint]


class Loaded(BaseModel):
    name: str
    cached_tokens: int


class Removed(BaseModel):
    removed: list[Checkpoint]


async def post_save(call: Call) -> Reply:
    body: SaveRequest = call.body
    messages = None if body.messages is None else [for_template(message) for message in body.messages]
    save = partial(
        checkpoints.save,
        call.service.llm,
        body.name,
        messages=messages,
        prompt=body.prompt,
        cache_salt=body.cache_salt or "",
    )
    return json_reply(_shown(await asyncio.to_thread(save)))


async def get_list(call: Call) -> Reply:
    found = await asyncio.to_thread(call.service.llm.engine.keeper.directory.named)
    return json_reply(CheckpointList(data=[_shown(one) for one in found]))


async def post_load(call: Call) -> Reply:
    name = call.path["name"]
    salt = call.body.cache_salt or ""
    tokens = await asyncio.to_thread(call.service.llm.engine.load_checkpoint, name, salt)
    return json_reply(Loaded(name=name, cached_tokens=tokens))


async def delete(call: Call) -> Reply:
    directory = call.service.llm.engine.keeper.directory
    gone = await asyncio.to_thread(directory.remove, call.path["name"], directory.identity.fingerprint)
    return json_reply(Removed(removed=[_shown(one) for one in gone]))


def _shown(one: Named) -> Checkpoint:
    return Checkpoint.model_validate(one, from_attributes=True)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/admin/checkpoints",
        "Compute the beginning of prompts and save it under a name",
        post_save,
        Checkpoint,
        SaveRequest,
        ERRORS,
    ),
    Endpoint(
        "GET",
        "/admin/checkpoints",
        "List the named checkpoints",
        get_list,
        CheckpointList,
        errors=(400, 401, 403, 503),
    ),
    Endpoint(
        "POST",
        "/admin/checkpoints/{name}/load",
        "Load a checkpoint into the prefix cache",
        post_load,
        Loaded,
        LoadRequest,
        ERRORS,
        bodiless=True,
    ),
    Endpoint(
        "DELETE",
        "/admin/checkpoints/{name}",
        "Remove a checkpoint",
        delete,
        Removed,
        errors=(400, 401, 403, 503),
    ),
)
