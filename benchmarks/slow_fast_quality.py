"""Quality of slow-fast decode with the default model: every kind of `skim eval` against dense, and `agree`.

    PYTHONPATH=src python benchmarks/slow_fast_quality.py DIRECTORY [--device cuda] [--n 50]

One process per kind, all at once; their reports are in DIRECTORY. Prints a table of scores and differences in
points, and exits with 1 if a kind loses more than 2 points or `agree` is below 97%. With 50 samples, one
answer more or less is 2 points. `agree` has two controls: fast-only has no slow steps but the first, and
refresh-only reads the latest blocks in place of the best.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from script import parser_of, positive, run, tell

from skim.config import DEFAULT_MODEL
from skim.measure.report import Report
from skim.models.source import prepare

LOSS = 0.02  # of a kind's score, at most
AGREEMENT = 0.97  # at least, of the tokens that dense decode finds most likely
TEXTS, TOKENS = 8, 64  # of `agree`: 512 tokens in all
KINDS = {
    "evidence": (
        "shared",
        "far",
        "next",
        "two",
        "code",
        "table",
        "logs",
        "hops",
        "quote",
        "agent",
        "summary",
    ),
    "needle": ("single", "reworded", "similar", "multi-key", "multi-value", "four"),
    "turns": ("other", "same"),
    "trace": ("chain", "decoy"),
    "count": ("words",),
    "quote": ("passage", "code"),
}
ARMS = ("slow-fast", "fast-only", "refresh-only")


class Part(NamedTuple):
    """One process."""

    task: str
    kind: str
    command: tuple[str, ...]


def parts(
    settings: list[str], budget: int, context: int, n: int, tasks: list[str], others: list[str]
) -> Iterator[Part]:
    common = ["--contexts", str(context), "--no-controls", *settings]
    modes = [f"{arm},decode_budget={budget}" for arm in ARMS]
    modes += [f"{ARMS[0]},decode_budget={budget},{one}" for one in others]
    if "agree" in tasks:
        length = ["--n", str(TEXTS), "--tokens", str(TOKENS)]
        yield Part("agree", "text", ("agree", *length, "--modes", *modes, *common))
    for task, kinds in KINDS.items():
        for kind in kinds if task in tasks else ():
            chosen = ["--kinds", kind] if len(kinds) > 1 else []
            yield Part(task, kind, (task, *chosen, "--n", str(n), "--modes", "dense", modes[0], *common))


def scores(path: Path) -> dict[str, float]:
    """The scores of a report, by arm. Raises if a row has failed."""
    report = Report.from_json(path.read_text())
    if report.failures:
        raise SystemExit(f"{path}: {report.failures[0].failed}")
    return {str(row.key["mode"]): row.figures["score"].value for row in report.rows}


def judge(part: Part, found: dict[str, float]) -> bool:
    """Print a part's scores; False if a bound is missed. The first mode is ours, after dense."""
    if part.task == "agree":
        ours = next(iter(found.values()))
        for mode, value in found.items():
            print(f"agree with dense: {mode:60} {value:6.1%}")
        print(f"agree with dense: bound {AGREEMENT:.0%}{'' if ours >= AGREEMENT else '  MISSED'}")
        return ours >= AGREEMENT
    dense, ours = found.values()
    met = ours >= dense - LOSS - 1e-9
    numbers = f"dense {dense:6.1%}  slow-fast {ours:6.1%}  {100 * (ours - dense):+5.1f} points"
    print(f"{f'{part.task} {part.kind}':22} {numbers}{'' if met else '  MISSED'}")
    return met


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=positive, default=7000)
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--n", type=positive, default=50)
    parser.add_argument("--tasks", nargs="+", choices=["agree", *KINDS], default=["agree", *KINDS])
    parser.add_argument(
        "--settings", nargs="+", default=[], help="further arms of agree: refresh_interval=16"
    )
    parser.add_argument("--at-once", type=positive, default=26, help="processes")
    args = parser.parse_args()
    prepare(DEFAULT_MODEL)  # once, before many processes would
    args.directory.mkdir(parents=True, exist_ok=True)
    settings = ["--device", args.device, "--dtype", "float32", "--kv-memory", "2G"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun, waiting = (
        time.perf_counter(),
        list(parts(settings, args.budget, args.context, args.n, args.tasks, args.settings)),
    )
    every, running, met = list(waiting), {}, True
    while waiting or running:
        while waiting and len(running) < args.at_once:
            part = waiting.pop(0)
            place = args.directory / f"{part.task}-{part.kind}"
            with place.with_suffix(".log").open("w") as log:
                command = [sys.executable, "-m", "skim", "eval", *part.command, "--json", f"{place}.json"]
                running[part] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for part in [part for part, process in running.items() if process.poll() is not None]:
            code = running.pop(part).returncode
            tell(f"{part.task} {part.kind}: exit {code}, {time.perf_counter() - begun:.0f} s")
        time.sleep(0.2)
    for part in every:
        place = args.directory / f"{part.task}-{part.kind}"
        if not place.with_suffix(".json").exists():
            print(f"{part.task} {part.kind}: failed; see {place}.log")
            met = False
            continue
        met = judge(part, scores(place.with_suffix(".json"))) and met
    print(
        f"context {args.context:,}, budget {args.budget:,}, n = {args.n}; {time.perf_counter() - begun:.0f} s"
    )
    return int(not met)


if __name__ == "__main__":
    run(main)
