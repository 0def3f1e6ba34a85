"""Decides the grammar of a reply from the fields of a request. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from skim.config import ServerConfig
from skim.errors import RequestError
from skim.sampling.grammar import Grammar
from skim.server.errors import ApiError
from skim.server.limits import check_schemas
from skim.server.protocol.constraints import (
    ConstraintFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)

Wanted = tuple[str, Any, Callable[[Any], Grammar]]
"""A field, its value, and the function that makes a grammar of it."""

_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.text,
}
_ANY_OBJECT = {"type": "object"}


def constraint_of(request: ConstraintFields, config: ServerConfig) -> Grammar | None:
    """The grammar that a request asks for by any field, or None. Two fields contradict each other."""
    found = list(_wanted(request))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise ApiError(400, f"{names} constrain the reply; give one of them", param=found[1][0])
    [(name, value, make)] = found
    check_schemas([value], name, config)
    try:
        return replace(make(value), asked_by=name)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", fields=name) from error


def _wanted(request: ConstraintFields) -> Iterator[Wanted]:
    yield from _by_format(request.response_format)
    if request.structured_outputs is not None:
        yield from _by_structure(request.structured_outputs)
    for kind, make in _KINDS.items():
        if (value := getattr(request, name := f"guided_{kind}")) is not None:
            yield name, value, make
    if request.grammar:  # llama.cpp's clients send an empty text for none
        yield "grammar", request.grammar, Grammar.text
    if request.json_schema is not None:
        yield "json_schema", request.json_schema, Grammar.json_schema


def _by_format(wanted: Any) -> Iterator[Wanted]:
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
        if schema is None:
            name = "response_format.json_schema"
            raise ApiError(400, f"{name} is required", param=name, code="missing_parameter")
        yield "response_format", schema, Grammar.json_schema
    elif isinstance(wanted, JsonObjectFormat):
        yield "response_format", wanted.schema_ or _ANY_OBJECT, Grammar.json_schema


def _by_structure(given: StructuredOutputs) -> Iterator[Wanted]:
    values = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
    asked = {kind: value for kind, value in values.items() if value is not None}
    if not asked and given.json_object is None:
        name = "structured_outputs"
        raise ApiError(400, f"{name} needs json, regex, choice, grammar or json_object", param=name)
    for kind, value in asked.items():
        yield f"structured_outputs.{kind}", value, _KINDS[kind]
    if given.json_object:
        yield "structured_outputs.json_object", _ANY_OBJECT, Grammar.json_schema
