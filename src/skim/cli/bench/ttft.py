"""`skim bench ttft`: time to first token and its parts over models, contexts, modes and peers."""

from __future__ import annotations

import argparse

from skim.cli.bench.common import (
    Files,
    add_model_and_output,
    add_modes,
    add_peers,
    add_rows,
    finish,
    modes_of,
    tell,
)
from skim.cli.bench.models import Subject, choices_of, contenders, expected_rows, measure_models
from skim.cli.bench.residency import add_policies, compare_policies
from skim.cli.settings.parser import Parser
from skim.measure.report import Row

HELP = "time to first token over models, contexts and modes, cold and warm"
USAGE = "[MODEL ...] [options]"
CONTEXTS = (2048, 4096, 7000)
MODES = ("dense", "blend:0.1")
PEERS = "`transformers`, `llama.cpp` (package xllamacpp), or the URL of a server with OpenAI's API"


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Modes and peers read the same prompts, natural text that ends in a "
        "question, and take turns. Columns: ttft is the median of n runs, timed outside the engine; p99 of a "
        "few runs is close to the slowest; queue, scoring and prefill are those of the median run and add up "
        "to ttft; 1st decode is the step after it; speedup is dense's ttft divided by this one; kept is the "
        "share of the prompt that was read; blocks is the share of key blocks that block-sparse attention "
        "read; of peak is the model's FLOP/s in prefill, relative to the fastest matrix product in the same "
        "run. state is that of the prefix cache: cold is empty (kernels have run before), warm has the "
        "prompt. --json and --html add the FLOP/s and the ranges of all columns. With three or more contexts "
        "and several repeats the crossover is printed: the shortest context at and above which a sparse "
        "mode's slowest run is faster than dense's fastest."
    )
    add_rows(parser, contexts=CONTEXTS)
    add_modes(
        parser,
        MODES,
        note=". Contexts beyond the model's context window need modes that keep less than the window; "
        "`dense` rows fail there",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="also measure each prompt a second time, when the prefix cache has it",
    )
    add_policies(parser)
    add_peers(parser, PEERS)
    add_model_and_output(parser, without=("residency",))


def run(args: argparse.Namespace) -> int:
    if args.policies is not None:
        return compare_policies(args)
    choices = choices_of(args)
    modes = modes_of(args, choices[0].config)
    files = Files.of(args)

    from skim.bench.peers import check_peer, check_ready

    names = [check_peer(name) for name in dict.fromkeys(args.peer)]
    for name in names:
        check_ready(name, [choice.source for choice in choices])
    contexts = sorted(set(args.contexts))

    def measure(subject: Subject) -> list[Row]:
        from skim.bench.ttft import Task, measure_ttft

        with contenders(subject, names, contexts[-1]) as (driver, peers):
            task = Task(contexts, modes, peers, args.repeats, args.warm)
            return measure_ttft(driver, task, subject.prompts, subject.work, subject.ceiling, tell)

    settings, rows = measure_models(args, choices, measure)

    from skim.bench.ttft import crossovers
    from skim.bench.ttft_table import listing

    models = settings["models"]
    found = {name: crossovers([row for row in rows if row.key["model"] == name], modes) for name in models}
    expected = expected_rows(settings, len(contexts) * (len(modes) * (1 + args.warm) + len(names)))
    code = finish("bench ttft", args, files, {**settings, "crossover": found}, rows, expected, listing)
    for model, crossed in found.items():
        for mode, context in crossed.items():
            whose = f"{model}, {mode}" if len(found) > 1 else mode
            print(
                f"crossover: {whose} is faster than dense beyond the noise at {context:,} tokens and above"
                if context is not None
                else f"crossover: {whose} is not faster than dense beyond the noise at the longest context"
            )
    return code
