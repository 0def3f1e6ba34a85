"""`skim bench decode`: decode steps over contexts and batches, beside the floor that memory sets."""

from __future__ import annotations

import argparse

from skim.cli.bench_common import (
    Files,
    add_batches,
    add_model_and_output,
    add_modes,
    add_peers,
    add_rows,
    config_of,
    finish,
    modes_of,
    open_subject,
    tell,
)
from skim.cli.parser import Parser
from skim.errors import ConfigError
from skim.measure.report import without_password

HELP = "decode steps over contexts, batches and modes, with the bandwidth floor"
USAGE = "[MODEL] [options]"
CONTEXTS = (1024, 7000)
BATCHES = (1, 8)
MODES = ("dense",)
PEERS = ("transformers", "llama.cpp")


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. The floor is the bytes that a step must read, weights once and each "
        "row's keys and values, at the bandwidth measured in the same run; of_floor is 100% at that limit. "
        "Of a model with experts as many are counted as rows choose that have none in common. "
        "Keys and values of dense prompts are random numbers, since the time of a step does not depend on "
        "them; llama.cpp computes its own. step_p99 is that of all steps, and its range that of the repeats."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_batches(parser, BATCHES)
    add_modes(parser, MODES)
    add_peers(parser, "`transformers` or `llama.cpp` (package xllamacpp)")
    add_model_and_output(parser)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    modes = modes_of(args, config)
    files = Files.of(args)
    names = list(dict.fromkeys(args.peer))
    for name in names:
        if name not in PEERS:
            raise ConfigError(
                f"unknown peer {without_password(name)!r}; give {' or '.join(PEERS)}, or use "
                "`skim bench serve` for a URL"
            )
    subject = open_subject(args, config)

    from skim.bench.decode import Task, measure_decode
    from skim.bench.drive import Driver
    from skim.bench.peers import make_peer

    contexts, batches = sorted(set(args.contexts)), sorted(set(args.batch))
    peers = [make_peer(name, subject.model, subject.source, contexts[-1]) for name in names]
    task = Task(contexts, batches, modes, peers, args.repeats, args.steps)
    try:
        driver = Driver(subject.model, config, subject.drafter)
        rows = measure_decode(driver, task, subject.prompts, subject.work, subject.ceiling, tell)
    finally:
        for peer in peers:
            peer.close()
    settings = {**subject.settings(args), "steps": args.steps, "weight_bytes": subject.work.weight_bytes}
    expected = len(contexts) * len(batches) * (len(modes) + len(peers))
    return finish("bench decode", args, files, settings, rows, expected)[1]
