"""Measure the promised figures on one H200: time to first token and decode steps of model shapes in bfloat16.

Weights are random, so nothing is downloaded. Every figure is a median of `--repeats` runs. Sparse prefill is
compared with Skim's own dense prefill in the same process. The exit status is 1 if a target is missed, or a
row or a kernel fails.

    PYTHONPATH=src:. python benchmarks/gpu.py [--kernels] [--only 8b 32b 0.6b] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
import triton
from script import need_cuda, parser_of, positive, run, start

from skim.bench import decode, ttft
from skim.bench.ceiling import Ceiling, measure_ceiling
from skim.bench.drive import Driver
from skim.bench.inputs import random_prompts
from skim.bench.work import work_of
from skim.measure.modes import parse_mode
from skim.measure.report import Figure, Row

WINDOW = 132_096
LONGEST, LONG, MIDDLE, SHORT = 1_048_576, 131_072, 32_768, 1_024
SPARSE = "blocksparse:0.97"  # the threshold at which random weights read about a tenth of the blocks
STEPS = 30


@dataclass(frozen=True)
class Line:
    """One target and its measurement."""

    what: str
    measured: str
    target: str
    met: bool


class Bench:
    """Measures one shape at a time and collects the rows of the report."""

    def __init__(self, repeats: int, ceiling: Ceiling) -> None:
        self.repeats = repeats
        self.ceiling = ceiling
        self.rows: list[dict[str, object]] = []

    def open(self, shape: str, drafter: str | None, kv_memory: str = "auto") -> Driver:
        return start(shape, drafter, device="cuda", max_model_len=WINDOW, kv_memory=kv_memory)

    def ttft(self, driver: Driver, context: int, *modes: str) -> dict[str, Row]:
        task = ttft.Task([context], [parse_mode(mode) for mode in modes], [], self.repeats)
        return self._keep(driver, ttft.measure_ttft(driver, task, *self._given(driver)), "mode")

    def decode(self, driver: Driver, context: int, *batches: int) -> dict[str, Row]:
        task = decode.Task([context], batches, [parse_mode("dense")], [], self.repeats, STEPS)
        return self._keep(driver, decode.measure_decode(driver, task, *self._given(driver)), "batch")

    def _given(self, driver: Driver) -> tuple[object, ...]:
        model = driver.model
        return random_prompts(model.vocab_size, 0), work_of(model.module, model.layers), self.ceiling, tell

    def _keep(self, driver: Driver, rows: list[Row], by: str) -> dict[str, Row]:
        for row in rows:
            if row.failed is not None:
                raise SystemExit(f"{driver.model.name} {dict(row.key)} failed: {row.failed}")
            figures = {name: asdict(figure) for name, figure in row.figures.items()}
            self.rows.append({"model": driver.model.name, **row.key, "figures": figures})
        return {str(row.key[by]): row for row in rows}


def tell(text: str) -> None:
    print(f"  [{time.perf_counter() - BEGUN:5.0f} s] {text}", file=sys.stderr)


def first(row: Row) -> float:
    return row.figures["ttft"].value


def seconds(figure: Figure) -> str:
    return f"{figure.value:.3f} s ({figure.low:.3f}-{figure.high:.3f})"


def step(row: Row) -> str:
    figure = row.figures["step"]
    return (
        f"{figure.value:.2f} ms ({figure.low:.2f}-{figure.high:.2f}), floor {row.figures['floor'].value:.2f}"
    )


def skimmed(name: str, dense: Row, sparse: Row, most: float | None, least: float | None) -> Line:
    ratio = first(dense) / first(sparse)
    parts = ", ".join(f"{part} {sparse.figures[part].value * 1e3:.0f} ms" for part in ("scoring", "prefill"))
    wanted = [f"<= {most} s"] if most else []
    wanted += [f">= {least:.0f}x"] if least else []
    met = (most is None or first(sparse) <= most) and (least is None or ratio >= least)
    measured = f"{seconds(sparse.figures['ttft'])}, {ratio:.1f}x faster than {first(dense):.2f} s; {parts}"
    return Line(name, measured, ", ".join(wanted), met)


def measure_8b(bench: Bench) -> Iterator[Line]:
    driver = bench.open("qwen3-8b", "qwen3-0.6b")
    rows = bench.ttft(driver, LONG, "dense", "blend:0.05", SPARSE)
    dense, sparse = rows["dense"], rows[SPARSE]
    yield skimmed("8B, 128K, keep 0.05, drafter 0.6B", dense, rows["blend:0.05"], 0.29, 40)
    scoring = rows["blend:0.05"].figures["scoring"]
    yield Line("8B, 128K, scoring of all of it", seconds(scoring), "<= 0.110 s", scoring.value <= 0.11)
    measured = seconds(dense.figures["ttft"])
    yield Line("8B, 128K, dense prefill", measured, "<= 12.5 s", first(dense) <= 12.5)
    share = sparse.figures["blocks"].value
    measured = f"{seconds(sparse.figures['ttft'])}, {share:.1%} of blocks read"
    met = first(sparse) <= 6.0 and 0.08 <= share <= 0.12
    yield Line("8B, 128K, block-sparse, 10% of blocks", measured, "<= 6.0 s", met)
    rows = bench.ttft(driver, MIDDLE, "dense", "blend:0.1", "blend:0.05")
    yield skimmed("8B, 32K, keep 0.10, drafter 0.6B", rows["dense"], rows["blend:0.1"], 0.17, None)
    yield skimmed("8B, 32K, keep 0.05, drafter 0.6B", rows["dense"], rows["blend:0.05"], 0.095, None)
    longest = bench.ttft(driver, LONGEST, f"blend:{MIDDLE}t")[f"blend:{MIDDLE}t"]
    measured = f"{seconds(longest.figures['ttft'])}, {longest.figures['scoring'].value:.2f} s of it scoring"
    yield Line("8B, 1M, keep 32K tokens, compact", measured, "<= 2.5 s", first(longest) <= 2.5)
    one = bench.decode(driver, SHORT, 1)["1"]
    yield Line("8B, decode, batch 1, 1K", step(one), "<= 5.2 ms", one.figures["step"].value <= 5.2)
    four = bench.decode(driver, LONG, 4)["4"]
    yield Line("8B, decode, batch 4, 128K", step(four), "<= 27 ms", four.figures["step"].value <= 27)


def measure_small(bench: Bench) -> Iterator[Line]:
    driver = bench.open("qwen3-0.6b", None)
    many = bench.decode(driver, SHORT, 64)["64"]
    measured = f"{step(many)}; {many.figures['throughput'].value:,.0f} tok/s"
    yield Line("0.6B, decode, batch 64, 1K", measured, "<= 3.4 ms", many.figures["step"].value <= 3.4)


def measure_32b(bench: Bench) -> Iterator[Line]:
    driver = bench.open("qwen3-32b", "qwen3-0.6b", kv_memory="40G")  # "auto" would run a step of seconds
    rows = bench.ttft(driver, LONG, "dense", "blend:0.05")
    yield skimmed("32B, 128K, keep 0.05, drafter 0.6B", rows["dense"], rows["blend:0.05"], None, 35)


PARTS = {"8b": measure_8b, "0.6b": measure_small, "32b": measure_32b}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", action="store_true", help="first compare each kernel with its oracle")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if torch.version.cuda is None:
        parser.error("needs a CUDA device, but this torch is built without CUDA")
    sound = True
    if args.kernels:  # before this process opens a CUDA context
        from tests.deal import KERNEL_TESTS, deal  # needs pytest

        print("kernels against their oracles: ", end="")
        sound = deal(KERNEL_TESTS)
    need_cuda(parser)  # opens a CUDA context
    logging.basicConfig(format="  %(message)s")
    logging.getLogger("skim").setLevel(logging.INFO)
    device = torch.device("cuda")
    ceiling = measure_ceiling(device, torch.bfloat16)
    versions = (
        f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    )
    machine = f"{torch.cuda.get_device_name()}, {versions}, Python {platform.python_version()}"
    print(f"{machine}; {ceiling.flops / 1e12:,.0f} TFLOP/s and {ceiling.bandwidth / 1e9:,.0f} GB/s measured")
    bench = Bench(args.repeats, ceiling)
    lines: list[Line] = []
    for part in args.only:
        for line in PARTS[part](bench):
            lines.append(line)
            print(f"  {line.what}: {line.measured}", file=sys.stderr)
        if args.json:
            report = {"machine": machine, "ceiling": asdict(ceiling), "rows": bench.rows}
            args.json.write_text(json.dumps(report, indent=1))
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\nmedians of {args.repeats} runs (min-max)\n")
    print("| | measured | target | |\n|---|---|---|---|")
    for line in lines:
        print(f"| {line.what} | {line.measured} | {line.target} | {'met' if line.met else '**missed**'} |")
    print(f"\n{time.perf_counter() - BEGUN:.0f} s")
    return 0 if sound and all(line.met for line in lines) else 1


BEGUN = time.perf_counter()

if __name__ == "__main__":
    run(main)
