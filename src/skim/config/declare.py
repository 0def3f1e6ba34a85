"""Declaration of a setting: a dataclass field with a type, a default, limits and a docstring.

    keep_ratio: Annotated[float | None, Limits(above=0, at_most=1)] = None
    \"\"\"Fraction of the prompt to keep, in (0, 1].\"\"\"

Everything else derives from that: validation (`Checked`), flags, variables and TOML keys (`cli/settings/`),
per-request options (`server/options.py`) and the table in `docs/reference.md`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from skim.errors import ConfigError, shown

Value = str | int | float | bool
Config = TypeVar("Config")

_BYTE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_BYTES = 2**63


@dataclass(frozen=True)
class Limits:
    """Constraints on a field's value besides its type."""

    choices: tuple[str, ...] | Callable[[], Mapping[str, str]] | None = None
    """The allowed texts. A function gives them with a help line each, for choices not known at import."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    check: Callable[[str, Any], object] | None = None
    """Called with the field's name and value in place of the checks above; raises a ConfigError."""
    secret: bool = False
    """True keeps the value out of messages."""
    per_request: bool = True
    """False if the value is fixed at start, so that a request cannot override it."""

    def allow(self, number: float) -> bool:
        above = -math.inf if self.above is None else self.above
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= number <= high and above < number < math.inf

    def in_words(self, *, whole: bool) -> str:
        """The numbers that are allowed: `in (0, 1]`, `a whole number of at least 1`."""
        noun = "a whole number" if whole else "a number"
        low = self.at_least if self.above is None else self.above
        if low is not None and self.at_most is not None:
            bracket = "[" if self.above is None else "("
            return f"{noun} from {low} to {self.at_most}" if whole else f"in {bracket}{low}, {self.at_most}]"
        if low is not None:
            return f"{noun} of at least {low}" if self.above is None else f"{noun} above {low}"
        return noun if self.at_most is None else f"{noun} of at most {self.at_most}"


@dataclass(frozen=True)
class Declared:
    """One field of a config dataclass."""

    name: str
    types: frozenset[type]
    optional: bool  # None is allowed, and means that nothing was set
    default: Value | None
    limits: Limits

    @property
    def choices(self) -> tuple[str, ...] | None:
        choices = self.limits.choices
        return tuple(choices()) if callable(choices) else choices

    def check(self, value: object) -> None:
        """Raise a ConfigError unless the field may have this value."""
        if value is None and self.optional:
            return
        if self.limits.check is not None:
            self.limits.check(self.name, value)
            return
        expected = self._expected_instead_of(value)
        if expected is not None:
            got = "" if self.limits.secret else f", got {shown(value)}"
            raise ConfigError(f"{self.name} must be {expected}{got}", fields=self.name)

    def _expected_instead_of(self, value: object) -> str | None:
        """Words for the allowed values; None if `value` is one of them."""
        choices, limits = self.choices, self.limits
        if choices is not None:
            return None if value in choices else f"one of {', '.join(choices)}"
        if bool in self.types:
            return None if isinstance(value, bool) else "True or False"
        if str in self.types:
            return None if isinstance(value, str) and value.strip() else "a non-empty text"
        whole = float not in self.types
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        allowed = number and limits.allow(typing.cast(float, value))
        return None if allowed else limits.in_words(whole=whole)


class Checked:
    """Base of config dataclasses. Fields are checked on construction, so a config that exists is valid.

    Subclasses add checks across fields in their own `__post_init__`.
    """

    def __post_init__(self) -> None:
        kind: type = type(self)
        for one in declared(kind):
            one.check(getattr(self, one.name))


@functools.cache
def declared(kind: type) -> tuple[Declared, ...]:
    """The fields of a config dataclass, in their order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_declared(kind, field, hints[field.name]) for field in dataclasses.fields(kind))


def _declared(kind: type, field: dataclasses.Field[Any], hint: Any) -> Declared:
    plain, limits = _without_limits(hint)
    union = typing.get_origin(plain) in (typing.Union, types.UnionType)
    members = typing.get_args(plain) if union else (plain,)
    found = set()
    for member in members:
        bare, inner = _without_limits(member)
        limits = limits or inner
        found.add(bare)
    kinds = frozenset(found - {types.NoneType})
    if not kinds or not kinds <= {str, int, float, bool}:
        raise TypeError(f"{kind.__name__}.{field.name}: a setting cannot have the type {plain}")
    default = typing.cast(Any, field.default)
    return Declared(field.name, kinds, types.NoneType in found, default, limits or Limits())


def _without_limits(hint: Any) -> tuple[Any, Limits | None]:
    if typing.get_origin(hint) is not Annotated:
        return hint, None
    plain, *extras = typing.get_args(hint)
    return plain, next((extra for extra in extras if isinstance(extra, Limits)), None)


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, by the field's name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for pair in itertools.pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def parts(whole: type) -> dict[str, type]:
    """The config dataclasses that a config such as `EngineConfig` consists of, by the name of the part."""
    hints = typing.get_type_hints(whole)
    return {field.name: hints[field.name] for field in dataclasses.fields(whole)}


def assemble(whole: type[Config], values: Mapping[str, Any]) -> Config:
    """A config of several parts from flat values: each goes to the part that declares it."""
    made = {
        part: kind(**{one.name: values[one.name] for one in declared(kind) if one.name in values})
        for part, kind in parts(whole).items()
    }
    return whole(**made)


def parse_bytes(name: str, value: str | int) -> int:
    """`"512M"`, `"1.5GiB"` or a plain number of bytes -> bytes. `name` is the setting."""
    match = None
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value), re.IGNORECASE)
    size = float(match[1]) * _BYTE_UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < _MOST_BYTES:
        raise ConfigError(f"{name} must be a size such as '512M' or '4G', got {shown(value)}", fields=name)
    return int(size)
