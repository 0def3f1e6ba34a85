"""Flags and help texts, derived from the settings. Errors in a command line take one line."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from skim.cli.settings.fields import Setting, settings_of
from skim.config import EngineConfig, ServerConfig
from skim.config.declare import Value, parts
from skim.errors import RequestError

SETTINGS_NOTE = (
    "Every setting is also an environment variable (--max-model-len is SKIM_MAX_MODEL_LEN) and a key of the "
    "TOML file (max_model_len = 4096). Flags override variables, variables override the file. Other users "
    "can read flags in the process list: put keys into the environment or the file."
)


_NEGATIVE = re.compile(r"-\.?\d")
"""The beginning of a value that is no option: argparse knows `-5`, but not `-5G`, and would miss a value."""


_NO_NUMBER = re.compile(r"argument (?P<name>\S+): invalid (?P<kind>int|float) value: (?P<value>.*)")
_NO_CHOICE = re.compile(r"argument \S+: invalid choice: '(?P<value>.*)' \(choose from (?P<choices>.*)\)")


def _meant(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class _WholeWords(argparse.HelpFormatter):
    """Breaks lines between words only: a value such as `keep-target` stays whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, and without the usage text before every error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **{"formatter_class": _WholeWords, **options})
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        if number := _NO_NUMBER.fullmatch(message):
            words = "a whole number" if number["kind"] == "int" else "a number"
            message = f"{number['name'].split('/')[-1]} must be {words}, got {number['value']}"
        elif choice := _NO_CHOICE.fullmatch(message):
            choices = choice["choices"].replace("'", "").split(", ")
            message += _meant(choice["value"], choices)
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Name the unknown flag without its value: the value of a misspelled --api-key is a key."""
        flags = [argument.split("=")[0] for argument in unknown if argument.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        self.error(f"unknown option {flags[0]}" + _meant(flags[0], list(self._option_string_actions)))


def add_engine_settings(parser: Parser, *, positional_model: bool, **defaults: Value) -> None:
    """Add a group of flags for each part of the engine.

    `positional_model` also takes the model as the argument MODEL. `defaults` are shown in the help of a
    command that has defaults different from the engine's.
    """
    for part, kind in parts(EngineConfig).items():
        group = _group(parser, part, kind)
        for setting in settings_of(kind):
            if setting.name in defaults:
                setting = replace(setting, default=defaults[setting.name])
            if setting.name == "model" and positional_model:
                add_model(group, setting)
            else:
                add_setting(group, setting)
    add_config(parser)


def add_server_settings(parser: Parser) -> None:
    group = _group(parser, "server", ServerConfig)
    for setting in settings_of(ServerConfig):
        add_setting(group, setting)


def add_model(group: argparse._ActionsContainer, setting: Setting) -> None:
    """Add the model as a positional argument and as a flag, which exclude each other."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("MODEL", nargs="?", default=argparse.SUPPRESS, help=_help(setting))
    either.add_argument(setting.flag, metavar="MODEL", help="The same, as a flag.")


def add_setting(group: argparse._ActionsContainer, setting: Setting) -> None:
    """Add a flag. Its value stays a text, so that `Setting.from_text` converts flags and variables alike."""
    if setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=_help(setting))
    else:
        metavar = "N" if setting.types == {int} else "X" if setting.types == {float} else "VALUE"
        group.add_argument(setting.flag, metavar=metavar, help=_help(setting))


def add_config(parser: Parser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with settings of any command (default: $SKIM_CONFIG)"
    )
    parser.epilog = SETTINGS_NOTE


def add_sampling(parser: Parser, *, max_tokens: int, temperature: float) -> None:
    """Add the two sampling parameters of terminal commands; the API has the others."""
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="longest reply (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help="0 always takes the likeliest token, higher values vary more (default: %(default)s)",
    )


def max_tokens_of(args: argparse.Namespace) -> int:
    """The value of --max-tokens. The engine also takes 0, for a prompt that is only scored."""
    given: int = args.max_tokens
    if given < 1:
        raise RequestError(
            f"max_tokens must be a whole number of at least 1, got {given}", fields="max_tokens"
        )
    return given


def _group(parser: Parser, part: str, kind: type) -> argparse._ArgumentGroup:
    return parser.add_argument_group(f"{part} settings", _escaped(inspect.getdoc(kind) or ""))


def _help(setting: Setting) -> str:
    """The field's docstring, with the default unless the docstring gives it."""
    default: object = setting.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif default is None:
        default = "none"
    told = setting.default is None and "Default:" in setting.doc
    return _escaped(setting.doc if told else f"{setting.doc} (default: {default})".strip())


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
