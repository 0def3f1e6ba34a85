"""`skim bench kv`: what keys and values take in each format, and what reading them costs."""

from __future__ import annotations

import argparse

from skim.cli.bench_common import (
    Files,
    add_batches,
    add_model_and_output,
    add_rows,
    config_of,
    finish,
    open_subject,
    tell,
)
from skim.cli.parser import Parser

HELP = "bytes per token, capacity and decode step of each KV format"
USAGE = "[MODEL] [options]"
CONTEXTS = (4096,)
BATCHES = (1,)


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. The capacity is the tokens that fit --kv-memory; steps are those of "
        "skim bench decode."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_batches(parser, BATCHES)
    add_model_and_output(parser, drafter=False)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    files = Files.of(args)
    subject = open_subject(args, config)

    from skim.bench.drive import Driver
    from skim.bench.kv import formats, measure_kv

    drivers = {name: Driver(subject.model, chosen) for name, chosen in formats(subject.model, config).items()}
    contexts, batches = sorted(set(args.contexts)), sorted(set(args.batch))
    rows = measure_kv(
        drivers,
        contexts,
        batches,
        args.steps,
        args.repeats,
        subject.prompts,
        subject.work,
        subject.ceiling,
        tell,
    )
    settings = {**subject.settings(args), "steps": args.steps, "kv_memory": config.memory.kv_memory}
    return finish("bench kv", args, files, settings, rows, len(drivers) * len(contexts) * len(batches))[1]
