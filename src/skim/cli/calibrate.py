"""`skim calibrate`: learn how much each attention head of a model says about evidence."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from skim.cli.documents import read_text
from skim.cli.files import check_target, write_whole
from skim.cli.settings.fields import Setting, settings_of
from skim.cli.settings.parser import Parser, add_config, add_model, add_setting
from skim.cli.settings.sources import build, gather
from skim.config import ModelConfig
from skim.measure.book import packaged_text
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, Second
from skim.progress import progress, task_bar

HELP = "learn which attention heads of a model point at evidence"
USAGE = "[MODEL] [options]"
_SETTINGS = ("model", "dtype", "device")
_SHOWN = 8  # features in the summary


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Facts of many kinds are hidden in a text, and the attention of every "
        "head is captured. Each head gets a weight, above or below 0 or none, so that the evidence becomes "
        "most likely; the weights are judged on facts held out. A second look at the best blocks of long "
        "prompts gets weights too, if it finds more. The result is written to "
        f"{FILE_NAME} beside the model, and used whenever the model is loaded."
    )
    for setting in _settings():
        if setting.name == "model":
            add_model(parser, setting)
        else:
            add_setting(parser, setting)
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="most prompts to fit to, and as many to judge, at least one of each kind (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="texts to hide each fact in (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="first layers to read: more find more and cost more (default: half of them and one)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="natural text in UTF-8 to hide facts in (default: a novel in English)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the tasks (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"file to write instead of {FILE_NAME} beside the model"
    )
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    names = [setting.name for setting in _settings()]
    config = build(ModelConfig, names, gather(_settings(), args, os.environ))
    text = packaged_text() if args.text is None else read_text(args.text)
    chosen = None if args.output is None else check_target("--output", args.output, [args.text or "-"])

    from skim.models.source import prepare

    path = prepare(config.model)
    target = chosen or check_target("the model's directory", path / FILE_NAME)
    found = measure(
        config, path, text, rounds=args.rounds, trials=args.trials, layers=args.layers, seed=args.seed
    )
    write_whole(target, found.to_json())
    print("\n".join(summary(found)))
    print(f"written to {target}")
    return 0


def measure(
    config: ModelConfig,
    path: Path,
    text: str,
    *,
    rounds: int,
    trials: int | None,
    layers: int | None,
    seed: int,
) -> Calibration:
    """Load the prepared model and calibrate it, with progress."""
    with progress(f"loading {config.model}"):
        from transformers.utils import logging

        from skim.calibrate.run import calibrate
        from skim.models.load import load

        logging.set_verbosity_error()  # Skim reports errors itself, once
        model = load(path, config)

    name = Path(config.model).name if Path(config.model).expanduser().exists() else config.model
    with task_bar("calibrating") as count:
        return calibrate(
            model,
            text,
            name=name,
            rounds=rounds,
            trials=trials,
            layers=layers,
            seed=seed,
            progress=count,
        )


def summary(found: Calibration) -> list[str]:
    """The layers and the strongest features, and their quality on held-out tasks."""
    shown = [f"layers {', '.join(map(str, found.layers))} of {found.model}; none after them is run"]
    if found.features is not None and found.words is not None:
        best = sorted(found.features, key=lambda feature: -abs(feature.weight))[:_SHOWN]
        parts = ", ".join(f"{one.statistic} {one.layer}.{one.head} x {one.weight:g}" for one in best)
        more = len(found.features) - len(best)
        shown.append(f"features {parts}{f' and {more} more' if more else ''} (statistic layer.head x weight)")
        shown.append(f"words: shared x {found.words[0]:g}, similar x {found.words[1]:g}")
        shown.append(_second(found.second))
    if not found.quality:
        return shown
    columns = list(dict.fromkeys(name for figures in found.quality.values() for name in figures))
    width = max(map(len, ("held out", *found.quality)))
    shown += ["", f"{'held out':{width}} " + " ".join(f"{name:>8}" for name in columns)]
    for name, figures in found.quality.items():
        values = (f"{figures[column]:8g}" if column in figures else " " * 8 for column in columns)
        shown.append(f"{name:{width}} " + " ".join(values))
    shown.append(
        "heads and words together; kept: all evidence in the best tenth of the blocks; "
        "first: before all other blocks; bits: log2 of its rank"
    )
    if "twice" in columns:
        from skim.calibrate.looks import ENOUGH

        shown.append(
            f"once, twice: all evidence in the best {ENOUGH} blocks, after one look and after both; "
            "long: prompts for this, judged by weights fitted without their facts"
        )
    return [*shown, ""]


def _second(found: Second | None) -> str:
    if found is None:
        return "second look: none; it finds no more, or too few prompts were long enough to tell"
    layers = max(feature.layer for feature in found.features) + 1
    return (
        f"second look: {len(found.features)} features of {layers} layers, windows of {found.window} tokens; "
        f"first look x {found.first:g}, words: shared x {found.words[0]:g}, similar x {found.words[1]:g}"
    )


def _settings() -> list[Setting]:
    """The settings that load a model, without its context window."""
    return [setting for setting in settings_of(ModelConfig) if setting.name in _SETTINGS]
