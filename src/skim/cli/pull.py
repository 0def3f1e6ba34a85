"""`skim pull`: fetch and convert a model ahead of time."""

from __future__ import annotations

import argparse
import os

from skim.cli.settings.fields import Setting, settings_of
from skim.cli.settings.parser import Parser, add_config, add_model
from skim.cli.settings.sources import build, gather
from skim.config import ModelConfig

HELP = "fetch and convert a model, and print its path"
USAGE = "[MODEL] [options]"


def configure(parser: Parser) -> None:
    add_model(parser, _model())
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    config = build(ModelConfig, ["model"], gather([_model()], args, os.environ))

    from skim.models.source import prepare

    print(prepare(config.model))
    return 0


def _model() -> Setting:
    """The model setting. Other settings in a file are for commands that load the model."""
    return next(setting for setting in settings_of(ModelConfig) if setting.name == "model")
