"""`skim bench decode`: decode steps over models, contexts and batches, with the bandwidth floor."""

from __future__ import annotations

import argparse

from skim.cli.bench.common import (
    Files,
    add_batches,
    add_model_and_output,
    add_modes,
    add_peers,
    add_rows,
    finish,
    modes_of,
    tell,
)
from skim.cli.bench.models import Subject, choices_of, contenders, expected_rows, measure_models
from skim.cli.settings.parser import Parser
from skim.errors import ConfigError
from skim.measure.report import Row, without_password

HELP = "decode steps over models, contexts, batches and modes, with the bandwidth floor"
USAGE = "[MODEL ...] [options]"
CONTEXTS = (1024, 7000)
BATCHES = (1, 8)
MODES = ("dense",)
PEERS = ("transformers", "llama.cpp")


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. step is the median time of a step, in which every sequence gets one "
        "token; step_mean is the mean, slow steps of slow-fast decode included; step_p99 is the 99th "
        "percentile of all steps. floor is the time to read the step's bytes "
        "(the weights once, and each sequence's keys and values) at the bandwidth measured in the same run; "
        "of_floor is 100% at that limit. For a model with experts the floor assumes that rows choose "
        "different experts. Keys and values of dense prompts are random numbers, since the time of a step "
        "does not depend on them, but for slow-fast decode: their attention is flat, so more steps are slow "
        "than with text. llama.cpp computes its own. Ranges are those of the repeats."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_batches(parser, BATCHES)
    add_modes(parser, MODES)
    add_peers(parser, "`transformers` or `llama.cpp` (package xllamacpp)")
    add_model_and_output(parser)


def run(args: argparse.Namespace) -> int:
    choices = choices_of(args)
    modes = modes_of(args, choices[0].config)
    files = Files.of(args)
    names = list(dict.fromkeys(args.peer))
    for name in names:
        if name not in PEERS:
            raise ConfigError(
                f"unknown peer {without_password(name)!r}; give {' or '.join(PEERS)}, or use "
                "`skim bench serve` for a URL"
            )
    from skim.bench.peers import check_ready

    for name in names:
        check_ready(name, [choice.source for choice in choices])
    contexts, batches = sorted(set(args.contexts)), sorted(set(args.batch))

    def measure(subject: Subject) -> list[Row]:
        from skim.bench.decode import Task, measure_decode

        with contenders(subject, names, contexts[-1]) as (driver, peers):
            task = Task(contexts, batches, modes, peers, args.repeats, args.steps)
            return measure_decode(driver, task, subject.prompts, subject.work, subject.ceiling, tell)

    settings, rows = measure_models(args, choices, measure)
    expected = expected_rows(settings, len(contexts) * len(batches) * (len(modes) + len(names)))
    return finish("bench decode", args, files, {**settings, "steps": args.steps}, rows, expected)
