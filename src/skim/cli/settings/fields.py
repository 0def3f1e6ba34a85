"""What can be set: the fields of the dataclasses in `skim.config`, with their types, defaults and help.

A field added there becomes a flag, an environment variable and a key of the file with no change here.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skim.config import EngineConfig, ServerConfig
from skim.errors import ConfigError

Value = str | int | float | bool

_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass, as the command line sees it."""

    name: str
    types: frozenset[type]
    default: Value | None
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SKIM_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return bool in self.types

    def from_text(self, text: str) -> Value:
        """The value of a flag or a variable."""
        if self.is_switch:
            if text.lower() in _BOOLEANS:
                return _BOOLEANS[text.lower()]
            raise ConfigError(f"{self.name} must be true, false, 1 or 0, got {text!r}")
        convert: type
        for convert in (int, float, str):
            if convert in self.types:
                with contextlib.suppress(ValueError):
                    return convert(text)  # type: ignore[no-any-return]
        raise ConfigError(f"{self.name} must be {self._expected()}, got {text!r}")

    def from_toml(self, value: object) -> Value:
        """The value of a key in the file, where values have types: `"1"` is no number and 1 no boolean."""
        if type(value) in self.types:
            return value  # type: ignore[return-value]
        if type(value) is int and float in self.types:
            return float(value)
        # What should have been a text may be a key, so only its kind is told.
        kind = _WORDS.get(type(value), f"a {type(value).__name__}")
        got = kind if self.types == {str} else repr(value)
        raise ConfigError(f"{self.name} must be {self._expected()}, got {got}")

    def _expected(self) -> str:
        return " or ".join(words for kind, words in _WORDS.items() if kind in self.types)


def parts(whole: type = EngineConfig) -> dict[str, type]:
    """The dataclasses that a config is made of, by the name of the part."""
    hints = typing.get_type_hints(whole)
    return {field.name: hints[field.name] for field in dataclasses.fields(whole)}


def settings_of(kind: type) -> tuple[Setting, ...]:
    """The fields of a dataclass, in their order."""
    hints = typing.get_type_hints(kind)
    docs = field_docs(kind)
    return tuple(
        Setting(
            name=field.name,
            types=_types(f"{kind.__name__}.{field.name}", hints[field.name]),
            default=typing.cast(Any, field.default),
            doc=_with_choices(docs.get(field.name, ""), field.metadata.get("choices")),
        )
        for field in dataclasses.fields(kind)
    )


def engine_settings(whole: type = EngineConfig) -> tuple[Setting, ...]:
    """The settings of every part of the engine, one after the other."""
    return tuple(itertools.chain.from_iterable(map(settings_of, parts(whole).values())))


def server_settings() -> tuple[Setting, ...]:
    return settings_of(ServerConfig)


def all_settings() -> tuple[Setting, ...]:
    """What any command knows: one file, and one environment, serve them all."""
    return (*engine_settings(), *server_settings())


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for pair in itertools.pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _with_choices(doc: str, choices: Callable[[], Mapping[str, str]] | None) -> str:
    """A docstring, and a list of the field's choices with their help lines."""
    if choices is None:
        return doc
    listed = ", ".join(f"`{name}` ({line})" for name, line in choices().items())
    return f"{doc.removesuffix('.')}: {listed}."


def _types(where: str, hint: Any) -> frozenset[type]:
    """The types that a hint allows, None aside: what nobody sets is None by default."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    allowed: Iterable[Any] = typing.get_args(hint) if union else (hint,)
    found = frozenset(allowed) - {types.NoneType}
    if not found or not found <= _WORDS.keys():
        raise TypeError(f"{where}: the command line has no way to set {hint}; see cli/settings/fields.py")
    return found
