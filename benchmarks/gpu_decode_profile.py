"""Profile one decode step on a GPU, by kernel.

    PYTHONPATH=src python benchmarks/gpu_decode_profile.py [--shape qwen3-8b] [--batch 1] [--context 1024]
        [--quantization int4]

Steps are timed first without the profiler, which slows them down.
"""

from __future__ import annotations

import time

from device_work import device_work
from script import need_cuda, parser_of, positive, run, start

from skim.bench.inputs import random_prompts
from skim.bench.turns import alone
from skim.config import PrefillConfig
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

TIMED = 100
PROFILED = 8


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--kv-memory", default="auto")
    parser.add_argument("--quantization", default="auto")
    args = parser.parse_args()
    need_cuda(parser)

    settings = {"kv_memory": args.kv_memory, "quantization": args.quantization}
    driver = start(args.shape, max_model_len=args.context + 1024, **settings)
    model = driver.model
    prompts = random_prompts(model.vocab_size, 0)

    def measure() -> None:
        engine = driver.engine
        params = SamplingParams(temperature=0, max_tokens=1024, ignore_eos=True)
        rows = [prompts(args.context, row).tokens for row in range(args.batch)]
        for row in rows:
            engine.submit(Request(row, params, PrefillConfig()), lambda _: None)
        while engine.stats().tokens_generated < 20 * args.batch:
            if not engine.step():
                raise SystemExit(f"the rows ended early: {engine.stats().outcomes}")
        before, begun = engine.stats().tokens_generated, time.perf_counter()
        for _ in range(TIMED):
            engine.step()
        step = (time.perf_counter() - begun) / TIMED * 1e3
        written = (engine.stats().tokens_generated - before) / TIMED
        if written != args.batch:
            raise SystemExit(
                f"a step generated {written:g} tokens, not {args.batch}: some rows had to wait; "
                "raise --kv-memory or lower --batch"
            )
        print(
            f"{model.name}, {model.device}, batch {args.batch}, {args.context:,} tokens: {step:.3f} ms a step"
        )
        print(device_work(engine.step, PROFILED))

    alone(measure)


if __name__ == "__main__":
    run(main)
