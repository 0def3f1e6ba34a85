"""Flags, engine settings and report files that the `skim bench` commands and `skim eval` share."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skim.cli.files import check_target, write_whole
from skim.cli.settings.fields import Setting, settings_of
from skim.cli.settings.parser import Parser, add_config, add_model, add_setting
from skim.cli.settings.sources import engine_config, gather
from skim.config import EngineConfig
from skim.config.declare import parts
from skim.measure.modes import SYNTAX, Mode, parse_mode
from skim.measure.report import Report, Row, headline, make_report, table

DRAFTER = ("drafter", "drafter_dtype", "drafter_quantization")
PREFILL_NOTE = "Sparse prefill and slow-fast decode are set by --modes and --drafter."


def add_numbers(parser: Parser, flag: str, default: Sequence[int], text: str) -> None:
    """An option that takes one or more whole numbers."""
    parser.add_argument(
        flag,
        nargs="+",
        type=int,
        default=list(default),
        metavar="N",
        help=f"{text} (default: {' '.join(map(str, default))})",
    )


def add_rows(parser: Parser, *, contexts: Sequence[int], repeats: int = 3) -> None:
    add_numbers(parser, "--contexts", contexts, "prompt lengths in tokens")
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help="measurements of each row, each with a different prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="random seed of the prompts (default: 0)"
    )


def add_modes(parser: Parser, modes: Sequence[str], note: str = "") -> None:
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(modes),
        metavar="MODE",
        help=f"prefill modes: {SYNTAX}{note} (default: {' '.join(modes)})",
    )


def add_batches(parser: Parser, batches: Sequence[int]) -> None:
    add_numbers(parser, "--batch", batches, "sequences decoded together in a step")
    parser.add_argument(
        "--steps", type=int, default=24, metavar="N", help="steps timed in each repeat (default: %(default)s)"
    )


def add_peers(parser: Parser, which: str) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PEER",
        help=f"another engine that reads the same prompts in the same run: {which}; may be repeated",
    )


def add_model_and_output(parser: Parser, *, drafter: bool = True, without: Sequence[str] = ()) -> None:
    """Add flags for models or shapes, the engine's settings but those `without`, and report files."""
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="SHAPE",
        help="random weights instead of a model's, to measure speed without a download: qwen3-0.6b, "
        "qwen3-4b, qwen3-8b, qwen3-32b, llama-3.1-8b, gemma-3-4b, or a transformers config.json; prompts are "
        "random token ids, and --max-model-len may extend the context window",
    )
    if drafter:
        parser.add_argument(
            "--drafter-shape",
            metavar="SHAPE",
            help="drafter with random weights that scores prompts for every --shape (default: the shape's "
            "own first layers)",
        )
    add_output(parser)
    note = PREFILL_NOTE if drafter else "Prompts are read in full."
    add_engine(parser, note, drafter=drafter, several=True, without=without)


def add_output(parser: Parser, what: str = "the report") -> None:
    parser.add_argument("--json", metavar="FILE", help=f"write {what} to FILE")
    parser.add_argument("--html", metavar="FILE", help="write the report with plots to FILE")


def add_engine(
    parser: Parser,
    note: str,
    *,
    drafter: bool = True,
    several: bool = False,
    without: Sequence[str] = (),
) -> None:
    """Add the engine's settings but those `without` as flags, for one model or several."""
    group = parser.add_argument_group("engine settings", note)
    for setting in settings_but_prefill(drafter=drafter):
        if setting.name in without:
            continue
        if setting.name == "model" and several:
            _add_models(group, setting)
        elif setting.name == "model":
            add_model(group, setting)
        else:
            add_setting(group, setting)
    add_config(parser)


def _add_models(group: argparse._ActionsContainer, setting: Setting) -> None:
    """Add models as positional arguments or as a flag, but not both."""
    either = group.add_mutually_exclusive_group()
    text = f"{setting.doc} Several are measured one after the other. (default: {setting.default})"
    either.add_argument("MODEL", nargs="*", default=argparse.SUPPRESS, help=text)
    either.add_argument(setting.flag, nargs="+", metavar="MODEL", help="The same, as a flag.")


@dataclass(frozen=True)
class Files:
    """Files that the report is written to, besides the terminal."""

    json: Path | None
    html: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace, inputs: Sequence[str] = ()) -> Files:
        """Check, before any work, that the files can be written and are not among the `inputs`."""
        found = cls(
            None if args.json is None else check_target("--json", args.json, inputs),
            None if args.html is None else check_target("--html", args.html, inputs),
        )
        if found.html is not None:
            from skim.measure.drawing import require

            require()
        return found

    def write(self, report: Report) -> None:
        if self.json is not None:
            write_whole(self.json, report.to_json())
        if self.html is not None:
            from skim.measure.pages import page

            write_whole(self.html, page(report))


def engine_of(args: argparse.Namespace, *, drafter: bool = True) -> EngineConfig:
    """The engine's settings from flags, environment variables and the config file."""
    return engine_config(gather(settings_but_prefill(drafter=drafter), args, os.environ))


def modes_of(args: argparse.Namespace, config: EngineConfig) -> list[Mode]:
    return [parse_mode(text, drafter=config.prefill.drafter) for text in dict.fromkeys(args.modes)]


def tell(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


def finish(
    kind: str,
    args: argparse.Namespace,
    files: Files,
    settings: dict[str, Any],
    rows: Sequence[Row],
    expected: int,
    listing: Callable[[Sequence[Row]], str] = table,
) -> int:
    """Print the report, write its files and return the exit code."""
    report = make_report(kind, ["skim", *args.argv], settings, rows, expected=expected)
    print(f"$ {shlex.join(report.command)}\n{headline(report)}\n{listing(report.rows)}")
    files.write(report)
    return report_failures(report)


def report_failures(report: Report) -> int:
    """Return 1 and print a line to stderr if a row failed, else return 0."""
    if not report.failures:
        return 0
    failed = f"{len(report.failures)} of {len(report.rows)} rows failed"
    print(f"skim {report.kind}: {failed}; the table has the reasons", file=sys.stderr)
    return 1


def settings_but_prefill(*, drafter: bool = True) -> list[Setting]:
    """The engine's settings without those that modes set, except those of the drafter if they are wanted."""
    return [
        setting
        for part, kind in parts(EngineConfig).items()
        for setting in settings_of(kind)
        if part not in ("prefill", "decode") or (drafter and setting.name in DRAFTER)
    ]
