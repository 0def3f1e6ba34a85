"""Load the models of `skim bench ttft`, `decode` and `kv` and measure them one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skim.cli.bench.common import engine_of, tell
from skim.config import EngineConfig
from skim.errors import ConfigError, SkimError
from skim.measure.report import Row
from skim.progress import progress

if TYPE_CHECKING:
    from skim.bench.ceiling import Ceiling
    from skim.bench.drive import Driver
    from skim.bench.inputs import Prompts
    from skim.bench.peers import Peer
    from skim.bench.work import Work
    from skim.models.load import LoadedModel


FAILED = "failed"


@dataclass(frozen=True)
class Choice:
    """A model, or a shape in place of one, as named on the command line."""

    config: EngineConfig
    shape: str | None = None

    @property
    def name(self) -> str:
        return self.shape or self.config.model.model

    @property
    def source(self) -> str | None:
        """The source of the weights; None for a shape."""
        return self.config.model.model if self.shape is None else None


@dataclass(frozen=True)
class Subject:
    """A loaded model to measure, with its prompts, its work and the machine's limits."""

    config: EngineConfig
    model: LoadedModel
    drafter: LoadedModel | None
    source: str | None  # source of the weights; None for a shape
    prompts: Prompts
    work: Work
    ceiling: Ceiling


def choices_of(args: argparse.Namespace) -> list[Choice]:
    """Every model or shape with its settings. Raise for invalid options before any model is loaded."""
    for name in ("contexts", "batch"):
        values = getattr(args, name, None)
        if values is not None and min(values) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {min(values)}")
    for name in ("repeats", "steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    field = "MODEL" if hasattr(args, "MODEL") else "model"
    models = getattr(args, field)
    if args.shape is not None and models:
        raise ConfigError("--shape replaces models; give models or shapes, not both")
    drafter = hasattr(args, "drafter_shape")
    if drafter and args.drafter_shape is not None and args.shape is None:
        raise ConfigError("--drafter-shape needs --shape; use --drafter with a model")
    if args.shape is not None:
        config = engine_of(args, drafter=drafter)
        return [Choice(config, shape) for shape in dict.fromkeys(args.shape)]
    alone = [argparse.Namespace(**{**vars(args), field: model}) for model in dict.fromkeys(models or [None])]
    return [Choice(engine_of(one, drafter=drafter)) for one in alone]


def measure_models(
    args: argparse.Namespace, choices: Sequence[Choice], measure: Callable[[Subject], list[Row]]
) -> tuple[dict[str, Any], list[Row]]:
    """Measure every model. Return the settings that all rows share, and the rows, each with its model.

    All models are fetched before the first is measured. A model is freed before the next is loaded, provided
    that `measure` keeps no reference to its subject. If one of several models cannot be measured, it has a
    failed row and the others are still measured.
    """
    paths = [_prepare(choice) for choice in choices]
    with progress("measuring the machine's limits"):
        from skim.bench.ceiling import Ceiling, measure_ceiling, rescale_shares
        from skim.bench.drive import free_memory
        from skim.models.dtype import pick_dtype
        from skim.models.load import pick_device

        device = pick_device(choices[0].config.model.device)
        dtype = pick_dtype(choices[0].config.model.dtype, device)
        ceiling = measure_ceiling(device, dtype)
    models: dict[str, Any] = {}
    rows: list[Row] = []
    for number, (choice, path) in enumerate(zip(choices, paths, strict=True), 1):
        if len(choices) > 1:
            tell(f"model {number} of {len(choices)}: {choice.name}")
        free_memory()
        try:
            facts, found = _measure_one(args, choice, path, ceiling, measure)
        except SkimError as error:
            if len(choices) == 1:
                raise
            facts, found = {FAILED: str(error)}, [Row({}, failed=str(error))]
        models[choice.name] = facts
        rows += [replace(row, key={"model": choice.name, **row.key}) for row in found]
    free_memory()
    again = measure_ceiling(device, dtype)  # the first may be too low if the machine was busy
    best = Ceiling(max(ceiling.flops, again.flops), max(ceiling.bandwidth, again.bandwidth))
    rows = [rescale_shares(row, ceiling, best) for row in rows]
    settings = {
        "models": models,
        "drafter": getattr(args, "drafter_shape", None) or choices[0].config.prefill.drafter,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "repeats": args.repeats,
        "seed": args.seed,
        "ceiling": {"flops": best.flops, "bandwidth": best.bandwidth},
    }
    return settings, rows


@contextmanager
def contenders(subject: Subject, peers: Sequence[str], longest: int) -> Iterator[tuple[Driver, list[Peer]]]:
    """The engine and its peers, ready for prompts of up to `longest` tokens. Peers are closed on exit."""
    from skim.bench.drive import Driver
    from skim.bench.peers import make_peer
    from skim.engine.start import settle_heap

    made = [make_peer(name, subject.model, subject.source, longest) for name in peers]
    try:
        driver = Driver(subject.model, subject.config, subject.drafter)
        settle_heap()  # as a server does
        yield driver, made
    finally:
        for peer in made:
            peer.close()


def expected_rows(settings: Mapping[str, Any], each: int) -> int:
    """The number of rows that a report must have: `each` per measured model, one per failed model."""
    return sum(1 if FAILED in facts else each for facts in settings["models"].values())


def _prepare(choice: Choice) -> Path | None:
    """Path of a model, fetched if necessary. None for a shape, whose name is only checked."""
    if choice.shape is None:
        from skim.models.source import prepare

        return prepare(choice.config.model.model)
    with progress(f"looking up {choice.shape}"):
        from skim.models.shapes import shape_config

        shape_config(choice.shape)
    return None


def _measure_one(
    args: argparse.Namespace,
    choice: Choice,
    path: Path | None,
    ceiling: Ceiling,
    measure: Callable[[Subject], list[Row]],
) -> tuple[dict[str, Any], list[Row]]:
    """The model's facts for the report's settings, and its rows."""
    subject = _open(args, choice, path, ceiling)
    facts = {
        "weights": "random" if path is None else "real",
        "weight_bytes": subject.work.weight_bytes,
        "weight_bits": round(subject.model.weights.bits, 1),
        "window": choice.config.model.max_model_len or subject.model.max_positions,
    }
    return facts, measure(subject)


def _open(args: argparse.Namespace, choice: Choice, path: Path | None, ceiling: Ceiling) -> Subject:
    """Load the model, or build the shape, and make its prompts."""
    with progress(f"loading {choice.name}"):
        from transformers.utils import logging

        from skim.bench.inputs import book_prompts, random_prompts
        from skim.bench.work import work_of

        logging.set_verbosity_error()  # Skim reports errors itself
        model, drafter = _load(choice, path, getattr(args, "drafter_shape", None))
        prompts = (
            random_prompts(model.vocab_size, args.seed)
            if path is None
            else book_prompts(model.tokenizer, max(args.contexts), args.seed)
        )
    source = None if path is None else choice.name
    work = work_of(model.module, model.layers)
    return Subject(choice.config, model, drafter, source, prompts, work, ceiling)


def _load(
    choice: Choice, path: Path | None, drafter_shape: str | None
) -> tuple[LoadedModel, LoadedModel | None]:
    config = choice.config
    if path is None:
        from skim.models.shapes import build_shape

        model = build_shape(choice.name, config.model)
        if drafter_shape is None:
            return model, None
        settings = config.drafter_model(drafter_shape)
        return model, build_shape(drafter_shape, settings, seed=1, tokenizer_of=model)

    from skim.models.load import load
    from skim.models.source import prepare

    drafter = None
    if config.prefill.drafter is not None:
        chosen = config.drafter_model(config.prefill.drafter)
        drafter = load(prepare(chosen.model), chosen)
    return load(path, config.model), drafter
