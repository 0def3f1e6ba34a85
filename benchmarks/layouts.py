"""Facts kept by layout with the default scorer and model: the cells of tests/prefill/test_layouts.py.

Runs them in several processes at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter

from skim import LLM
from skim.config import PrefillConfig
from tests.prefill.test_layouts import FACTS, document, is_kept, layouts


def lost(device: str, numbers: range, tokens: int) -> None:
    """Print a line for each layout: its name, facts lost and facts tried."""
    missed: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    with LLM(progress=False, device=device, dtype="float32", kv_memory="256M", enforce_eager=True) as llm:
        for number in numbers:
            fact, question = FACTS[number]
            for name, conversation in layouts(document(number, fact, tokens), question).items():
                tried[name] += 1
                missed[name] += not is_kept(llm, conversation, fact, PrefillConfig().scorer)
    for name, count in tried.items():
        print(f"{missed[name]}\t{count}\t{name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--facts", type=int, default=len(FACTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[7000, 30_000])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part", type=int, help="run only this part, in this process")
    args = parser.parse_args()
    step = len(FACTS) // args.facts
    if args.part is not None:
        lost(args.device, range(args.part * step, len(FACTS), args.processes * step), args.tokens[0])
        return
    for tokens in args.tokens:
        began = time.perf_counter()
        options = ["--device", args.device, "--facts", str(args.facts), "--tokens", str(tokens)]
        options += ["--processes", str(args.processes)]
        parts = [
            subprocess.Popen(
                [sys.executable, __file__, *options, "--part", str(part)], stdout=subprocess.PIPE, text=True
            )
            for part in range(min(args.processes, args.facts))
        ]
        missed: Counter[str] = Counter()
        tried: Counter[str] = Counter()
        for part in parts:
            for line in part.communicate()[0].splitlines():
                count, of, name = line.split("\t")
                missed[name] += int(count)
                tried[name] += int(of)
            if part.returncode:
                raise SystemExit(f"a part failed with status {part.returncode}")
        for name, of in tried.items():
            print(f"{tokens:6}  kept {of - missed[name]:3} of {of:3}  {name}")
        print(f"{tokens:6}  {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
