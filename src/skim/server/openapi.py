"""Builds `/openapi.json` from the routes and the pydantic models of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from skim.config import ServerConfig
from skim.server.endpoint import Endpoint
from skim.server.protocol.replies import ErrorResponse
from skim.version import __version__

_ERRORS = {
    400: "The request is malformed, or can never be served.",
    401: "The key is missing or wrong.",
    403: "The key is not the admin key, admin routes are off, or the Host or Origin is not allowed.",
    404: "No such model, route or stored response.",
    408: "The request took longer than the server allows.",
    409: "Requests are running, and the call is not to wait for them, or has waited for too long.",
    413: "The body is larger than the server allows.",
    415: "The body is not announced as `application/json`.",
    429: "Too many requests are waiting; retry after `Retry-After` seconds.",
    431: "The URL and headers are larger than the server allows.",
    500: "The engine failed this request.",
    503: "The model is loading or parked, the server is shutting down, the engine is stalled or dead, or "
    "there is no room for the body or the connection. `Retry-After` says when to try again, if it is there.",
}
_EVERYWHERE = (431,)  # answered before the route is known
_PLACEHOLDER = re.compile(r"\{(\w+)")
_REFERENCE = "#/components/schemas/{model}"


def describe(endpoints: Iterable[Endpoint], config: ServerConfig, model_name: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints, including this server's limits."""
    endpoints = list(endpoints)
    models: dict[tuple[type[BaseModel], str], None] = {(ErrorResponse, "serialization"): None}
    for endpoint in endpoints:
        models[endpoint.error, "serialization"] = None
        if endpoint.body is not None:
            models[endpoint.body, "validation"] = None
        if isinstance(endpoint.reply, type):
            models[endpoint.reply, "serialization"] = None
    references, definitions = models_json_schema(list(models), ref_template=_REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path.replace(":path", ""), {})[endpoint.method.lower()] = _operation(
            endpoint, references
        )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Skim", "version": __version__},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    _apply_limits(definitions["$defs"], config, model_name)
    keys = {"key": config.api_key, "admin": config.admin_key}
    schemes: dict[str, Any] = {}
    for name in (name for name, key in keys.items() if key is not None):
        schemes[name] = {"type": "http", "scheme": "bearer"}
        schemes[f"{name}_header"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    document["components"]["securitySchemes"] = schemes
    for path, operations in paths.items():
        scheme = "admin" if path.startswith("/admin/") else "key"
        needs_key = keys[scheme] is not None and path != "/health"
        needed: list[Any] = [{scheme: []}, {f"{scheme}_header": []}] if needs_key else []
        for operation in operations.values():
            operation["security"] = needed
    return document


def _operation(endpoint: Endpoint, references: Any) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    if isinstance(endpoint.reply, type):
        content = {"application/json": {"schema": references[endpoint.reply, "serialization"]}}
        if endpoint.streams:
            content["text/event-stream"] = {}
        success["content"] = content
    else:
        success["content"] = {endpoint.reply: {}}
    responses: dict[str, Any] = {"200": success}
    for status in sorted({*endpoint.errors, *_EVERYWHERE}):
        shape = ErrorResponse if status in _EVERYWHERE else endpoint.error
        content = {"application/json": {"schema": references[shape, "serialization"]}}
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    if endpoint.path == "/health":
        responses["503"] = {**success, "description": "Not ready; `status` gives the reason."}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": not endpoint.bodiless,
            "content": {"application/json": {"schema": references[endpoint.body, "validation"]}},
        }
    if names := _PLACEHOLDER.findall(endpoint.path):
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    return operation


def _apply_limits(definitions: dict[str, Any], config: ServerConfig, model_name: str) -> None:
    """Write this server's limits into the request schemas."""
    for name, definition in definitions.items():
        fields = definition.get("properties", {})
        if not name.endswith("Request"):
            continue
        for variant in _variants(fields.get("model")):
            if variant.get("type") == "string":
                variant["enum"] = [model_name]
        for field, kind, limits in (
            ("n", "integer", {"maximum": config.max_n}),
            ("stop", "string", {"maxLength": config.max_stop_length}),
            ("stop", "array", {"maxItems": config.max_stop_strings}),
            ("stop_token_ids", "array", {"maxItems": config.max_stop_strings}),
            ("logit_bias", "object", {"maxProperties": config.max_logit_bias}),
            ("allowed_token_ids", "array", {"maxItems": config.max_logit_bias}),
            ("bad_words", "array", {"maxItems": config.max_logit_bias}),
            ("best_of", "integer", {"maximum": config.max_n}),
            ("documents", "array", {"maxItems": config.max_documents}),
        ):
            for variant in _variants(fields.get(field)):
                if variant.get("type") == kind:
                    variant.update(limits)
                    if field == "stop" and kind == "array":
                        variant["items"]["maxLength"] = config.max_stop_length


def _variants(field: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if field is None else field.get("anyOf", [field])
