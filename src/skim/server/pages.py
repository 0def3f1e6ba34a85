"""Pages for people in a browser: `/` says what is served, `/docs` lists the routes and their fields.

They need no key, because a browser sends none. So the model of a server with a key is not named. A page for
chatting will have its place at `/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from skim.measure.pages import render
from skim.server.reply import Reply
from skim.version import __version__

PATHS = ("/", "/docs")
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxLength": "at most {} characters",
    "maxProperties": "at most {} entries",
}


def home(document: Mapping[str, Any], model: str | None, status: str) -> Reply:
    """The page at `/`. `model` is None if the name is not public."""
    routes = [(route["method"], route["path"], route["summary"]) for route in routes_of(document)]
    return _page("home.html.jinja", model=model, status=status, routes=routes)


def docs(document: Mapping[str, Any]) -> Reply:
    """The page at `/docs`, from the OpenAPI document."""
    schemas = document["components"]["schemas"]
    routes = routes_of(document)
    shown = _reachable(schemas, [route["body"] for route in routes if route["body"]])
    objects = {name: fields_of(schemas[name]) for name in shown}
    errors = dict(sorted((status, words) for route in routes for status, words in route["errors"].items()))
    return _page("docs.html.jinja", routes=routes, objects=objects, errors=errors)


def routes_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every route: method, path, summary, the name of its body's schema, and what its errors mean."""
    found = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            answers = operation["responses"].items()
            found.append(
                {
                    "method": method.upper(),
                    "path": path,
                    "summary": operation["summary"],
                    "body": _name(body["schema"]) if body else None,
                    "errors": {status: one["description"] for status, one in answers if status >= "400"},
                }
            )
    return found


def fields_of(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of an object: name, type in words, names of other objects in it, whether it is required."""
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "type": "text" if name == "model" else in_words(field),
            "objects": list(dict.fromkeys(_names(field))),
            "required": name in required,
            "help": field.get("description", ""),
        }
        for name, field in schema.get("properties", {}).items()
    ]


def in_words(schema: Mapping[str, Any]) -> str:
    """A field's type: `list of integer (at least 0), or text`."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return ", or ".join(dict.fromkeys(in_words(one) for one in options if one.get("type") != "null"))
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return f"“{schema['const']}”"
    kind = {"string": "text", "array": "list", "boolean": "true or false"}.get(
        schema.get("type", "any value"), schema.get("type", "any value")
    )
    if kind == "list":
        kind += f" of {in_words(schema.get('items', {}))}"
    if "enum" in schema:
        kind = "one of " + ", ".join(map(str, schema["enum"]))
    limits = [words.format(schema[key]) for key, words in _LIMITS.items() if key in schema]
    return f"{kind} ({', '.join(limits)})" if limits else kind


def _reachable(schemas: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """These schemas and those they refer to, each once."""
    found: dict[str, None] = {}
    queue = list(names)
    while queue:
        name = queue.pop(0)
        if name not in found:
            found[name] = None
            queue += [
                other for field in schemas[name].get("properties", {}).values() for other in _names(field)
            ]
    return list(found)


def _names(schema: Any) -> list[str]:
    """The names of all schemas that a schema refers to."""
    if isinstance(schema, dict):
        own = [_name(schema)] if "$ref" in schema else []
        return own + [
            name for key, value in schema.items() if key != "discriminator" for name in _names(value)
        ]
    return [name for value in schema for name in _names(value)] if isinstance(schema, list) else []


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _page(template: str, **values: Any) -> Reply:
    body = render(template, version=__version__, **values).encode()
    return Reply(body, content_type="text/html; charset=utf-8")
