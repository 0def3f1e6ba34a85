"""Shared by these scripts: arguments, an engine with random weights, error messages and exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from skim.bench.drive import Driver
from skim.cli import INTERRUPTED
from skim.config import DEFAULT_MODEL, EngineConfig
from skim.engine.start import settle_heap
from skim.errors import SkimError
from skim.models.load import load, pick_device
from skim.models.shapes import build_shape
from skim.models.source import prepare


def positive(text: str) -> int:
    """argparse type: a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def need_cuda(parser: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, but torch finds none")


def prompt_parser(doc: str | None) -> argparse.ArgumentParser:
    """Parser for scripts that skim one long prompt repeatedly."""
    parser = parser_of(doc)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--drafter", default="qwen3-0.6b", help="shape of the drafter (default: %(default)s)")
    parser.add_argument("--context", type=positive, default=131_072)
    parser.add_argument("--mode", default="blend:0.05")
    parser.add_argument("--repeats", type=positive, default=5)
    return parser


def start(shape: str | None, drafter: str | None = None, *, serving: bool = False, **settings: Any) -> Driver:
    """Start an engine, and let the caller run its steps. Without a shape it has the default model.

    `serving` takes the settings of a server: a target for the time of steps.
    """
    tell(f"starting {shape or DEFAULT_MODEL}{f' with the drafter {drafter}' if drafter else ''}")
    config = EngineConfig.of(**settings)
    if serving:
        on_gpu = pick_device(config.model.device).type == "cuda"
        config = replace(config, scheduler=config.scheduler.for_serving(on_gpu))
    model = build_shape(shape, config.model) if shape else load(prepare(DEFAULT_MODEL), config.model)
    helper = None
    if drafter:
        helper = build_shape(drafter, config.drafter_model(drafter), seed=1, tokenizer_of=model)
    driver = Driver(model, config, helper)
    settle_heap()
    return driver


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` and exit with its status."""
    try:
        sys.exit(main())
    except SkimError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(INTERRUPTED)
