"""A server on two cores beside busy processes, and beside another server: it keeps near its fair share.

    python benchmarks/neighbours.py [--prompt 512] [--tokens 48] [--repeats 5]

All processes are pinned to the same two cores. Servers with the default model take turns: one as it is, and
one whose OpenMP threads wait as the runtime does by default, as a control.

- *Idle*: the server must not be slower than the control. The bound leaves 5% for noise.
- *Busy*: two more processes run endless loops. Four runnable threads then share two cores, so the fair share
  of the server's two threads is half of the machine, and fair times are twice those of the idle machine.
  Decode and prefill may take 1.6 times that: 3.2 times as long as on the idle machine. The control has no
  bound.
- *Shared*: the server and another one like it answer at the same time. The same bounds apply: four threads
  want to run.

Needs an otherwise idle machine with two cores or more, on Linux. Times are the server's own, from its
replies. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from script import parser_of, positive, run, tell

from skim import cpu
from skim.config import DEFAULT_MODEL

CORES = 2
LOOPS = 2
FAIR = (CORES + LOOPS) / CORES  # times as long as alone, if every runnable thread has the same share
SLOWER_THAN_FAIR = 1.6
IDLE_NOISE = 1.05
PHASES = ("decode", "prefill")
MACHINES = ("idle", "busy", "shared")


@dataclass
class Server:
    """A running `skim serve`. `times` has milliseconds by (machine, phase)."""

    name: str
    url: str
    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def measure(self, machine: str, prompt: list[int], tokens: int) -> None:
        body = {
            "model": DEFAULT_MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skim": {"use_prefix_cache": False},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            report = json.load(reply)["skim"]
        self.times.setdefault((machine, "decode"), []).append(report["decode_ms"] / (tokens - 1))
        self.times.setdefault((machine, "prefill"), []).append(report["prefill_ms"])

    def median(self, machine: str, phase: str) -> float:
        return statistics.median(self.times[machine, phase])


@contextlib.contextmanager
def serving(name: str, variables: dict[str, str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "skim", "serve", "--device", "cpu", "--kv-memory", "512M", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in clean()} | variables
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"ready: .* on (http://[\d.:]+)", line):
                    yield Server(name, found[1])
                    return
            sys.exit(f"the server {name} ended before it was ready")
        finally:
            process.terminate()


def clean() -> set[str]:
    """Variables that would change what is measured, such as those that importing Skim has set here."""
    return {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check(what: str, value: float, bound: float) -> bool:
    print(f"{what:<44} {value:6.2f}  <= {bound:.2f}  {'ok' if value <= bound else 'MISSED'}")
    return value <= bound


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompt", type=positive, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=48, help="generated (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args()
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < CORES or args.tokens < 2:
        parser.error(f"needs Linux, {CORES} cores, and at least 2 tokens")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])

    draw = random.Random(0)
    with (
        serving("skim", {}) as own,
        serving("other", {}) as other,
        serving("control", cpu.UNCHANGED) as control,
        ThreadPoolExecutor(2) as together,
    ):
        servers = [own, control]

        def measure(machine: str) -> None:
            for _ in range(args.repeats):
                for server in draw.sample(servers, 2):
                    prompt = [draw.randrange(1000, 40_000) for _ in range(args.prompt)]
                    server.measure(machine, prompt, args.tokens)

        for server in (*servers, other):
            server.measure("warm-up", list(range(1000, 1000 + args.prompt)), 8)
        tell("idle")
        measure("idle")
        with busy_loops():
            tell("busy")
            measure("busy")
        tell("shared")
        for _ in range(args.repeats):
            prompt = [draw.randrange(1000, 40_000) for _ in range(args.prompt)]
            list(together.map(lambda one, ids=prompt: one.measure("shared", ids, args.tokens), (own, other)))

    print(f"{args.prompt} prompt tokens, {args.tokens} generated, n={args.repeats}, medians in ms\n")
    print(f"{'':<10}{'phase':<10}{'idle':>10}{'busy':>10}{'shared':>10}")
    for server in servers:
        for phase in PHASES:
            machines = [machine for machine in MACHINES if (machine, phase) in server.times]
            figures = "".join(f"{server.median(machine, phase):>10.1f}" for machine in machines)
            print(f"{server.name:<10}{phase:<10}{figures}")
    print()

    def ratio(phase: str, one: tuple[Server, str], other: tuple[Server, str]) -> float:
        return one[0].median(one[1], phase) / other[0].median(other[1], phase)

    fair = FAIR * SLOWER_THAN_FAIR
    met = []
    for phase in PHASES:
        alone = ratio(phase, (own, "idle"), (control, "idle"))
        met += [check(f"{phase}, idle: skim / control", alone, IDLE_NOISE)]
        for machine in ("busy", "shared"):
            beside = ratio(phase, (own, machine), (own, "idle"))
            met += [check(f"{phase}: {machine} / idle", beside, fair)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    run(main)
