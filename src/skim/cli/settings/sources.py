"""Where settings come from: flags, then `SKIM_*` variables, then a TOML file, then the defaults.

A value keeps the name of its source, so that whatever is wrong with it can be said of the source.
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
from typing import Any, TypeVar

from skim.cli.settings.fields import Setting, Value, all_settings, parts, settings_of
from skim.config import BUDGETS, EngineConfig
from skim.errors import ConfigError

CONFIG_VARIABLE = "SKIM_CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, "SKIM_CACHE")

Config = TypeVar("Config")


@dataclass(frozen=True)
class Found:
    """A value that somebody set, and where."""

    value: Value
    origin: str  # --port, MODEL, SKIM_PORT or the file's path


def gather(settings: Iterable[Setting], args: Namespace, environ: Mapping[str, str]) -> dict[str, Found]:
    """What was set of `settings`, by name. Only the source that wins is read: a flag mends a bad variable.

    Of settings that stand for each other (`BUDGETS`), one that is set replaces those of lesser sources.
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
    """What the command line itself says, by the flag or, for the model, by its position."""
    if setting.name == "model" and getattr(args, "MODEL", None) is not None:
        return Found(args.MODEL, "MODEL")
    value = getattr(args, setting.name, None)
    if isinstance(value, bool):
        return Found(value, setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
    return None if value is None else _read(setting.from_text, value, setting.flag)


def engine_config(found: Mapping[str, Found]) -> EngineConfig:
    return build_parts(EngineConfig, found)


def build_parts(whole: type[Config], found: Mapping[str, Found]) -> Config:
    """A config whose fields are dataclasses, as EngineConfig's are; their own fields are what was found."""
    kinds = parts(whole)
    names = {part: [setting.name for setting in settings_of(kind)] for part, kind in kinds.items()}

    def make(**values: Value) -> Config:
        made = {
            part: kind(**{name: values[name] for name in names[part] if name in values})
            for part, kind in kinds.items()
        }
        return whole(**made)

    return build(make, [name for group in names.values() for name in group], found)


def build(make: Callable[..., Config], names: Sequence[str], found: Mapping[str, Found]) -> Config:
    """A config from what was found for its fields; the dataclass's own objection is told of its source."""
    mine = {name: found[name] for name in names if name in found}
    try:
        return make(**{name: one.value for name, one in mine.items()})
    except ConfigError as error:
        raise _blame(make, mine, error) from error


def _blame(make: Callable[..., Any], mine: Mapping[str, Found], error: ConfigError) -> ConfigError:
    """Told of the source whose value alone gives the same error, or else of all that the message names."""
    for name, one in mine.items():
        try:
            make(**{name: one.value})
        except ConfigError as alone:
            if str(alone) == str(error):
                return ConfigError(f"{one.origin}: {error}")
    told = with_origin(error, mine)
    if told is not error:
        return told
    origins = dict.fromkeys(one.origin for one in mine.values())
    return ConfigError(f"{', '.join(origins)}: {error}")


def with_origin(error: ConfigError, found: Mapping[str, Found]) -> ConfigError:
    """The error with the sources of the settings that it names; itself if it names none that was set."""
    named = [one.origin for name, one in found.items() if re.search(rf"\b{name}\b", str(error))]
    return ConfigError(f"{', '.join(dict.fromkeys(named))}: {error}") if named else error


def warn_of_misspelt_variables(command: str, environ: Mapping[str, str]) -> None:
    """One line for each `SKIM_*` variable that is almost a setting; others may belong to somebody else."""
    known = {setting.variable for setting in all_settings()} | set(OTHER_VARIABLES)
    endings = [name.removeprefix("SKIM_") for name in sorted(known)]
    for name in sorted(name for name in environ if name.startswith("SKIM_") and name not in known):
        close = difflib.get_close_matches(name.removeprefix("SKIM_").upper(), endings, n=1, cutoff=0.75)
        if close:
            message = f"{name} is not a setting and is ignored; did you mean SKIM_{close[0]}?"
            print(f"{command}: {message}", file=sys.stderr)


def _read_file(flag: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The file's name and its keys, all of them settings of some command; no file is no keys."""
    name = environ.get(CONFIG_VARIABLE) if flag is None else flag
    if name is None:
        return "", {}
    origin = CONFIG_VARIABLE if flag is None else "--config"
    try:
        entries = tomllib.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{origin}: cannot read the file {name!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8, which TOML must be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error
    known = [setting.name for setting in all_settings()]
    for key, value in entries.items():
        if key not in known:
            raise ConfigError(f"{name}: {_unknown(key, value, known)}")
    return name, entries


def _unknown(key: str, value: object, known: Sequence[str]) -> str:
    if isinstance(value, dict):
        return f"there is a table [{key}], but settings stand at the top, as in `port = 8000`"
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known settings: {', '.join(known)}"
    return f"unknown setting {key!r}; {hint}"


def _read(convert: Callable[[Any], Value], value: object, origin: str) -> Found:
    try:
        return Found(convert(value), origin)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
