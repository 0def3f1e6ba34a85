"""Learn both looks of the default model's calibration from long prompts, and compare it with the shipped one.

Processes read calibration pairs in prompts of several lengths. The first look is fitted to all blocks of long
prompts: the best by the shipped weights, and a sample of the others. Blocks that rank high by weights which
have not seen their fact are read again with all layers, and the second look is fitted to them. Its kind of
window (a *view*) is chosen by cross-validation over facts. Then held-out pairs are planned with both
calibrations. Whatever time is left decides how many prompts each part reads; every part ends in time.

    python benchmarks/learn.py DIRECTORY [--device cuda] [--processes 12] [--seconds 280]

Writes DIRECTORY/calibration.json, table.txt and the captured features, features-N.npz.
"""

from __future__ import annotations

import json
import multiprocessing
import os
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
from views import hidden, likelihood

from skim.calibrate.capture import Reader, Trial, task_of
from skim.calibrate.fit import Fitted, fit
from skim.calibrate.judge import logits_of, rank_of
from skim.calibrate.run import features_of
from skim.calibrate.trials import Order, Prompt, Prompts, orders
from skim.config import DEFAULT_MODEL, ModelConfig
from skim.measure.book import packaged_text
from skim.models.load import load
from skim.models.source import prepare
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, Second, shipped
from skim.prefill.scoring.features import Feature, Name, Statistic, captures_of, names_of
from skim.prefill.scoring.second_look import choose, count_of

BEST, OTHERS = 512, 256  # blocks of a long prompt that the first look is fitted to
ENOUGH = 24  # blocks that 1,000 tokens hold beside pinned ones
KINDS = ("far", "code", "hops", "agent", "logs", "two", "shared")
WINDOWS = (128, 512, 2048)  # views that Skim can compute
SAVED = 96  # blocks of a prompt whose features are saved
MOST_BYTES, MOST_FILES = 14 << 20, 4  # of features


@dataclass
class Worker:
    """The state of a process: a model, and readers for it."""

    model: Any
    prompts: Prompts
    first: Reader
    again: dict[int, Reader]
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
        model,
        Prompts(model.tokenizer, packaged_text(), seed=0),
        first,
        {window: Reader(model, every, window) for window in WINDOWS},
        known,
    )


def read(order: Order) -> tuple[Prompt, Trial]:
    """The first look at a prompt, thinned if it is long."""
    prompt = worker.prompts.draw(order)
    trial = worker.first.read(prompt)
    if worker.known is not None:
        trial = trial.thinned(logits_of(trial, *worker.known), BEST, OTHERS, seed=order.number)
    return prompt, _smaller(trial)


def read_again(prompt: Prompt, trial: Trial, logits: np.ndarray) -> dict[str, Trial]:
    """The second look at a prompt, in every view."""
    found: dict[str, Trial] = {}
    for window, reader in worker.again.items():
        own = reader.read_again(prompt, trial, logits)
        if own is None:
            return {}
        found[f"window {window}"] = _smaller(own)
    task = task_of(prompt).only(own.blocks.tolist())
    module = worker.model.module
    for name, view in {"hidden": hidden, "likelihood": likelihood}.items():
        found[name] = _smaller(replace(own, features=view(module, task)))
    return found


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


def joined(views: dict[str, Trial], names: Sequence[str]) -> Trial:
    """One trial with the features of several views."""
    return replace(views[names[0]], features=np.concatenate([views[name].features for name in names]))


def report(title: str, trials: Sequence[Trial], ranks: Sequence[int], lengths: Sequence[int]) -> None:
    """Print the share of prompts with all evidence among the best `ENOUGH` blocks, by kind and length."""
    kinds = list(dict.fromkeys(trial.kind for trial in trials))
    print(f"{title}: % in the best {ENOUGH} blocks; {' '.join(kinds)}; all")
    for length in sorted(set(lengths)):
        shares = []
        for kind in (*kinds, None):
            own = [
                rank < ENOUGH
                for trial, rank, at in zip(trials, ranks, lengths, strict=True)
                if at == length and kind in (None, trial.kind)
            ]
            shares.append(f"{100 * sum(own) / len(own):.0f}/{len(own)}" if own else "-")
        print(f"  {length:7}: {'  '.join(shares)}", flush=True)


def rank_after(first: Trial, logits: np.ndarray, again: Trial, second: np.ndarray) -> int:
    """The rank of the evidence after a second look: blocks that were not read again follow."""
    return rank_of(again, second) if all(again.evidence) else max(ENOUGH, rank_of(first, logits))


def save(directory: Path, name: str, trials: Sequence[Trial]) -> None:
    """Save features in bytes, a sixteenth of a standard deviation each: the best blocks and the evidence."""
    parts: dict[str, np.ndarray] = {}
    about: list[Any] = []
    size = number = 0

    def write() -> None:
        np.savez_compressed(directory / f"{name}-{number}.npz", about=np.array(json.dumps(about)), **parts)

    for index, trial in enumerate(trials):
        logits = trial.given[0]
        best = set(np.argsort(-logits, kind="stable")[:SAVED].tolist())
        columns = sorted(best | {column for own in trial.evidence for column in own})
        place = {column: at for at, column in enumerate(columns)}
        features = np.clip(np.round(16 * trial.features[:, columns].astype(np.float32)), -127, 127)
        if size + features.size > 1.05 * MOST_BYTES and parts:  # bytes shrink by a tenth or more
            write()
            parts, about, size, number = {}, [], 0, number + 1
            if number == MOST_FILES:
                return
        size += features.size
        parts[f"features{index}"] = features.astype(np.int8)
        parts[f"given{index}"] = trial.given[:, columns].astype(np.float16)
        parts[f"blocks{index}"] = trial.blocks[columns]
        about.append(
            [index, trial.kind, trial.pair, [[place[column] for column in own] for own in trial.evidence]]
        )
    if parts:
        write()


def learn(options: Any, pool: ProcessPoolExecutor, out: Path, at: Callable[[float], float]) -> Calibration:
    device = torch.device(options.device)
    wanted = orders(options.rounds, True, options.trials, options.lengths)
    wanted.sort(key=lambda order: order.turn)
    futures = [pool.submit(read, order) for order in wanted]
    pairs = [pair for _, pair in results(futures, at(0.35))]
    prompts = [prompt for prompt, _ in pairs]
    firsts = [_larger(trial) for _, trial in pairs]
    tell(f"{at(0) * -1:.0f} s: {len(firsts)} of {len(wanted)} prompts read")
    lengths = [prompt.order.context for prompt in prompts]
    first = fit(firsts, device)
    unseen = [first.unseen_logits(trial) for trial in firsts]
    report("first look, facts left out in turn", firsts, list(map(rank_of, firsts, unseen)), lengths)
    recall(firsts, unseen, lengths)
    tell(f"{at(0) * -1:.0f} s: first look fitted: loss {first.loss:.3f}, penalty {first.penalty}")

    both = list(zip(prompts, firsts, unseen, strict=True))
    long = [one for one in both if count_of(one[1].total)]
    long.sort(key=lambda one: -one[0].order.context)
    light = [(prompt, replace(trial, features=trial.features[:0]), own) for prompt, trial, own in long]
    futures = [pool.submit(read_again, *one) for one in light]
    kept = [(long[index], views) for index, views in results(futures, at(0.55)) if views]
    tell(f"{at(0) * -1:.0f} s: {len(kept)} of {len(long)} prompts read again")
    if not kept:
        return _calibration(first, options.layers, len(firsts), None)
    own_lengths = [one[0].order.context for one, _ in kept]
    best: tuple[Fitted, int] | None = None
    sets = [[f"window {window}"] for window in WINDOWS]
    sets += [["window 512", "hidden"], ["window 512", "likelihood"], ["window 512", "window 128"]]
    sets += [["window 512", "window 128", "hidden", "likelihood"]]
    for names in sets:
        trials = [_larger(joined(views, names)) for _, views in kept]
        usable = [trial for trial in trials if any(trial.evidence)]
        fitted = fit(usable, device, prior=(1.0, 0.0, 0.0))
        ranks = [
            rank_after(one[1], one[2], trial, fitted.unseen_logits(trial))
            for (one, _), trial in zip(kept, trials, strict=True)
        ]
        report(
            f"second look, {' + '.join(names)}, loss {fitted.loss:.4f}, penalty {fitted.penalty}",
            trials,
            ranks,
            own_lengths,
        )
        if len(names) == 1 and (best is None or fitted.loss < best[0].loss):
            best = fitted, int(names[0].split()[1])
        if at(0.68) < time.monotonic():
            tell("no time for the other views")
            break
    assert best is not None
    chosen, window = best
    tell(f"{at(0) * -1:.0f} s: second look fitted, windows of {window}")
    saved = (f"window {window}", "hidden", "likelihood")
    save(out, "features", [joined(views, saved) for _, views in kept])
    return _calibration(first, options.layers, len(firsts), (chosen, window))


def recall(trials: Sequence[Trial], logits: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Print the share of prompts whose evidence the second look would read, by length."""
    for length in sorted(set(lengths)):
        own = [(t, x) for t, x, at in zip(trials, logits, lengths, strict=True) if at == length]
        if count := count_of(own[0][0].total):
            hits = []
            for trial, values in own:
                whole = np.full(int(trial.blocks.max()) + 2, values.min() - 1)
                whole[trial.blocks] = values
                chosen = set(choose(whole, count).tolist())
                hits.append(all(chosen & {int(trial.blocks[c]) for c in one} for one in trial.evidence))
            print(f"  {length:7}: {100 * np.mean(hits):.0f}% would be read again in {count} blocks")


def _larger(trial: Trial) -> Trial:
    return replace(trial, features=trial.features.astype(np.float32))


def _calibration(first: Fitted, layers: int, trials: int, second: tuple[Fitted, int] | None) -> Calibration:
    known = _names(layers)
    features = features_of(known, first.weights)
    again = None
    if second is not None:
        fitted, window = second
        own, shared, similar = fitted.given
        every = _names(len(fitted.weights) // (len(first.weights) // layers))
        if weighed := features_of(every, fitted.weights):
            again = Second(weighed, own, (shared, similar), window)
    return Calibration(
        tuple(sorted({feature.layer for feature in features})),
        features,
        (first.given[0], first.given[1]),
        DEFAULT_MODEL,
        trials,
        second=again,
    )


def _names(layers: int) -> list[Name]:
    """The names of all features of the first layers, in the order of a `Reader`."""
    config = json.loads((prepare(DEFAULT_MODEL) / "config.json").read_text())
    heads = range(int(config["num_attention_heads"]))
    every = [Feature(one, layer, head, 1.0) for layer in range(layers) for head in heads for one in Statistic]
    return names_of(captures_of(every))


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
    parser.add_argument("--lengths", type=positive, nargs="+", default=[8000, 32_000, 128_000, 64_000])
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--trials", type=positive)
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--n", type=positive, default=40)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[128_000, 32_000, 7000])
    parser.add_argument(
        "--kinds", nargs="+", default=["far", "code", "hops", "agent", "logs", "two", "shared"]
    )
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
    models = {"new": str(links), "old": DEFAULT_MODEL}
    with processes(options.processes, begin, (options.device, options.dtype, options.layers, models)) as pool:
        if options.calibration is None:
            new = learn(options, pool, out, at)
            new.save(out / "calibration.json")
            tell(f"{at(0) * -1:.0f} s: calibration written")
        else:
            new = Calibration.load(options.calibration)
        put_beside(new, links)
        cells = [compared.Cell(kind, tokens) for tokens in options.contexts for kind in options.kinds]
        jobs = [
            pool.submit(compared.compare, cell, number, which)
            for which in ("new", *(["old"] if options.old else []))
            for number in range(options.n)
            for cell in cells
        ]
        found = [one for _, one in results(jobs, at(0.97))]
    text = compared.table(found)
    print(text, flush=True)
    (out / "table.txt").write_text(text)
    tell(f"{at(0) * -1:.0f} s: {len(found)} of {len(jobs)} comparisons")
    return 0


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
