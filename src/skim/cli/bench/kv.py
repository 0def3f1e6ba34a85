"""`skim bench kv`: memory and decode step time of each KV format."""

from __future__ import annotations

import argparse

from skim.cli.bench.common import (
    Files,
    add_batches,
    add_model_and_output,
    add_rows,
    finish,
    tell,
)
from skim.cli.bench.models import Subject, choices_of, expected_rows, measure_models
from skim.cli.settings.parser import Parser
from skim.measure.report import Row

HELP = "bytes per token, capacity and decode step of each KV format"
USAGE = "[MODEL ...] [options]"
CONTEXTS = (4096,)
BATCHES = (1,)


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. capacity is the number of tokens that fit --kv-memory; steps are "
        "measured as in skim bench decode."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_batches(parser, BATCHES)
    add_model_and_output(parser, drafter=False)


def run(args: argparse.Namespace) -> int:
    choices = choices_of(args)
    files = Files.of(args)
    contexts, batches = sorted(set(args.contexts)), sorted(set(args.batch))
    expected = 0

    def measure(subject: Subject) -> list[Row]:
        from skim.bench.drive import Driver
        from skim.bench.kv import formats, measure_kv

        nonlocal expected
        chosen = formats(subject.model, subject.config)
        expected += len(chosen) * len(contexts) * len(batches)
        return measure_kv(
            {name: Driver(subject.model, config) for name, config in chosen.items()},
            contexts,
            batches,
            args.steps,
            args.repeats,
            subject.prompts,
            subject.work,
            subject.ceiling,
            tell,
        )

    settings, rows = measure_models(args, choices, measure)
    settings |= {"steps": args.steps, "kv_memory": choices[0].config.memory.kv_memory}
    expected += expected_rows(settings, 0)
    return finish("bench kv", args, files, settings, rows, expected)
