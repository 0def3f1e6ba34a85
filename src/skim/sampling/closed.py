"""Closes the objects of a JSON schema: only the properties that it names may be written.

A schema without `additionalProperties` allows any. Peers refuse them, because a model that may add properties
does. An object stays as it is if the schema says so itself, or if several parts of the schema describe it
together (`allOf`, or `properties` beside `anyOf`, `oneOf` or `$ref`): closed parts would exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skim.sampling.schema import DATA, NAMED, pointed

_NAMES = ("properties", "patternProperties")
_SAID = ("additionalProperties", "unevaluatedProperties")


def close_objects(root: dict[str, Any]) -> None:
    """Close the objects of a checked schema, in place."""
    nodes = list(_schemas(root))
    describing = _describing(root, nodes)
    together: list[Any] = []  # parts that describe an object together
    for node in nodes:
        sources = [[node]] if _describes(node) else []
        sources += [group for group in _groups(root, node) if any(id(one) in describing for one in group)]
        if len(sources) > 1:
            together += [part for source in sources for part in source]
    left_open: set[int] = set()
    while together:
        node = together.pop()
        if isinstance(node, dict) and id(node) not in left_open:
            left_open.add(id(node))
            together += [part for group in _groups(root, node) for part in group]
    for node in nodes:
        names_some = any(isinstance(node.get(name), dict) for name in _NAMES)
        if names_some and id(node) not in left_open and not any(name in node for name in _SAID):
            node["additionalProperties"] = False


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself included."""
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            yield node
            for keyword, value in node.items():
                if keyword in NAMED and isinstance(value, dict):
                    stack.extend(value.values())
                elif keyword not in DATA:
                    stack.append(value)


def _groups(root: dict[str, Any], node: dict[str, Any]) -> Iterator[list[Any]]:
    """The other schemas that apply to the value of `node`. Those of one group exclude each other."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := node.get(keyword), list):
            yield options
    if isinstance(parts := node.get("allOf"), list):
        yield from ([part] for part in parts)
    if isinstance(target := node.get("$ref"), str):
        yield [pointed(root, target)]


def _describes(node: dict[str, Any]) -> bool:
    return any(name in node for name in (*_NAMES, *_SAID))


def _describing(root: dict[str, Any], nodes: list[dict[str, Any]]) -> set[int]:
    """Ids of the schemas that name properties, themselves or through a schema that applies with them."""
    users: dict[int, list[int]] = {}
    for node in nodes:
        for group in _groups(root, node):
            for part in group:
                users.setdefault(id(part), []).append(id(node))
    stack = [id(node) for node in nodes if _describes(node)]
    found: set[int] = set()
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack.extend(users.get(one, ()))
    return found
