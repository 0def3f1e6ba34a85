"""JSON types of parameters that are written as text, from the schema of a tool. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})

_NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "deprecated"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have. A schema that does not say is for a string, as peers have it."""
    if not isinstance(schema, Mapping) or depth > 8:
        return STRING
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return types_of(found, root, depth + 1)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list) and given:
        return frozenset(map(str, given))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            return frozenset().union(*(types_of(one, root, depth + 1) for one in options))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const", "")]
    return frozenset(map(_type, values)) or STRING


def typed(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as one of its types if the text is one, otherwise as a string."""
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = _type(json.loads(written))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return written
    return json.dumps(text, ensure_ascii=False)


def choices_of(schema: Any) -> list[str] | None:
    """The texts that a string may be, if the schema lists them."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("enum", [schema.get("const")]), list):
        return None
    values = schema.get("enum", [schema.get("const")])
    return list(values) if values and all(isinstance(one, str) for one in values) else None


def is_closed(schema: Mapping[str, Any], forbidden: str) -> bool:
    """True if a call can be enforced value by value: known keys, and strings of any text or a given choice.

    `forbidden` are characters that keys and choices may not have.
    """
    allowed = {"type", "properties", "required", "additionalProperties", "$defs"} | _NOTES
    properties = schema.get("properties", {})
    if set(schema) - allowed or not isinstance(properties, Mapping):
        return False
    if not set(schema.get("required", ())) <= set(properties):
        return False
    for key, given in properties.items():
        texts = [key, *(choices_of(given) or ())]
        if not key or any(set(text) & set(forbidden) for text in texts):
            return False
        types = types_of(given, schema)
        plain = isinstance(given, Mapping) and not set(given) - {"type", "enum", "const"} - _NOTES
        if "string" in types and not (types == STRING and plain):
            return False
    return True


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
