"""The registry of scorers: names, help lines and needs, read from scorer files without importing them.

Settings, `--help` and the server's schema list the scorers and must not import torch, as scorer files do.
So a file declares its scorer with literals, and this module parses them out of the source. The module itself
is imported when its scorer is made (`skim.prefill.scoring.factory`).

Files are found on the `__path__` of the scorers' package: a directory added to it is searched too, and its
modules are importable under the package's name. This module is below `config`, which checks names, so
it knows that package by name only, as entry points are known.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from skim.errors import ConfigError

PACKAGE = "skim.prefill.scorers"
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


def scorers() -> Mapping[str, Declaration]:
    """All scorers by name, in the order in which they are listed."""
    return _declared(tuple(import_module(PACKAGE).__path__))


def scorer_help() -> dict[str, str]:
    """The help line of every scorer by name."""
    return {name: declaration.help for name, declaration in scorers().items()}


def module_of(name: str) -> str:
    """The module that makes the scorer `name`."""
    return f"{PACKAGE}.{name}"


@lru_cache
def _declared(directories: tuple[str, ...]) -> Mapping[str, Declaration]:
    """Earlier directories win, as they do for imports. Files whose names begin with `_` are not scorers."""
    found: dict[str, Declaration] = {}
    for directory in directories:
        for file in Path(directory).glob("[!_]*.py"):
            if file.stem not in found:
                found[file.stem] = _read(file)
    return MappingProxyType(dict(sorted(found.items(), key=lambda item: (item[1].order, item[0]))))


def _read(file: Path) -> Declaration:
    reason = "it has none"
    try:
        for node in ast.parse(file.read_bytes()).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id="SCORER")],
                    value=ast.Call(func=ast.Name(id="Declaration"), args=[], keywords=keywords),
                ):
                    return Declaration(**{str(one.arg): ast.literal_eval(one.value) for one in keywords})
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"{file} must declare its scorer at module level, as SCORER = Declaration(help=..., ...) with "
        f"literal keywords: {reason}"
    )
