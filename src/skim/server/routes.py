"""The one list of routes: path, request model, response model and handler."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from skim.server import checkpoints, pages, residency, tokenizer
from skim.server.body import SMALL_BODY, IncomingBody
from skim.server.chat import chat
from skim.server.completions import complete
from skim.server.endpoint import GENERATION_ERRORS, Call, Endpoint
from skim.server.front import run_unless_disconnected
from skim.server.logs import RequestLog
from skim.server.messages import route as messages
from skim.server.origin import check_json
from skim.server.parse import parse_body
from skim.server.protocol import replies, requests, state
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.responses import route as responses
from skim.server.retrieval import route as retrieval
from skim.server.service import Service
from skim.version import __version__

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"
ALIVE = ("ok", "parking", "parked")
"""Statuses for which `/health` answers 200. To restart a parked server would undo the park."""


async def post_chat(call: Call) -> Reply | EventStream:
    return await chat(call.service, call.body, call.log)


async def post_completion(call: Call) -> Reply | EventStream:
    return await complete(call.service, call.body, call.log)


async def get_models(call: Call) -> Reply:
    return json_reply(replies.ModelList(data=[_card(call.service)]))


async def get_model(call: Call) -> Reply:
    call.service.check_model(call.path["model"])
    return json_reply(_card(call.service))


def _card(service: Service) -> replies.ModelCard:
    window = service.llm.engine.core.max_model_len
    return replies.ModelCard(id=service.model_name, created=service.started_at, max_model_len=window)


async def get_health(call: Call) -> Reply:
    service = call.service
    stats = service.stats()
    prefill = state.PrefillStats.model_validate(stats.prefill) if stats is not None else None
    status, problem = service.condition
    kv = state.KVStats.model_validate(stats.pool) if stats is not None else None
    kept = stats.checkpoints if stats is not None else None
    checkpoints = state.CheckpointStats.model_validate(kept) if kept is not None else None
    decode = replies.DecodeStats.model_validate(stats.decode) if stats is not None else None
    weights = state.WeightStats.model_validate(stats.weights[0]) if stats is not None else None
    health = state.Health(
        status=status,
        reason=problem,
        prefill=prefill,
        kv=kv,
        checkpoints=checkpoints,
        decode=decode,
        weights=weights,
        residency=state.Residency.of(stats) if stats is not None else None,
    )
    return json_reply(health, status=200 if health.status in ALIVE else 503)


async def get_metrics(call: Call) -> Reply:
    return Reply(call.service.metrics.render(), content_type=METRICS_TYPE)


async def get_version(call: Call) -> Reply:
    return json_reply(replies.Version(version=__version__))


async def get_stats(call: Call) -> Reply:
    stats = call.service.llm.engine.stats()
    return json_reply(state.Stats.model_validate(stats))


async def post_reset(call: Call) -> Reply:
    freed = await call.service.off_loop(call.service.llm.engine.reset_prefix_cache, 0)
    return json_reply(replies.ResetResponse(freed_blocks=freed))


ENDPOINTS = (
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *checkpoints.ENDPOINTS,
    *residency.ENDPOINTS,
    *retrieval.ENDPOINTS,
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "Reply to a conversation",
        post_chat,
        replies.ChatResponse,
        requests.ChatRequest,
        GENERATION_ERRORS,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        "Continue a text",
        post_completion,
        replies.CompletionResponse,
        requests.CompletionRequest,
        GENERATION_ERRORS,
        streams=True,
    ),
    Endpoint(
        "GET", "/v1/models", "List the served model", get_models, replies.ModelList, errors=(401, 403, 503)
    ),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        "Describe a model",
        get_model,
        replies.ModelCard,
        errors=(401, 403, 404, 503),
    ),
    *tokenizer.ENDPOINTS,
    Endpoint("GET", "/health", "Server status; needs no key", get_health, state.Health),
    Endpoint("GET", "/metrics", "Prometheus metrics", get_metrics, "text/plain", errors=(401, 403)),
    Endpoint("GET", "/version", "Skim's version", get_version, replies.Version, errors=(401, 403)),
    Endpoint("GET", "/admin/stats", "Engine counters", get_stats, state.Stats, errors=(401, 403, 503)),
    Endpoint(
        "POST",
        "/admin/reset_prefix_cache",
        "Clear the prefix cache",
        post_reset,
        replies.ResetResponse,
        errors=(401, 403, 503),
    ),
)


def router(service: Service, document: dict[str, Any]) -> Router:
    routes = [
        Route(endpoint.path, _Handler(service, endpoint), methods=[endpoint.method]) for endpoint in ENDPOINTS
    ]

    async def openapi(call: Call) -> Reply:
        return json_reply(document)

    async def home(call: Call) -> Reply:
        model = service.model_name if service.config.api_key is None else None
        return pages.home(document, model, service.condition[0])

    listing = pages.docs(document)

    async def docs(call: Call) -> Reply:
        return listing

    own = (
        Endpoint("GET", "/openapi.json", "This document", openapi, "application/json", errors=(401, 403)),
        Endpoint("GET", "/", "What is served", home, "text/html"),
        Endpoint("GET", "/docs", "The routes as a page", docs, "text/html"),
    )
    return Router([*routes, *(Route(one.path, _Handler(service, one), methods=["GET"]) for one in own)])


class _Handler:
    """ASGI application of one endpoint: reads and validates the body, then runs the handler."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(scope)
        call = Call(self._service, body, scope["skim.log"], scope["path_params"])

        async def answer() -> None:
            reply = await self._endpoint.handle(call)
            await reply.send(send)

        await run_unless_disconnected(receive, answer())

    async def _body(self, scope: Scope) -> BaseModel | None:
        """The checked body. Its bytes are only kept in this method, so they are freed with its room."""
        model, config = self._endpoint.body, self._service.config
        incoming: IncomingBody = scope["skim.body"]
        if model is not None and not self._endpoint.bodiless:
            check_json(scope["headers"])
        incoming.check_announced(SMALL_BODY if model is None else None)
        raw = await incoming.read(min(config.body_timeout, config.request_timeout))
        if self._endpoint.bodiless:
            if raw:
                check_json(scope["headers"])
            else:
                raw = bytearray(b"{}")
        log: RequestLog = scope["skim.log"]
        log.size = len(raw)
        body = None
        if model is not None:
            parse = partial(parse_body, model, raw, config)
            body, ignored = await self._service.on_text(parse, len(raw))
            log.ignored.update(ignored)
        incoming.release()
        return body
