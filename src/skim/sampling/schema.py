"""Limits on JSON schemas, checked before compilation.

llguidance refuses keywords that it cannot express, and limits the size of grammars and lexers. Its limits do
not cover every cost. The cost of some keywords grows with the value of a number, not with its length.
Patterns that one string must match together cost exponential time, and so do combined choices. The checks
here bound these costs: a schema that passes compiles in well under a second, and an error names the keyword
to change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from skim.errors import RequestError, shown

MAX_BYTES = 128 * 1024
"""Longest schema, as ASCII JSON, and longest grammar."""
MAX_DEPTH = 64
"""Deepest nesting of braces and brackets."""
MAX_MINIMUM = 100_000
"""Largest `minLength`, `minItems` and `minProperties`: more would not fit any context window."""
MAX_PROPERTIES = 2000
"""Most names in all `properties`, `required` and objects of `enum` together. The cost of optional properties
is quadratic."""
MAX_PATTERN_PROPERTIES = 64
"""Most `patternProperties` in total: they are compared pairwise."""
MAX_MULTIPLE = 10_000
"""Largest product of the least common multiple of all `multipleOf` values and their count: the lexer builds
that many states."""
MAX_CONJUNCTION = 6
"""Most patterns, formats and length limits that apply to one string."""
MAX_CHOICES = 1000
"""Most cases of combined choices (`allOf` of `anyOf`, `oneOf` or `enum`), when expanded."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""
DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data, not schemas."""
_MINIMA = ("minLength", "minItems", "minProperties")

Schema = Mapping[str, Any] | bool | str


def check_schemas(schemas: Iterable[Schema]) -> list[dict[str, Any]]:
    """Parse and check schemas, each given as JSON text or as a parsed object; return plain dicts.

    The limits apply to all of them together, because they are compiled together.
    """
    trees = [_parse(schema) for schema in schemas]
    count = _Count()
    for tree in trees:
        count.visit(tree)
        _Combinations(tree, count.schemas).check()
    count.check()
    return trees


def _parse(schema: object) -> dict[str, Any]:
    """A deep copy as plain dicts and lists: the caller cannot change it later, and no part occurs twice."""
    try:
        if isinstance(schema, str):
            _check_size(len(schema))
            schema = json.loads(schema)
        text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        raise refused(f"the JSON schema is not valid JSON: {error}") from error
    _check_size(len(text))
    tree = json.loads(text)
    if tree is True:
        return {}
    if tree is False:
        raise refused("the JSON schema is false, which no value satisfies")
    if not isinstance(tree, dict):
        raise refused(f"a JSON schema must be an object, got {text[:40]}")
    return tree


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise refused(f"the JSON schema has {size} bytes; at most {MAX_BYTES} are supported")


def refused(message: str, field: str = "grammar") -> RequestError:
    """An error about the request's grammar, which a JSON schema is compiled to."""
    return RequestError(message, fields=field)


def pointed(root: Any, target: str) -> Any:
    """The part of a schema that a reference points to; None if there is none."""
    for part in unquote(target[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


def _too_deep() -> RequestError:
    return refused(f"the JSON schema nests deeper than {MAX_DEPTH} levels; move parts of it to $defs")


class _Count:
    """Totals over all schemas, and their limits."""

    def __init__(self) -> None:
        self.properties = 0
        self.patterns = 0
        self.multiples: list[Fraction] = []
        self.schemas: set[int] = set()  # ids of all nodes that are schemas

    def visit(self, tree: dict[str, Any]) -> None:
        stack: list[tuple[Any, int, bool]] = [(tree, 1, True)]  # node, depth, False inside data
        while stack:
            node, depth, is_schema = stack.pop()
            if depth > MAX_DEPTH:
                raise _too_deep()
            if isinstance(node, list):
                stack.extend((child, depth + 1, is_schema) for child in node)
            elif isinstance(node, dict) and not is_schema:
                self.properties += len(node)
                stack.extend((child, depth + 1, False) for child in node.values())
            elif isinstance(node, dict):
                self.schemas.add(id(node))
                self._count(node, is_root=depth == 1)
                for keyword, value in node.items():
                    if keyword in NAMED and isinstance(value, dict):
                        stack.extend((child, depth + 2, True) for child in value.values())
                    else:
                        stack.append((value, depth + 1, keyword not in DATA))

    def _count(self, node: dict[str, Any], is_root: bool) -> None:
        for keyword in _MINIMA:
            if isinstance(minimum := node.get(keyword), int) and minimum > MAX_MINIMUM:
                raise refused(f"{keyword} must be at most {MAX_MINIMUM}, got {minimum}")
        for keyword in ("x-guidance", *(() if is_root else ("$id",))):
            if keyword in node:
                raise refused(f"the JSON schema's keyword {keyword} is not supported here; remove it")
        target = node.get("$ref")
        if isinstance(target, str) and target != "#" and not target.startswith("#/"):
            raise refused(
                f"$ref {shown(target)} points outside the JSON schema; only '#' and '#/...' are supported"
            )
        for keyword in ("properties", "required"):
            self.properties += len(names) if isinstance(names := node.get(keyword), (dict, list)) else 0
        if isinstance(patterns := node.get("patternProperties"), dict):
            self.patterns += len(patterns)
        multiple = node.get("multipleOf")
        if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
            self.multiples.append(abs(Fraction(str(multiple))))

    def check(self) -> None:
        for what, count, most in (
            ("property names", self.properties, MAX_PROPERTIES),
            ("patternProperties", self.patterns, MAX_PATTERN_PROPERTIES),
        ):
            if count > most:
                raise refused(f"the JSON schema has {count} {what}; at most {most} are supported")
        if self.multiples:
            unit = math.lcm(*(multiple.denominator for multiple in self.multiples))
            common = math.lcm(*(int(multiple * unit) for multiple in self.multiples))
            if common * len(self.multiples) > MAX_MULTIPLE:
                raise refused(
                    "the JSON schema's multipleOf is too large: the least common multiple of all its "
                    f"values, times their count ({len(self.multiples)}), must be at most {MAX_MULTIPLE}"
                )


class _Combinations:
    """Limits on constraints that apply together (allOf, and keywords next to anyOf, oneOf or $ref)."""

    def __init__(self, root: dict[str, Any], schemas: Collection[int]) -> None:
        self.root = root
        self.schemas = schemas
        self._known: dict[int, tuple[int, int]] = {}  # node id: (conjunction, choices)

    def check(self) -> None:
        try:
            self._visit(self.root)
        except RecursionError:
            raise refused("the JSON schema's chain of $refs is too long; inline some of them") from None

    def _visit(self, node: Any) -> tuple[int, int]:
        """The worst case in a schema: (patterns that apply to one string, cases of combined choices)."""
        if isinstance(node, list):
            return _worst(self._visit(child) for child in node)
        if not isinstance(node, dict):
            return 0, 1
        if id(node) in self._known:
            return self._known[id(node)]
        self._known[id(node)] = 0, 1  # a recursive schema describes another, nested value
        parts = [self._beside(node)]
        parts.extend(map(self._visit, _items(node.get("allOf"))))
        if isinstance(target := node.get("$ref"), str):
            parts.append(self._visit(self._resolve(target)))
        for keyword in ("anyOf", "oneOf"):
            options = [self._visit(option) for option in _items(node.get(keyword))]
            parts.append((_worst(options)[0], sum(choices for _, choices in options) or 1))
        parts.append((0, len(_items(node.get("enum"))) or 1))
        conjunction = sum(part[0] for part in parts)
        choices = math.prod(part[1] for part in parts)
        if conjunction > MAX_CONJUNCTION:
            raise refused(
                f"the JSON schema applies {conjunction} patterns, formats and lengths to one string; "
                f"at most {MAX_CONJUNCTION} are supported"
            )
        if choices > MAX_CHOICES and sum(part[1] > 1 for part in parts) > 1:
            raise refused(
                f"the JSON schema's allOf of anyOf, oneOf or enum has {choices} cases; at most {MAX_CHOICES} "
                "are supported"
            )
        self._known[id(node)] = conjunction, choices
        return conjunction, choices

    def _beside(self, node: dict[str, Any]) -> tuple[int, int]:
        """The worst case among the keywords for the value itself and those for its items and properties."""
        string = sum(name in node for name in ("pattern", "format"))
        string += "minLength" in node or "maxLength" in node
        inner = [self._visit(node.get(name)) for name in ("items", "prefixItems", "additionalProperties")]
        for name in ("properties", "patternProperties"):
            named = node.get(name)
            inner.append(_worst(map(self._visit, named.values() if isinstance(named, dict) else ())))
        both = inner[-1][0] + inner[-2][0]  # a property's name may match a pattern too
        conjunction, choices = _worst(inner)
        return max(string, conjunction, both), choices

    def _resolve(self, target: str) -> Any:
        """The target of a reference. None if it does not exist, which llguidance will report."""
        found = pointed(self.root, target)
        if isinstance(found, dict) and id(found) not in self.schemas:
            raise refused(f"$ref {shown(target)} points to a part of the JSON schema that is not a schema")
        return found


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _worst(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    conjunction, choices = 0, 1
    for one, other in parts:
        conjunction, choices = max(conjunction, one), max(choices, other)
    return conjunction, choices
