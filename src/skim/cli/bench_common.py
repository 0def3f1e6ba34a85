"""What `skim bench ttft`, `decode`, `kv` and `skim eval` share: flags, the model, what they write."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skim.cli.files import check_target, write_whole
from skim.cli.parser import Parser, add_config, add_model, add_setting
from skim.cli.progress import progress
from skim.cli.settings import Setting, parts, settings_of
from skim.cli.sources import engine_config, gather
from skim.config import EngineConfig
from skim.errors import ConfigError
from skim.measure.modes import SYNTAX, Mode, parse_mode
from skim.measure.report import Report, Row, make_report, table

if TYPE_CHECKING:
    from skim.bench.ceiling import Ceiling
    from skim.bench.inputs import Prompts
    from skim.bench.work import Work
    from skim.models.load import LoadedModel


def add_rows(parser: Parser, *, contexts: Sequence[int], repeats: int = 3) -> None:
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        default=list(contexts),
        metavar="N",
        help=f"tokens in a prompt (default: {' '.join(map(str, contexts))})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help="times each row is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="other prompts for another number (default: 0)"
    )


def add_modes(parser: Parser, modes: Sequence[str], note: str = "") -> None:
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(modes),
        metavar="MODE",
        help=f"how prompts are read: {SYNTAX}{note} (default: {' '.join(modes)})",
    )


def add_batches(parser: Parser, batches: Sequence[int]) -> None:
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=list(batches),
        metavar="N",
        help=f"rows in a step (default: {' '.join(map(str, batches))})",
    )
    parser.add_argument(
        "--steps", type=int, default=24, metavar="N", help="steps timed in each repeat (default: %(default)s)"
    )


def add_peers(parser: Parser, which: str) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PEER",
        help=f"who takes turns with us: {which}; may be repeated",
    )


def add_model_and_output(parser: Parser, *, drafter: bool = True) -> None:
    """A shape or a model with the engine's settings, and files for the report."""
    parser.add_argument(
        "--shape",
        metavar="SHAPE",
        help="random weights instead of a model: qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, llama-3.1-8b, "
        "or a transformers config.json; prompts are random ids, and --max-model-len may widen the window",
    )
    if drafter:
        parser.add_argument(
            "--drafter-shape",
            metavar="SHAPE",
            help="random weights that score for a shape (default: its own first layers)",
        )
    add_output(parser)
    note = "How prompts are read is told by the modes." if drafter else "Prompts are read in full."
    add_engine(parser, note, drafter=drafter)


def add_output(parser: Parser, what: str = "the report") -> None:
    parser.add_argument("--json", metavar="FILE", help=f"write {what} to FILE")
    parser.add_argument("--html", metavar="FILE", help="write the report with plots to FILE")


def add_engine(parser: Parser, note: str, *, drafter: bool = True) -> None:
    """The engine's settings as flags."""
    group = parser.add_argument_group("engine settings", note)
    for setting in settings_but_prefill(drafter=drafter):
        if setting.name == "model":
            add_model(group, setting)
        else:
            add_setting(group, setting)
    add_config(parser)


@dataclass(frozen=True)
class Files:
    """Where the report goes beside the terminal."""

    json: Path | None
    html: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace, inputs: Sequence[str] = ()) -> Files:
        """Told before the work begins if they cannot be written, or are among the `inputs`."""
        found = cls(
            None if args.json is None else check_target("--json", args.json, inputs),
            None if args.html is None else check_target("--html", args.html, inputs),
        )
        if found.html is not None:
            from skim.measure import page

            page.require()
        return found

    def write(self, report: Report) -> None:
        if self.json is not None:
            write_whole(self.json, report.to_json())
        if self.html is not None:
            from skim.measure.page import page

            write_whole(self.html, page(report))


@dataclass(frozen=True)
class Subject:
    """A model to measure, with prompts for it and the limits of the machine it is on."""

    config: EngineConfig
    model: LoadedModel
    drafter: LoadedModel | None
    source: str | None  # where the weights came from; None for a shape
    prompts: Prompts
    work: Work
    ceiling: Ceiling

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """What all rows have in common."""
        return {
            "model": self.model.name,
            "weights": "random" if self.source is None else "real",
            "drafter": None if self.drafter is None else self.drafter.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "repeats": args.repeats,
            "seed": args.seed,
            "ceiling": {"flops": self.ceiling.flops, "bandwidth": self.ceiling.bandwidth},
        }


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings; numbers that make no sense are told here, before anything is loaded."""
    for name in ("contexts", "batch"):
        values = getattr(args, name, None)
        if values is not None and min(values) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {min(values)}")
    for name in ("repeats", "steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if args.shape is not None and (getattr(args, "MODEL", None) or args.model):
        raise ConfigError("--shape stands in for a model; leave one of them out")
    drafter = hasattr(args, "drafter_shape")
    if drafter and args.drafter_shape is not None and args.shape is None:
        raise ConfigError("--drafter-shape needs --shape; a model's drafter is --drafter")
    return engine_of(args, drafter=drafter)


def engine_of(args: argparse.Namespace, *, drafter: bool = True) -> EngineConfig:
    """The engine's settings from flags, variables and the file."""
    return engine_config(gather(settings_but_prefill(drafter=drafter), args, os.environ))


def modes_of(args: argparse.Namespace, config: EngineConfig) -> list[Mode]:
    return [parse_mode(text, drafter=config.prefill.drafter) for text in dict.fromkeys(args.modes)]


def open_subject(args: argparse.Namespace, config: EngineConfig) -> Subject:
    """Load the model, or make it up, and measure what the machine can do."""
    from skim.models.source import prepare

    shape = args.shape
    path = None if shape is not None else prepare(config.model.model)
    with progress(f"loading {shape or config.model.model}"):
        from transformers.utils import logging

        from skim.bench.inputs import book_prompts, random_prompts
        from skim.bench.work import work_of

        logging.set_verbosity_error()  # what goes wrong is reported by Skim, once
        model, drafter = _models(config, path, shape, getattr(args, "drafter_shape", None))
        prompts = (
            random_prompts(model.vocab_size, args.seed)
            if shape is not None
            else book_prompts(model.tokenizer, max(args.contexts), args.seed)
        )
    with progress("measuring what the machine can do"):
        from skim.bench.ceiling import measure_ceiling

        ceiling = measure_ceiling(model.device, model.dtype)
    work = work_of(model.module, model.layers)
    return Subject(config, model, drafter, None if shape else config.model.model, prompts, work, ceiling)


def _models(
    config: EngineConfig, path: Path | None, shape: str | None, drafter_shape: str | None
) -> tuple[LoadedModel, LoadedModel | None]:
    if path is None:
        from skim.models.shapes import build_shape, shape_drafter

        model = build_shape(shape or "", config.model)
        return model, None if drafter_shape is None else shape_drafter(drafter_shape, config.model, model)
    from dataclasses import replace

    from skim.models.load import load
    from skim.models.source import prepare

    drafter = None
    if config.prefill.drafter is not None:
        chosen = replace(config.model, model=config.prefill.drafter, max_model_len=None)
        drafter = load(prepare(chosen.model), chosen)
    return load(path, config.model), drafter


def tell(line: str) -> None:
    """A sign of life: what is being measured now."""
    print(line, file=sys.stderr, flush=True)


def finish(
    kind: str,
    args: argparse.Namespace,
    files: Files,
    settings: dict[str, Any],
    rows: Sequence[Row],
    expected: int,
) -> tuple[Report, int]:
    """Write the report everywhere; 1 if a row failed."""
    report = make_report(kind, ["skim", *args.argv], settings, rows, expected=expected)
    print(table(report))
    files.write(report)
    for row in report.failures:
        named = ", ".join(f"{name} {value}" for name, value in row.key.items())
        print(f"skim {kind}: FAILED {named}: {row.failed}", file=sys.stderr)
    return report, 1 if report.failures else 0


def settings_but_prefill(*, drafter: bool = True) -> list[Setting]:
    """The engine's settings but for how it reads prompts; that leaves who scores them, where one does."""
    return [
        setting
        for part, kind in parts(EngineConfig).items()
        for setting in settings_of(kind)
        if part != "prefill" or (drafter and setting.name == "drafter")
    ]
