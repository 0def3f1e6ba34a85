"""Sources of settings: flags, then `SKIM_*` variables, then a TOML file, then the defaults.

A value keeps the name of its source, so that an error about it names that source.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skim.cli.settings.fields import Setting, all_settings, engine_settings
from skim.config import BUDGETS, EngineConfig
from skim.config.declare import Config, Value, assemble
from skim.errors import ConfigError, shown

CONFIG_VARIABLE = "SKIM_CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, "SKIM_CACHE")


@dataclass(frozen=True)
class Found:
    """A value that was set, and its source."""

    value: Value
    origin: str  # --port, MODEL, SKIM_PORT or the file's path


def gather(settings: Iterable[Setting], args: Namespace, environ: Mapping[str, str]) -> dict[str, Found]:
    """The values that were set, by name. Only the winning source is read: a flag overrides a bad variable.

    A budget (`BUDGETS`) that is set replaces other budgets from lower sources.
    """
    file, entries = _read_file(args.config, environ)

    def from_variable(one: Setting) -> Found | None:
        text = environ.get(one.variable)
        return None if text is None else _read(one.from_text, text, one.variable)

    def from_file(one: Setting) -> Found | None:
        return _read(one.from_toml, entries[one.name], file) if one.name in entries else None

    every = list(settings)
    found: dict[str, Found] = {}
    for source in (lambda one: from_flag(one, args), from_variable, from_file):
        settled = found.keys() | (() if found.keys().isdisjoint(BUDGETS) else BUDGETS)
        found |= {one.name: given for one in every if one.name not in settled and (given := source(one))}
    return found


def from_flag(setting: Setting, args: Namespace) -> Found | None:
    """The value on the command line, from the flag or, for the model, from its position."""
    if setting.name == "model" and getattr(args, "MODEL", None) is not None:
        return Found(args.MODEL, "MODEL")
    value = getattr(args, setting.name, None)
    if isinstance(value, bool):
        return Found(value, setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
    return None if value is None else _read(setting.from_text, value, setting.flag)


def engine_config(found: Mapping[str, Found]) -> EngineConfig:
    return build_parts(EngineConfig, found)


def build_parts(whole: type[Config], found: Mapping[str, Found]) -> Config:
    """A config of several parts, such as `EngineConfig`, from the values found for their fields."""
    names = [setting.name for setting in engine_settings(whole)]
    return build(lambda **values: assemble(whole, values), names, found)


def build(make: Callable[..., Config], names: Sequence[str], found: Mapping[str, Found]) -> Config:
    """A config from the values found for its fields. Its errors name the sources of the values at fault."""
    mine = {name: found[name] for name in names if name in found}
    try:
        return make(**{name: one.value for name, one in mine.items()})
    except ConfigError as error:
        named = with_origin(error, mine)
        if named is not error:
            raise named from error
        raise _with_prefix([one.origin for one in mine.values()], error) from error


def with_origin(error: ConfigError, found: Mapping[str, Found]) -> ConfigError:
    """The error with the sources of the fields it is about; itself if none of them was set."""
    origins = [one.origin for name, one in found.items() if name in error.fields]
    return _with_prefix(origins, error) if origins else error


def _with_prefix(origins: Iterable[str], error: ConfigError) -> ConfigError:
    return ConfigError(f"{', '.join(dict.fromkeys(origins))}: {error}", fields=error.fields)


def warn_of_misspelt_variables(command: str, environ: Mapping[str, str]) -> None:
    """Report misspelled `SKIM_*` variables, one line each; other variables may belong to other programs."""
    known = {setting.variable for setting in all_settings()} | set(OTHER_VARIABLES)
    endings = [name.removeprefix("SKIM_") for name in sorted(known)]
    for name in sorted(name for name in environ if name.startswith("SKIM_") and name not in known):
        close = difflib.get_close_matches(name.removeprefix("SKIM_").upper(), endings, n=1, cutoff=0.75)
        if close:
            message = f"{name} is not a setting and is ignored; did you mean SKIM_{close[0]}?"
            print(f"{command}: {message}", file=sys.stderr)


def _read_file(flag: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The TOML file's name and its entries, each a setting of some command; empty without a file."""
    name = environ.get(CONFIG_VARIABLE) if flag is None else flag
    if name is None:
        return "", {}
    origin = CONFIG_VARIABLE if flag is None else "--config"
    try:
        entries = tomllib.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{origin}: cannot read the file {shown(name)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text, which TOML must be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error
    known = [setting.name for setting in all_settings()]
    for key, value in entries.items():
        if key not in known:
            raise ConfigError(f"{name}: {_unknown(key, value, known)}", fields=key)
    return name, entries


def _unknown(key: str, value: object, known: Sequence[str]) -> str:
    if isinstance(value, dict):
        return f"[{key}] is a table, but settings are top-level keys, such as `port = 8000`"
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {shown(close[0])}?" if close else f"known settings: {', '.join(known)}"
    return f"unknown setting {shown(key)}; {hint}"


def _read(convert: Callable[[Any], Value], value: object, origin: str) -> Found:
    try:
        return Found(convert(value), origin)
    except ConfigError as error:
        raise _with_prefix([origin], error) from error
