"""`skim bench ttft`: time to first token over contexts and modes, with its parts, against peers."""

from __future__ import annotations

import argparse

from skim.cli.bench_common import (
    Files,
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

HELP = "time to first token over contexts and modes, cold and warm"
USAGE = "[MODEL] [options]"
CONTEXTS = (2048, 4096, 7000)
MODES = ("dense", "cascade:0.1")
PEERS = "`transformers`, `llama.cpp` (package xllamacpp), or the URL of a server with OpenAI's API"


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Prompts are natural text that ends in a question, the same for all; "
        "modes and peers take turns. ttft is the median by a clock outside the engine, and queue, scoring "
        "and prefill of that run add up to it; first_decode is the step after it. gflops are the model's "
        "operations for the tokens that were computed, a second of prefill, and of_peak their share of the "
        "fastest matrix product measured in the same run. Cold: the prefix cache is empty, kernels have run "
        "before. ttft_p99 of so few runs is little more than the slowest, so its range is that of all. With "
        "three contexts or more and several repeats the crossover is told: the shortest context from which "
        "on a sparse mode's slowest run is faster than dense's fastest."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_modes(
        parser,
        MODES,
        note=". Beyond the model's window dense is refused, and its row fails: leave it out there; "
        "sparse modes go on with compact positions",
    )
    parser.add_argument(
        "--warm", action="store_true", help="read each prompt again as well, now that the prefix cache has it"
    )
    add_peers(parser, PEERS)
    add_model_and_output(parser)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    modes = modes_of(args, config)
    files = Files.of(args)

    from skim.bench.peers import check_peer, make_peer

    names = [check_peer(name) for name in dict.fromkeys(args.peer)]
    subject = open_subject(args, config)

    from skim.bench.drive import Driver
    from skim.bench.ttft import Task, crossovers, measure_ttft

    contexts = sorted(set(args.contexts))
    peers = [make_peer(name, subject.model, subject.source, contexts[-1]) for name in names]
    task = Task(contexts, modes, peers, args.repeats, args.warm)
    try:
        driver = Driver(subject.model, config, subject.drafter)
        rows = measure_ttft(driver, task, subject.prompts, subject.work, subject.ceiling, tell)
    finally:
        for peer in peers:
            peer.close()
    found = crossovers(rows, modes)
    settings = {**subject.settings(args), "window": driver.window, "crossover": found}
    expected = len(contexts) * (len(modes) * (1 + args.warm) + len(peers))
    _, code = finish("bench ttft", args, files, settings, rows, expected)
    for mode, context in found.items():
        print(
            f"crossover: {mode} is faster than dense from {context:,} tokens on, beyond the noise"
            if context is not None
            else f"crossover: {mode} is not faster than dense beyond the noise at the longest context"
        )
    return code
