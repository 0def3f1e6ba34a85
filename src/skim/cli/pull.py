"""`skim pull`: fetch and convert a model ahead of time, or write a quantized copy of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from skim.cli.settings.fields import Setting, settings_of
from skim.cli.settings.parser import Parser, add_config, add_model
from skim.cli.settings.sources import build, gather
from skim.config import ModelConfig
from skim.errors import ConfigError
from skim.progress import say

HELP = "fetch and convert a model, and print its path"
USAGE = "[MODEL [DIR]] [options]"


def configure(parser: Parser) -> None:
    add_model(parser, _model())
    parser.add_argument("DIR", nargs="?", help="new directory for the quantized copy, with --quantize")
    parser.add_argument(
        "--quantize",
        choices=("int4", "int8"),
        help="write a copy to DIR with the weights of linear layers in 4 or 8 bits, as a compressed-tensors "
        "checkpoint that other engines read too",
    )
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    if (args.quantize is None) != (args.DIR is None):
        wrong = (
            "DIR needs --quantize int4 or int8" if args.quantize is None else "--quantize needs MODEL and DIR"
        )
        raise ConfigError(f"{wrong}: skim pull --quantize int4 MODEL DIR")
    config = build(ModelConfig, ["model"], gather([_model()], args, os.environ))

    from skim.models.source import prepare

    path = prepare(config.model)
    if args.quantize is not None:
        from skim.models.quantized.write import write_quantized

        copy = Path(args.DIR)
        write_quantized(path, config.model, args.quantize, copy)
        say(compared(weight_bytes(path), weight_bytes(copy)))
        path = copy
    print(path)
    return 0


def weight_bytes(directory: Path) -> int:
    """Bytes of a model's weight files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def compared(original: int, copy: int) -> str:
    """The size of a quantized copy beside that of the model it was made of."""
    from skim.memory.budget import in_words

    sizes = f"{in_words(copy)} of weights instead of {in_words(original)}"
    if copy < original:
        return sizes
    return f"{sizes}: the model's own format is smaller, so use it as it is"


def _model() -> Setting:
    """The model setting. Other settings in a file are for commands that load the model."""
    return next(setting for setting in settings_of(ModelConfig) if setting.name == "model")
