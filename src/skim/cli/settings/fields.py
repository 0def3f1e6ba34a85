"""Settings as the command line sees them: the fields declared in `skim.config`, with flag and variable.

A field added there becomes a flag, an environment variable and a TOML key with no change here.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

from skim.config import EngineConfig, ServerConfig
from skim.config.declare import Declared, Limits, Value, declared, field_docs, parts
from skim.errors import ConfigError, shown

_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Setting(Declared):
    """A declared field, its help text, and the conversions from text and TOML."""

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
            raise self._refused("true, false, 1 or 0", shown(text))
        convert: type
        for convert in (int, float, str):
            if convert in self.types:
                with contextlib.suppress(ValueError):
                    return convert(text)  # type: ignore[no-any-return]
        raise self._refused(self._expected(), shown(text))

    def from_toml(self, value: object) -> Value:
        """The value of a TOML key, which has a type: `"1"` is not a number and 1 is not a boolean."""
        if type(value) in self.types:
            return value  # type: ignore[return-value]
        if type(value) is int and float in self.types:
            return float(value)
        # A wrong value of a text setting may be a key, so the message shows only its type.
        kind = _WORDS.get(type(value), f"a {type(value).__name__}")
        raise self._refused(self._expected(), kind if self.types == {str} else shown(value))

    def _refused(self, expected: str, got: str) -> ConfigError:
        return ConfigError(f"{self.name} must be {expected}, got {got}", fields=self.name)

    def _expected(self) -> str:
        return " or ".join(words for kind, words in _WORDS.items() if kind in self.types)


def settings_of(kind: type) -> tuple[Setting, ...]:
    """The fields of a config dataclass, in their order."""
    docs = field_docs(kind)
    return tuple(
        Setting(**vars(one), doc=_with_choices(docs.get(one.name, ""), one.limits)) for one in declared(kind)
    )


def engine_settings(whole: type = EngineConfig) -> tuple[Setting, ...]:
    """The settings of every part of the engine."""
    return tuple(itertools.chain.from_iterable(map(settings_of, parts(whole).values())))


def server_settings() -> tuple[Setting, ...]:
    return settings_of(ServerConfig)


def all_settings() -> tuple[Setting, ...]:
    """The settings of all commands, which share one file and one environment."""
    return (*engine_settings(), *server_settings())


def _with_choices(doc: str, limits: Limits) -> str:
    """A field's docstring, with its choices and their help lines if these come from a function."""
    if not callable(limits.choices):
        return doc
    listed = ", ".join(f"`{name}` ({line})" for name, line in limits.choices().items())
    return f"{doc.removesuffix('.')}: {listed}."
