"""Errors as clients see them: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from skim.errors import (
    BusyError,
    EngineError,
    ParkedError,
    PromptTooLongError,
    RequestError,
    SkimError,
    cut,
    shown,
    with_names,
)
from skim.server.options import SkimOptions
from skim.server.protocol import MISSPELLED, REFUSED, TOO_MANY
from skim.server.protocol.requests import REQUEST_FIELDS
from skim.server.retrieval.requests import RETRIEVAL_FIELDS

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_FIELDS = REQUEST_FIELDS | RETRIEVAL_FIELDS | {"models", "to", "name"}  # the last of routes under `/admin`
_OPTIONS = SkimOptions.model_fields.keys() - _FIELDS
RETURN_SECONDS = 2
"""`Retry-After` while a model is being unparked."""


class ApiError(Exception):
    """Ends a request with this status. `param` is the field at fault, `reason` a label in the metrics."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: str = "invalid",
        retry_after: int | None = None,
    ) -> None:
        message = cut(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.reason = reason
        self.headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


class ClientDisconnected(Exception):
    """The client disconnected, so no answer is sent."""


def as_api_error(error: Exception, asked: str = "") -> ApiError:
    """Any exception as the client sees it. The details of an unexpected one go to the log alone.

    `asked` is the request's method and path, for errors of the router.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SkimError):
        return from_skim(error)
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        message = f"there is no route {asked}; GET /docs lists the routes"
        if error.status_code == 405:
            message = f"there is no route {asked}; this path allows {headers.get('Allow', 'other methods')}"
        api_error = ApiError(error.status_code, message, reason="no_route")
        api_error.headers = headers
        return api_error
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error", reason="internal")


def too_late(seconds: float) -> ApiError:
    """A request took longer than the server's `request_timeout`, in seconds."""
    return ApiError(
        408,
        f"the request took longer than {seconds:g} seconds (--request-timeout)",
        code="timeout",
        reason="timeout",
    )


def from_skim(error: SkimError) -> ApiError:
    """An error of the engine as the client sees it. `param` is the first of its fields that requests have.

    Settings that a request may override go by the names of its options, such as `skim.slow_fast`.
    """
    if isinstance(error, RequestError):
        own = {name: f"skim.{name}" for name in error.fields if name in _OPTIONS}
        fields = [own.get(name, name) for name in error.fields]
        param = next((name for name in fields if name.partition(".")[0] in _FIELDS), None)
        message = with_names(str(error), own)
        if isinstance(error, PromptTooLongError):
            return ApiError(400, message, param=param, code="context_length_exceeded", reason="too_long")
        return ApiError(400, message, param=param)
    if isinstance(error, ParkedError):
        retry = RETURN_SECONDS if error.returning else None
        return ApiError(503, str(error), code="model_parked", reason="parked", retry_after=retry)
    if isinstance(error, BusyError):
        return ApiError(409, str(error), code="busy", reason="busy")
    reason = "error" if isinstance(error, EngineError) else "internal"
    return ApiError(500, str(error), code="engine_error", reason=reason)


def from_validation(error: ValidationError) -> ApiError:
    """The first error in a body. In a union of shapes, the error of the shape that matched furthest.

    That is the deepest error, then the one after most list items, then one about a value rather than a type.
    """
    details = error.errors(include_url=False)
    first = details[0]
    field = first["loc"][0] if first["loc"] else None
    rivals = [detail for detail in details if detail["loc"] and detail["loc"][0] == field] or [first]
    worst = max(rivals, key=_reach)
    name = _path(worst["loc"])
    if worst["type"] in ("extra_forbidden", MISSPELLED):
        parent, field = _path(worst["loc"][:-1]), str(worst["loc"][-1])
        name = shown(f"{parent}.{field}" if parent else field, quoted=False)
        hint = f": {worst['msg']}" if worst["type"] == MISSPELLED else ""
        return ApiError(
            400, f"{name} is not supported{hint or UNKNOWN}", param=name, code="unsupported_parameter"
        )
    if worst["type"] == REFUSED:
        message = f"{name} is not supported: {worst['msg']}"
        return ApiError(400, message, param=name, code="unsupported_parameter")
    if worst["type"] == "union_tag_not_found" and (own := _TAG.fullmatch(worst["ctx"]["discriminator"])):
        name = f"{name}.{own[1]}" if name else own[1]
        return ApiError(400, f"{name} is required", param=name, code="missing_parameter")
    if worst["type"] == "missing":
        return ApiError(400, f"{name} is required", param=name, code="missing_parameter")
    if worst["type"] == TOO_MANY:
        return ApiError(400, f"{name}: {worst['msg']}, got {len(worst['input'])}", param=name)
    if worst["type"] == "union_tag_invalid" and (own := _TAG.fullmatch(worst["ctx"]["discriminator"])):
        name = f"{name}.{own[1]}" if name else own[1]
        message = f"{name} must be one of {worst['ctx']['expected_tags']}, got {shown(worst['ctx']['tag'])}"
        return ApiError(400, message, param=name)
    must = _must(worst, [rival for rival in rivals if _path(rival["loc"]) == _path(worst["loc"])])
    message = f"{name or 'the body'}{' ' if must.startswith('must') else ': '}{must}"
    return ApiError(400, f"{message}, got {shown(worst['input'])}", param=name or None)


_TAG = re.compile(r"'(\w+)'")  # a field's name as pydantic writes it
_OBJECT = {"model_type", "model_attributes_type", "dict_type"}
UNKNOWN = "; GET /docs lists the fields"


def _must(worst: ErrorDetails, rivals: list[ErrorDetails]) -> str:
    """What a value must be: `must be a valid string or an object`, of all shapes that it may have."""
    shapes = [_shape(one) for one in rivals if one["msg"].startswith(_SHOULD)]
    if worst["msg"].startswith(_SHOULD):
        return "must be " + " or ".join(dict.fromkeys(shapes))
    return re.sub(r"^\w+ should (.*?)( after validation, not \d+)?$", r"must \1", worst["msg"])


def _shape(detail: ErrorDetails) -> str:
    if detail["type"] in _OBJECT:
        return "an object"
    words = detail["msg"].removeprefix(_SHOULD)
    return words.partition(", ")[0] if detail["type"].endswith("_parsing") else words


_SHOULD = "Input should be "


def _reach(detail: ErrorDetails) -> tuple[int, list[int], bool]:
    items = [part for part in detail["loc"] if isinstance(part, int)]
    return len(detail["loc"]), items, not detail["type"].endswith("_type")


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`: the names in the body, without those of our types."""
    path = ""
    for index, (before, part) in enumerate(pairwise(("", *loc))):
        if isinstance(part, int):
            path += f"[{part}]"
        elif before in _TAGGED or (isinstance(before, int) and part in _ITEMS and index < len(loc) - 1):
            continue
        elif part.islower() and part.isidentifier() and part not in _SHAPES:
            path += f".{part}" if path else part
        elif not path:
            path = part
    return path


_TAGGED = {"response_format"}  # after these pydantic adds the value's own `type`

# Names that pydantic adds after a list's index: the item's own `type`. They may also be names of fields.
_ITEMS = {
    "message",
    "input_text",
    "output_text",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
} | {
    "text",
    "refusal",
    "document",
    "thinking",
    "tool_use",
    "tool_result",
}

# Names that pydantic adds to a location for the union member it tried.
_SHAPES = {"str", "int", "float", "bool", "list", "dict", "none"} | {
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
}
