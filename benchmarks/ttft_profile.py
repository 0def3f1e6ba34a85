"""Where the time to a first token goes: the functions that the host was in, and what a GPU did meanwhile.

A thread looks at the stack of the measured one every half millisecond, so waiting counts as computing does.

    PYTHONPATH=src python benchmarks/ttft_profile.py [--shape qwen3-8b --drafter qwen3-0.6b]
        [--context 131072] [--mode cascade:0.05] [--repeats 5] [--before dense]

`--before` is a mode that is run before each repeat, uncounted: what a GPU has just done changes its clocks.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from device_work import device_work
from script import prompt_parser, run, start

import skim
from skim.bench.drive import FirstToken
from skim.bench.inputs import random_prompts
from skim.bench.turns import alone
from skim.measure.modes import parse_mode

SECONDS = 0.0005  # between two looks
LEAST_MS = 0.5  # a function that takes less is not shown
SOURCE = str(Path(skim.__file__).parent)


class Watcher:
    """Counts, at every look, the functions of Skim that a thread is in, each by its path from the first."""

    def __init__(self) -> None:
        self.looks: Counter[tuple[str, ...]] = Counter()
        self._watched = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SECONDS):
            path = _path(sys._current_frames().get(self._watched))
            for depth in range(1, len(path) + 1):
                self.looks[path[:depth]] += 1


def _path(frame: FrameType | None) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(SOURCE) and "/bench/" not in code.co_filename:
            found.append(f"{Path(code.co_filename).stem}.{code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(found))


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--before", default=None)
    args = parser.parse_args()

    mode, before = parse_mode(args.mode), parse_mode(args.before) if args.before else None
    driver = start(args.shape, args.drafter, max_model_len=args.context + 1024)
    model = driver.model
    prompts = random_prompts(model.vocab_size, 1)
    sys.setswitchinterval(SECONDS / 5)
    looks: Counter[tuple[str, ...]] = Counter()
    taken: list[FirstToken] = []

    def measure(repeat: int, counted: bool) -> None:
        prompt = prompts(args.context, repeat)
        with Watcher() as watcher:
            found = driver.first_token(prompt, mode.prefill)
        driver.forget()
        if counted:
            taken.append(found)
            looks.update(watcher.looks)

    for repeat in range(-1, args.repeats):
        if before is not None:
            alone(lambda: driver.first_token(prompts(args.context, 1000), before.prefill))
            driver.forget()
        alone(lambda repeat=repeat: measure(repeat, repeat >= 0))

    whole = sum(one.ttft for one in taken)
    share = whole / sum(count for path, count in looks.items() if len(path) == 1)
    for path in sorted(looks, key=lambda path: [(-looks[path[: i + 1]], path[i]) for i in range(len(path))]):
        spent = looks[path] * share / len(taken) * 1e3
        if spent >= LEAST_MS:
            print(f"{'  ' * (len(path) - 1)}{spent:7.1f} ms  {path[-1]}")
    print(
        f"{model.name}, {model.device}, {args.context:,} tokens, {args.mode}: "
        f"{statistics.median(one.ttft for one in taken) * 1e3:.1f} ms, each "
        f"{', '.join(f'{one.ttft * 1e3:.0f}' for one in taken)}"
    )
    if model.device.type == "cuda":
        driver.forget()
        prompt = random_prompts(driver.model.vocab_size, 2)(args.context, 0)
        print(alone(lambda: device_work(lambda: driver.first_token(prompt, mode.prefill))))


if __name__ == "__main__":
    run(main)
