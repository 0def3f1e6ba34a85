"""Answers of the default model against dense: slow-fast decode, KV formats and sparse prefill, by kind.

    PYTHONPATH=src python benchmarks/quality.py DIRECTORY [--parts slow-fast formats sparse agree] [--n 50]
        [--tasks needle quote] [--device cpu --processes 1 --threads 2 --concurrency 1 --seconds 3000]

Several processes take one kind of question at a time; each has a model of its own, and asks for several
replies at once. Modes that read a prompt alike share it. A line is printed for each comparison, and reports
are written to DIRECTORY as they come. Exits with 1 if a kind loses more points than its part allows, if the
mean of `sparse` is below dense, if slow-fast decode agrees with dense in less than 97% of the tokens, or if
something failed. `agree` has two controls: fast-only has no slow steps but the first, and refresh-only reads
the latest blocks in place of the best.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from script import parser_of, positive, run, tell

from skim.config import DEFAULT_MODEL
from skim.evals.run import Cell
from skim.evals.run import run as run_task
from skim.evals.task import Task
from skim.evals.tasks import TASKS
from skim.evals.tasks.agree import Agree
from skim.llm import LLM
from skim.measure.book import packaged_text
from skim.measure.modes import DENSE, parse_mode
from skim.measure.report import Row, make_report
from skim.models.source import prepare

AGREEMENT = 0.97  # at least, of the tokens that dense decode finds most likely
TEXTS, TOKENS = 8, 64  # of `agree`: 512 tokens in all
BUDGET = "decode_budget=1024"
SLOW_FAST = f"slow-fast,{BUDGET}"
FORMATS = {"int8": 2, "k8v4": 3, "int4": 5}  # points that each may lose
SKIMMED = "blend:0.1"
EVIDENCE = ("shared", "far", "next", "two", "code", "table", "logs", "hops", "quote", "agent")
KINDS = {
    "needle": ("single", "reworded", "similar", "multi-key", "multi-value", "four"),
    "turns": ("other", "same"),
    "evidence": (*EVIDENCE, "summary"),
    "quote": ("passage", "code"),
    "trace": ("chain", "decoy"),
    "count": ("words",),
}
PARTS = ("slow-fast", "formats", "sparse", "agree")


class Comparison(NamedTuple):
    """A mode, the one it is judged by, and the points it may lose."""

    part: str
    mode: str
    against: str
    points: float


class Job(NamedTuple):
    """One kind of question, in all modes that are compared on it."""

    task: str
    kind: str
    comparisons: tuple[Comparison, ...]

    @property
    def modes(self) -> list[str]:
        named = [mode for one in self.comparisons for mode in (one.against, one.mode)]
        return list(dict.fromkeys(named))


def comparisons(task: str, kind: str, parts: list[str]) -> Iterator[Comparison]:
    if "slow-fast" in parts:
        yield Comparison("slow-fast", SLOW_FAST, DENSE, 2)
    if "formats" in parts and task in ("needle", "turns"):
        for name, points in FORMATS.items():
            yield Comparison("formats", f"{DENSE},kv_cache_dtype={name}", DENSE, points)
            if kind in ("single", "other"):  # skimmed needles, and follow-up questions to them
                yield Comparison("formats", f"{SKIMMED},kv_cache_dtype={name}", SKIMMED, points)
    if "sparse" in parts and task == "evidence" and kind in EVIDENCE:
        yield Comparison("sparse", SKIMMED, DENSE, 3)
        yield Comparison("sparse", "blend:auto", DENSE, 3)


def jobs(parts: list[str], tasks: list[str]) -> Iterator[Job]:
    if "agree" in parts:
        arms = (SLOW_FAST, f"fast-only,{BUDGET}", f"refresh-only,{BUDGET}")
        yield Job("agree", "text", tuple(Comparison("agree", arm, arm, 0) for arm in arms))
    for task in tasks:
        for kind in KINDS[task]:
            found = tuple(comparisons(task, kind, parts))
            if found:
                yield Job(task, kind, found)


class Worker(NamedTuple):
    """The state of a process."""

    llm: LLM
    context: int
    n: int
    concurrency: int


worker: Worker


def begin(context: int, n: int, concurrency: int, threads: int, settings: dict[str, Any]) -> None:
    global worker
    torch.set_num_threads(threads)
    worker = Worker(LLM(progress=False, **settings), context, n, concurrency)


def measure(job: Job) -> tuple[Job, list[Row]]:
    task = TASKS[job.task](packaged_text())
    cells = [Cell(job.kind, worker.context)]
    modes = [parse_mode(mode) for mode in job.modes]
    if isinstance(task, Agree):
        return job, task.run(worker.llm, cells, modes, n=TEXTS, seed=0, tokens=TOKENS)
    assert isinstance(task, Task)
    how: dict[str, Any] = {"n": worker.n, "seed": 0, "concurrency": worker.concurrency}
    return job, run_task(worker.llm, task, cells, modes, share_prompts=True, **how)


def judge(job: Job, rows: list[Row]) -> Iterator[tuple[Comparison, float, float, bool]]:
    """For each comparison: both scores, and whether its bound is met."""
    scores = {str(row.key["mode"]): row.figures["score"].value for row in rows}
    for one in job.comparisons:
        own, other = scores[one.mode], scores[one.against]
        if job.task == "agree":
            met = own >= AGREEMENT or one.mode != SLOW_FAST
        else:
            met = own >= other - one.points / 100 - 1e-9
        yield one, own, other, met


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tasks", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=positive, default=7000)
    parser.add_argument("--n", type=positive, default=50, help="one answer of 50 is 2 points")
    parser.add_argument("--processes", type=positive, default=4)
    parser.add_argument("--threads", type=positive, default=1, help="of a process")
    parser.add_argument("--concurrency", type=positive, default=16)
    parser.add_argument("--seconds", type=positive, default=560, help="stop after this time")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TOKENIZERS_PARALLELISM="false")
    prepare(DEFAULT_MODEL)  # once, before many processes would
    args.directory.mkdir(parents=True, exist_ok=True)
    settings = {"device": args.device, "dtype": args.dtype, "kv_memory": "8G", "enforce_eager": args.eager}
    waiting, done, met = list(jobs(args.parts, args.tasks)), 0, True
    means: dict[str, list[tuple[float, float]]] = {}
    own = (args.context, args.n, args.concurrency, args.threads, settings)
    with multiprocessing.get_context("spawn").Pool(args.processes, begin, own) as pool:
        results = pool.imap_unordered(measure, waiting)
        while done < len(waiting):
            try:
                job, rows = results.next(timeout=max(1.0, args.seconds - (time.perf_counter() - begun)))
            except multiprocessing.TimeoutError:
                break
            done += 1
            facts = {"n": args.n, "context": args.context, "concurrency": args.concurrency, **settings}
            facts["share_prompts"] = job.task != "agree"
            report = make_report(f"eval {job.task}", sys.argv, facts, rows, expected=len(job.modes))
            (args.directory / f"{job.task}-{job.kind}.json").write_text(report.to_json())
            failed = [row for row in rows if row.failed]
            for row in failed:
                print(f"{job.task} {job.kind}, {row.key['mode']}: failed: {row.failed}", flush=True)
            met = met and not failed
            for one, value, other, good in judge(job, rows) if not failed else ():
                means.setdefault(one.mode, []).append((value, other))
                print(
                    f"{one.part:9} {job.task:9}{job.kind:12}{one.mode:38} {value:6.1%}  {one.against:10} "
                    f"{other:6.1%}  {100 * (value - other):+6.1f}{'' if good else '  MISSED'}",
                    flush=True,
                )
                met = met and good
            tell(f"{job.task} {job.kind}: {time.perf_counter() - begun:.0f} s")
    for mode, pairs in means.items():
        value, other = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        print(f"mean of {len(pairs)} kinds: {mode:38} {value:6.1%}, against {other:6.1%}")
        met = met and (not mode.startswith("blend") or "kv_" in mode or value >= other)
    print(
        f"context {args.context:,}, n = {args.n}; {done} of {len(waiting)} kinds in "
        f"{time.perf_counter() - begun:.0f} s"
    )
    return int(not met or done < len(waiting))


if __name__ == "__main__":
    run(main)
