"""Prefill by a model larger than the card: its last layers are on the host and stream to a capped GPU.

The model is loaded under the cap, reads a prompt, and reads it again without the cap and with all layers on
the GPU. Prints both; exits with 1 if the capped prefill takes longer than the bound. Needs an idle GPU.

    python benchmarks/offload.py [--shape qwen3-8b] [--memory-cap 12G] [--context 32768] [--bound 2]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
from script import need_cuda, parser_of, positive, run, tell

from skim.bench.drive import Driver, FirstToken, free_memory
from skim.bench.inputs import random_prompts
from skim.bench.turns import alone
from skim.config import EngineConfig, PrefillConfig
from skim.memory.budget import cap_gpu_memory, in_words
from skim.models.load import LoadedModel
from skim.models.scratch import HostCopy
from skim.models.shapes import build_shape

COPIED = 2**30  # bytes, to measure the bandwidth from the host


def bandwidth(device: torch.device) -> float:
    """Bytes per second from pinned host memory, the fastest of three."""
    held, target = HostCopy([COPIED], pinned=True), torch.empty(COPIED, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(held.parts[0], non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return COPIED / min(times)


def measure(model: LoadedModel, config: EngineConfig, context: int, repeats: int) -> list[FirstToken]:
    """First tokens of different prompts that are read in full, after one that warms up."""
    driver = Driver(model, config)
    prompts = random_prompts(model.vocab_size, 0)
    found = []
    for number in range(-1, repeats):
        prompt = prompts(context, number)
        found.append(alone(lambda prompt=prompt: driver.first_token(prompt, PrefillConfig())))  # type: ignore[misc]
        driver.forget()
    return found[1:]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--memory-cap", default="12G")
    parser.add_argument("--context", type=positive, default=32_768)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--bound", type=float, default=2.0, help="of the ratio (default: %(default)s)")
    options = parser.parse_args()
    need_cuda(parser)
    capped = EngineConfig.of(
        device="cuda",
        memory_cap=options.memory_cap,
        offload_layers="auto",
        max_model_len=options.context + 64,
    )
    tell(f"building {options.shape} under a cap of {options.memory_cap}")
    begun = time.perf_counter()
    model = build_shape(options.shape, capped.model)
    host = model.host_layers
    assert host is not None
    tell(f"built in {time.perf_counter() - begun:.1f} s; at most {_peak()} of the GPU in use")
    rate = bandwidth(model.device)
    seconds: dict[str, float] = {}
    for name, config in {
        f"capped at {options.memory_cap}": capped,
        "uncapped": replace(capped, model=replace(capped.model, memory_cap=None, offload_layers=0)),
    }.items():
        if config.model.memory_cap is None:
            cap_gpu_memory(model.device, torch.cuda.mem_get_info()[1])
        samples = measure(model, config, options.context, options.repeats)
        seconds[name] = statistics.median(one.phases.prefill if one.phases else one.ttft for one in samples)
        decode = statistics.median(one.first_decode or 0.0 for one in samples)
        streamed = sum(host.sizes[len(host.sizes) - host.count :])
        print(
            f"{name:16}  {host.count:2} of {len(host.sizes)} layers on the host  prefill of "
            f"{options.context:,} tokens {seconds[name]:.3f} s  decode step {1e3 * decode:.1f} ms  a step "
            f"copies {in_words(streamed)}, {1e3 * streamed / rate:.0f} ms at {rate / 1e9:.1f} GB/s  "
            f"at most {_peak()} of the GPU",
            flush=True,
        )
        free_memory()
    small, whole = seconds.values()
    print(f"capped prefill takes {small / whole:.2f} times as long (bound {options.bound})")
    return int(small / whole > options.bound)


def _peak() -> str:
    peak = in_words(torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    run(main)
