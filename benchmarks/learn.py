"""Learn both looks of the default model's calibration from long prompts, and measure it on held-out pairs.

Does what `skim calibrate` does, in several processes, with longer prompts. Of these, the first look is fitted
to a part of the blocks: the best by the shipped weights, and a sample of the others. Then held-out pairs are
planned with the new calibration, without its second look (*once*), and with the shipped one (`--old`). The
time decides how many prompts each part reads.

    python benchmarks/learn.py DIRECTORY [--device cuda] [--processes 12] [--seconds 280]

Writes DIRECTORY/calibration.json and table.txt.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compared
import numpy as np
import torch
from script import parser_of, positive, run, tell

from skim.calibrate.capture import Reader, Trial
from skim.calibrate.fit import fit
from skim.calibrate.judge import judge, logits_of
from skim.calibrate.looks import WINDOW, Twice, features_of, fit_second, judge_looks, second_of
from skim.calibrate.trials import Order, Prompt, Prompts, judged_orders, orders
from skim.config import DEFAULT_MODEL, ModelConfig
from skim.measure.book import packaged_text
from skim.models.load import load
from skim.models.source import prepare
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, shipped
from skim.prefill.scoring.features import Name
from skim.prefill.scoring.second_look import count_of

BEST, OTHERS = 512, 256  # blocks of a long prompt that the first look is fitted to
JUDGED = 81  # held-out prompts that the first look is judged by
PART_SECONDS = 15.0  # between two tables
KINDS = ("far", "code", "hops", "agent", "logs", "two", "shared")


@dataclass
class Worker:
    """The state of a process: a model, and readers for it."""

    prompts: Prompts
    first: Reader
    again: Reader
    known: tuple[list[float], tuple[float, float]] | None  # weights of the shipped calibration


worker: Worker


def begin(device: str, dtype: str, layers: int, models: dict[str, str]) -> None:
    """Load the model in a process. `models` are directories or names to compare later, by calibration."""
    global worker
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    compared.begin(models, {"device": device, "dtype": dtype, "kv_memory": "1G"})
    model = load(prepare(DEFAULT_MODEL), ModelConfig(device=device, dtype=dtype))
    every = int(model.module.config.get_text_config().num_hidden_layers)
    first = Reader(model, layers)
    old = shipped(DEFAULT_MODEL)
    known = None
    if old is not None and old.features is not None and old.words is not None:
        table = {feature[:3]: feature.weight for feature in old.features}
        known = [table.get(name, 0.0) for name in first.names], old.words
    worker = Worker(
        Prompts(model.tokenizer, packaged_text(), seed=0),
        first,
        Reader(model, every, WINDOW),
        known,
    )


def read(order: Order) -> tuple[Prompt, Trial]:
    """The first look at a prompt, thinned if it is long."""
    prompt = worker.prompts.draw(order)
    trial = worker.first.read(prompt)
    if worker.known is not None:
        trial = trial.thinned(logits_of(trial, *worker.known), BEST, OTHERS, seed=order.number)
    return prompt, _smaller(trial)


def read_again(prompt: Prompt, trial: Trial, logits: np.ndarray) -> Trial | None:
    """The second look at a prompt."""
    found = worker.again.read_again(prompt, trial, logits)
    return None if found is None else _smaller(found)


def names() -> tuple[list[Name], list[Name]]:
    """The features of the first look and of the second."""
    return worker.first.names, worker.again.names


def _smaller(trial: Trial) -> Trial:
    """In half the bytes, for the way between processes."""
    return replace(trial, features=trial.features.astype(np.float16))


def results(futures: Sequence[Future[Any]], until: float) -> Iterator[tuple[int, Any]]:
    """The results that are there in time, with their indices. The rest is cancelled, and errors are told."""
    wait(futures, timeout=max(0.0, until - time.monotonic()))
    errors = 0
    for index, future in enumerate(futures):
        if not future.done():
            future.cancel()
        elif (error := future.exception()) is None:
            yield index, future.result()
        else:
            errors += 1
            if errors <= 3:
                tell(f"failed: {type(error).__name__}: {error}")
    if errors:
        tell(f"{errors} of {len(futures)} failed")


def learn(options: Any, pool: ProcessPoolExecutor, at: Callable[[float], float]) -> Calibration:
    device = torch.device(options.device)
    wanted = orders(options.rounds, True, options.trials, options.lengths)
    random.Random(0).shuffle(wanted)  # a cut leaves some of every kind
    wanted.sort(key=lambda order: order.turn)
    named = pool.submit(names)
    pairs = [
        pair for _, pair in results([pool.submit(read, order) for order in wanted], at(options.shares[0]))
    ]
    prompts = [prompt for prompt, _ in pairs]
    firsts = [_larger(trial) for _, trial in pairs]
    tell(f"{at(0) * -1:.0f} s: {len(firsts)} of {len(wanted)} prompts read")
    first = fit(firsts, device)
    tell(f"{at(0) * -1:.0f} s: first look fitted: loss {first.loss:.3f}, penalty {first.penalty}")

    judged = results(
        [pool.submit(read, order) for order in judged_orders(True, JUDGED)], at(options.shares[1])
    )
    quality = judge([_larger(trial) for _, (_, trial) in judged], first.weights, first.given)

    every = [
        (prompt, trial, first.unseen_logits(trial)) for prompt, trial in zip(prompts, firsts, strict=True)
    ]
    long = [one for one in every if count_of(one[1].total)]
    light = [(prompt, replace(trial, features=trial.features[:0]), own) for prompt, trial, own in long]
    again = results([pool.submit(read_again, *one) for one in light], at(options.shares[1]))
    twice = [Twice(*long[index][1:], _larger(trial)) for index, trial in again if trial is not None]
    second = fit_second(twice, device)
    tell(f"{at(0) * -1:.0f} s: {len(twice)} of {len(long)} prompts read again")
    if second is not None:
        tell(f"second look fitted: loss {second.loss:.3f}, was {second.before:.3f}, penalty {second.penalty}")
        tell(f"given: {second.given}, {sum(map(bool, second.weights))} features")
        for kind, figures in judge_looks(twice, second).items():
            tell(f"  {kind}: {figures}")
            quality.setdefault(kind, {}).update(figures)
    of_first, of_second = named.result()
    features = features_of(of_first, first.weights)
    return Calibration(
        tuple(sorted({feature.layer for feature in features})),
        features,
        (first.given[0], first.given[1]),
        DEFAULT_MODEL,
        len(firsts),
        quality,
        second=None if second is None else second_of(of_second, second),
    )


def _larger(trial: Trial) -> Trial:
    return replace(trial, features=trial.features.astype(np.float32))


def put_beside(calibration: Calibration, directory: Path) -> None:
    """Make a directory of the default model with another calibration: links to its files."""
    directory.mkdir(parents=True)
    for file in prepare(DEFAULT_MODEL).iterdir():
        if file.name != FILE_NAME:
            (directory / file.name).symlink_to(file)
    calibration.save(directory / FILE_NAME)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--processes", type=positive, default=12)
    parser.add_argument("--seconds", type=positive, default=280)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[8000, 32_000, 128_000, 16_000])
    parser.add_argument(
        "--shares",
        type=float,
        nargs=2,
        default=[0.3, 0.46],
        help="of the time, at which each look has been read",
    )
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--trials", type=positive)
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--n", type=positive, default=40)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[128_000, 32_000, 7000])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument(
        "--calibration", type=Path, help="compare only: a calibration that was learned before"
    )
    parser.add_argument("--old", action="store_true", help="compare the shipped calibration too")
    parser.add_argument("--links", type=Path, default=Path("/tmp"), help="directory for links to the model")
    options = parser.parse_args()
    out: Path = options.directory
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def at(share: float) -> float:
        """The moment at which this share of the time is spent; for 0, minus the seconds since the start."""
        return began + share * options.seconds if share else began - time.monotonic()

    os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    prepare(DEFAULT_MODEL)
    links = options.links / f"model-{os.getpid()}"
    once = links.with_name(f"{links.name}-once")
    models = {"new": str(links), "once": str(once), "old": DEFAULT_MODEL}
    with processes(options.processes, begin, (options.device, options.dtype, options.layers, models)) as pool:
        if options.calibration is None:
            new = learn(options, pool, at)
            new.save(out / "calibration.json")
            tell(f"{at(0) * -1:.0f} s: calibration written")
        else:
            new = Calibration.load(options.calibration)
        put_beside(new, links)
        put_beside(replace(new, second=None), once)
        cells = [compared.Cell(kind, tokens) for tokens in options.contexts for kind in options.kinds]
        jobs = [
            pool.submit(compared.compare, cell, number, which)
            for which in ("new", "once", *(["old"] if options.old else []))
            for number in range(options.n)
            for cell in (cells if which == "new" else reversed(cells))  # the shortest are cheap
        ]
        found: list[compared.Comparison] = []
        for some in in_parts(jobs, at(0.97)):
            found += some
            (out / "table.txt").write_text(compared.table(found))
    print(compared.table(found), flush=True)
    tell(f"{at(0) * -1:.0f} s: {len(found)} of {len(jobs)} comparisons")
    return 0


def in_parts(jobs: Sequence[Future[Any]], until: float) -> Iterator[list[Any]]:
    """Results as they come, every few seconds, so that a cut loses little."""
    waiting = set(jobs)
    while waiting and time.monotonic() < until:
        done, waiting = wait(waiting, timeout=min(PART_SECONDS, max(0.0, until - time.monotonic())))
        for job in done:
            if (error := job.exception()) is not None:
                tell(f"failed: {type(error).__name__}: {error}")
        yield [job.result() for job in done if job.exception() is None]


@contextmanager
def processes(count: int, begin: Callable[..., None], own: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes, which end at once with the block, whatever they work on."""
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), begin, own)
    try:
        yield pool
    finally:
        started = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()


if __name__ == "__main__":
    run(main)
