"""Sources of settings: flags, then `SKIM_*` variables, then a TOML file, then the defaults.

A value keeps the name of its source, so that an error about it names the setting as the user wrote it.
"""

from __future__ import annotations

import difflib
import re
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
from skim.errors import ConfigError, FieldError, SkimError, WrittenError, shown, with_names

CONFIG_VARIABLE = "SKIM_CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, "SKIM_CACHE")


@dataclass(frozen=True)
class Found:
    """A value that was set, and its source."""

    value: Value
    origin: str  # --port, MODEL, SKIM_PORT or the file's path
    name: str | None = None  # --port, MODEL or SKIM_PORT; None in a file, where it is the field's name


def gather(settings: Iterable[Setting], args: Namespace, environ: Mapping[str, str]) -> dict[str, Found]:
    """The values that were set, by name. Only the winning source is read: a flag overrides a bad variable.

    A budget (`BUDGETS`) that is set replaces other budgets from lower sources.
    """
    file, entries = _read_file(getattr(args, "config", None), environ)

    def from_variable(one: Setting) -> Found | None:
        text = environ.get(one.variable)
        return None if text is None else _read(one, one.from_text, text, one.variable, one.variable)

    def from_file(one: Setting) -> Found | None:
        return _read(one, one.from_toml, entries[one.name], file) if one.name in entries else None

    every = list(settings)
    found: dict[str, Found] = {}
    for source in (lambda one: from_flag(one, args), from_variable, from_file):
        settled = found.keys() | (() if found.keys().isdisjoint(BUDGETS) else BUDGETS)
        found |= {one.name: given for one in every if one.name not in settled and (given := source(one))}
    return found


def from_flag(setting: Setting, args: Namespace) -> Found | None:
    """The value on the command line, from the flag or, for the model, from its position."""
    if setting.name == "model" and getattr(args, "MODEL", None) is not None:
        return Found(args.MODEL, "MODEL", "MODEL")
    value = getattr(args, setting.name, None)
    if isinstance(value, bool):
        origin = setting.flag if value else "--no-" + setting.flag.removeprefix("--")
        return Found(value, origin, setting.flag)
    return None if value is None else _read(setting, setting.from_text, value, setting.flag, setting.flag)


def engine_config(found: Mapping[str, Found]) -> EngineConfig:
    return build_parts(EngineConfig, found)


def build_parts(whole: type[Config], found: Mapping[str, Found]) -> Config:
    """A config of several parts, such as `EngineConfig`, from the values found for their fields."""
    names = [setting.name for setting in engine_settings(whole)]
    return build(lambda **values: assemble(whole, values), names, found)


def build(make: Callable[..., Config], names: Sequence[str], found: Mapping[str, Found]) -> Config:
    """A config from the values found for its fields. Its errors name the values at fault as they were set."""
    mine = {name: found[name] for name in names if name in found}
    try:
        return make(**{name: one.value for name, one in mine.items()})
    except ConfigError as error:
        at_fault = {name: one for name, one in mine.items() if name in error.fields} or mine
        raise WrittenError(_named(str(error), at_fault), fields=error.fields) from error


def as_written(error: SkimError, args: Namespace, environ: Mapping[str, str]) -> str:
    """The message of an error of a command. It names the fields at fault as the user wrote them, once each.

    A setting that is not set goes by its flag, if the command has one.
    """
    if not isinstance(error, FieldError) or isinstance(error, WrittenError):
        return str(error)
    settings = [one for one in all_settings() if one.name in error.fields]
    try:
        found = gather(settings, args, environ)
    except ConfigError:  # a value that cannot be read: the error is about it and names its source
        return str(error)
    unset = {one.name: one.flag for one in settings if one.name not in found and hasattr(args, one.name)}
    written = {word.split("=")[0] for word in getattr(args, "argv", ())}
    flags = {name: "--" + name.replace("_", "-") for name in error.fields}
    given = {name: flag for name, flag in flags.items() if flag in written}
    return _named(with_names(str(error), unset | given), found)


def _named(message: str, found: Mapping[str, Found]) -> str:
    """A message about settings by the names that the user wrote; sources that it does not name come first."""
    message = with_names(message, {field: one.name for field, one in found.items() if one.name is not None})
    origins = {one.origin: one.name or one.origin for one in found.values()}
    missing = [origin for origin, name in origins.items() if not _has(message, origin, name)]
    return f"{', '.join(missing)}: {message}" if missing else message


def _has(message: str, *names: str) -> bool:
    return any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) for name in names)


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


def _read(
    setting: Setting, convert: Callable[[Any], Value], value: object, origin: str, name: str | None = None
) -> Found:
    try:
        return Found(convert(value), origin, name)
    except ConfigError as error:
        message = _named(str(error), {setting.name: Found("", origin, name)})
        raise WrittenError(message, fields=error.fields) from error
