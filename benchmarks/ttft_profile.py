"""Profile the time to first token: by function on the host, and by kernel on a GPU.

A sampling profiler reads the measured thread's stack every half millisecond, so waiting counts as well.

    PYTHONPATH=src python benchmarks/ttft_profile.py [--shape qwen3-8b --drafter qwen3-0.6b]
        [--context 131072] [--mode blend:0.05] [--repeats 5] [--before dense]

`--before` is a mode to run before each repeat, not counted: a GPU's clocks depend on its recent work.
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

SECONDS = 0.0005  # between two samples
LEAST_MS = 0.5  # functions that take less are not shown
SOURCE = str(Path(skim.__file__).parent)


class StackSampler:
    """Counts, at every sample, Skim's functions on the creating thread's stack, by call path."""

    def __init__(self) -> None:
        self.samples: Counter[tuple[str, ...]] = Counter()
        self._thread_id = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> StackSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(SECONDS):
            path = _path(sys._current_frames().get(self._thread_id))
            for depth in range(1, len(path) + 1):
                self.samples[path[:depth]] += 1


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
    samples: Counter[tuple[str, ...]] = Counter()
    taken: list[FirstToken] = []

    def measure(repeat: int, counted: bool) -> None:
        prompt = prompts(args.context, repeat)
        with StackSampler() as sampler:
            found = driver.first_token(prompt, mode.prefill)
        driver.forget()
        if counted:
            taken.append(found)
            samples.update(sampler.samples)

    for repeat in range(-1, args.repeats):
        if before is not None:
            alone(lambda: driver.first_token(prompts(args.context, 1000), before.prefill))
            driver.forget()
        alone(lambda repeat=repeat: measure(repeat, repeat >= 0))

    total = sum(one.ttft for one in taken)
    seconds = total / sum(count for path, count in samples.items() if len(path) == 1)
    order = {path: [(-samples[path[: i + 1]], path[i]) for i in range(len(path))] for path in samples}
    for path in sorted(samples, key=lambda path: order[path]):
        spent = samples[path] * seconds / len(taken) * 1e3
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
