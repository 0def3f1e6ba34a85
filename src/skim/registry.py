"""The registries of scorers and parsers: names, help lines and needs, read from files without importing them.

Settings, `--help` and the server's schema list them and must not import torch, as their files do. So a file
declares its scorer or parser with literals, and this module parses them out of the source. The module itself
is imported when it is used (`skim.prefill.scoring.factory`, `skim.server.formats.dialect`).

Files are found on the `__path__` of a package: a directory added to it is searched too, and its modules are
importable under the package's name. This module is below `config`, which checks names, so it knows the
packages by name only, as entry points are known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from skim.errors import ConfigError

PACKAGE = "skim.prefill.scorers"
TOOL_PARSERS = "skim.server.formats.tools"
REASONING_PARSERS = "skim.server.formats.reasoning"
MODELS = {
    "none": "none",
    "target": "target",
    "drafter": "drafter, or target without one",
}
"""The models a scorer may need, in words."""


@dataclass(frozen=True)
class Declaration:
    """A scorer file's `SCORER`. The scorer's name is the name of its file."""

    help: str
    """One line for `--help` and the README: the evidence that blocks are ranked by."""
    model: str = "none"
    """The model that the scorer runs: a key of `MODELS`."""
    grows: bool = False
    """True if memory grows with the prompt: the KV pool on a GPU is then sized with the longest prompt."""
    odds: bool = False
    """True if shares of the scores are chances. Flat scores then mean that nothing was found."""
    order: int = 100
    """Place in lists of scorers, ascending; equal places are sorted by name."""

    def __post_init__(self) -> None:
        if not isinstance(self.help, str) or not self.help.strip() or "\n" in self.help:
            raise ValueError(f"help must be one line of text, got {self.help!r}")
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if not all(isinstance(flag, bool) for flag in (self.grows, self.odds)):
            raise ValueError(f"grows and odds must be bools, got {self.grows!r} and {self.odds!r}")
        if not isinstance(self.order, int):
            raise ValueError(f"order must be an int, got {self.order!r}")


@dataclass(frozen=True)
class ParserDeclaration:
    """The `PARSER` of a file in `skim.server.formats`. The parser's name is the name of its file."""

    help: str
    """One line for `--help` and `docs/server.md`: the format."""
    families: str
    """The model families that write it, for `docs/server.md`."""
    template: str = ""
    """Regular expression that finds the families' chat templates. Empty: never chosen by itself."""
    order: int = 100
    """Place in the list, ascending. Of several parsers that fit a template, the first is chosen."""

    def __post_init__(self) -> None:
        for name in ("help", "families"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip() or "\n" in value:
                raise ValueError(f"{name} must be one line of text, got {value!r}")
        if not isinstance(self.order, int):
            raise ValueError(f"order must be an int, got {self.order!r}")
        try:
            re.compile(self.template)
        except re.error as error:
            raise ValueError(f"template must be a regular expression: {error}") from None

    def fits(self, template: str) -> bool:
        return bool(self.template) and re.search(self.template, template, re.DOTALL) is not None


D = TypeVar("D", Declaration, ParserDeclaration)


def scorers() -> Mapping[str, Declaration]:
    """All scorers by name, in the order in which they are listed."""
    return _declared(PACKAGE, "SCORER", Declaration)


def scorer_help() -> dict[str, str]:
    """The help line of every scorer by name."""
    return {name: declaration.help for name, declaration in scorers().items()}


def module_of(name: str) -> str:
    """The module that makes the scorer `name`."""
    return f"{PACKAGE}.{name}"


def tool_parsers() -> Mapping[str, ParserDeclaration]:
    """All formats of tool calls by name."""
    return _declared(TOOL_PARSERS, "PARSER", ParserDeclaration)


def reasoning_parsers() -> Mapping[str, ParserDeclaration]:
    """All formats of reasoning by name."""
    return _declared(REASONING_PARSERS, "PARSER", ParserDeclaration)


def tool_parser_help() -> dict[str, str]:
    """The choices of the setting `tool_parser`, with a help line each."""
    chosen = {"auto": "by the chat template"}
    return chosen | {name: one.help for name, one in tool_parsers().items()}


def reasoning_parser_help() -> dict[str, str]:
    """The choices of the setting `reasoning_parser`, with a help line each."""
    chosen = {"auto": "by the chat template", "none": "reasoning stays in the content"}
    return chosen | {name: one.help for name, one in reasoning_parsers().items()}


def _declared(package: str, variable: str, kind: type[D]) -> Mapping[str, D]:
    return _found(tuple(import_module(package).__path__), variable, kind)  # type: ignore[arg-type]


@lru_cache
def _found(directories: tuple[str, ...], variable: str, kind: type[Any]) -> Mapping[str, Any]:
    """Earlier directories win, as they do for imports. Files whose names begin with `_` do not count."""
    found: dict[str, Any] = {}
    for directory in directories:
        for file in Path(directory).glob("[!_]*.py"):
            if file.stem not in found:
                found[file.stem] = _read(file, variable, kind)
    return MappingProxyType(dict(sorted(found.items(), key=lambda item: (item[1].order, item[0]))))


def _read(file: Path, variable: str, kind: type[Any]) -> Any:
    reason = "it has none"
    try:
        for node in ast.parse(file.read_bytes()).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id=called), args=[], keywords=keywords),
                ) if (name, called) == (variable, kind.__name__):
                    return kind(**{str(one.arg): ast.literal_eval(one.value) for one in keywords})
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"{file} must declare its {variable.lower()} at module level, as {variable} = {kind.__name__}"
        f"(help=..., ...) with literal keywords: {reason}"
    )
