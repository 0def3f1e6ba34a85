"""From the bytes of a request body to a checked model, in bounded time and memory. Pure functions.

Parsing and validation hold the interpreter's lock, so no thread runs beside them. They therefore never see a
body of more than `max_body_values` values, and the first errors end them.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from skim.config import ServerConfig
from skim.server.errors import ApiError, from_validation
from skim.server.protocol import Checking

Model = TypeVar("Model", bound=BaseModel)

OBJECT_VALUES = 16  # an object takes about as long as this many numbers
_SLICE = 256 * 1024  # bytes; counting a slice takes a few milliseconds
_BACKSLASH = ord("\\")


def parse_body(
    model: type[Model], raw: bytes | bytearray, config: ServerConfig
) -> tuple[Model, frozenset[str]]:
    """The checked request in a body, and the names of the fields that were ignored. Raises `ApiError`."""
    if has_more_values(raw, config.max_body_values):
        raise ApiError(
            400,
            f"the body has more than {config.max_body_values} values; send fewer list items and objects, or "
            "raise the server's --max-body-values",
            code="too_many_values",
        )
    if not raw.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        value = from_json(raw, cache_strings="keys")
    except ValueError as error:
        why = f"the body is not valid JSON: {error}"
        if "hex escape" in str(error):
            why += "; an escape from \\ud800 to \\udfff must be one of a pair"
        raise ApiError(400, why, code="invalid_json") from None
    checking = Checking(config)
    return validated(model, value, checking), frozenset(checking.ignored)


def validated(model: type[Model], value: Any, checking: Checking) -> Model:
    """A checked request of JSON data. Raises `ApiError`."""
    try:
        return model.model_validate(value, context=checking)
    except ValidationError as error:
        raise from_validation(error) from None


def has_more_values(raw: bytes | bytearray, limit: int) -> bool:
    """True if a JSON text has more than `limit` values, where an object counts as `OBJECT_VALUES`.

    Exact for valid JSON. Text that is not JSON is counted up to its first error at least as high as a parser
    would, so it cannot hide values from the limit.
    """
    if _count(raw) <= limit:  # strings included: the usual case
        return False
    values, start, inside = 0, 0, False
    while start < len(raw) and values <= limit:
        end = start + _SLICE
        while end < len(raw) and raw[end - 1] == _BACKSLASH:
            end += 1  # do not cut an escape
        plain = raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        segments = plain.split(b'"')
        values += _count(b"".join(segments[inside::2]))  # every second segment is a string
        inside ^= len(segments) % 2 == 0
        start = end
    return values > limit


def _count(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + OBJECT_VALUES * text.count(b"{")
