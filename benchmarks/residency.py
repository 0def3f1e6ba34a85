"""Park and unpark a model on a GPU: the same output, the speed of its return, and memory after many cycles.

    PYTHONPATH=src python benchmarks/residency.py

Exits with status 1 if output changes, if unparking runs below 0.7 of the measured bandwidth of copies from
pinned memory, or if fifty cycles of the small shape change the memory in use by more than 2% of its size.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable

import torch
from script import need_cuda, parser_of, positive, run, tell

from skim.config import EngineConfig, ModelConfig
from skim.engine.engine import Engine
from skim.engine.sequence import Delta
from skim.models.forwards.packed import pack_products
from skim.models.residency import Residency
from skim.models.residency_state import Place
from skim.models.scratch import HostCopy
from skim.models.shapes import build_shape
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

LEAST_SHARE = 0.7  # of the bandwidth of pinned copies
MOST_CHANGE = 0.02  # of memory, as a share of the model's size
GB = 1e9


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def pinned_bandwidth() -> float:
    """Bytes per second from pinned host memory to the device: the best of five copies of 1 GiB."""
    host = HostCopy([2**30], pinned=True)
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    return 2**30 / min(seconds(lambda: device.copy_(host.parts[0], non_blocking=True)) for _ in range(5))


def reply(engine: Engine, tokens: int) -> list[int]:
    """Greedy tokens after a prompt of this length."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompt = tuple((7 * place) % 50_000 for place in range(tokens))
    handle = engine.submit(Request(prompt, params, engine.config.prefill))
    while engine.step():
        pass
    return [token for event in handle if isinstance(event, Delta) for token in event.token_ids]


def cycle_large(shape: str, cycles: int) -> bool:
    config = EngineConfig.of(kv_memory="2G", enforce_eager=True, enable_prefix_caching=False)
    model = build_shape(shape, config.model)
    pack_products(model.module)  # as in an engine with compiled layers
    residency, bandwidth = model.residency, pinned_bandwidth()
    engine = Engine(model, config)
    expected = reply(engine, 2000)
    print(f"{shape}: {residency.size / GB:.2f} GB; pinned copies to the device at {bandwidth / GB:.1f} GB/s")
    rates, same = [], True
    for number in range(cycles):
        parking = seconds(residency.park)
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() / GB
        returning = seconds(residency.unpark)
        rates.append(residency.size / returning)
        same = reply(engine, 2000) == expected and same
        print(
            f"cycle {number}: parked in {parking:.2f} s, {left:.2f} GB left; back in {returning:.3f} s at "
            f"{rates[-1] / GB:.1f} GB/s, {rates[-1] / bandwidth:.2f} of pinned copies"
        )
    residency.park()
    overlapped = seconds(lambda: reply(engine, 4000))
    resident = seconds(lambda: reply(engine, 4000))
    print(f"reply after 4000 tokens: {resident:.3f} s, and {overlapped:.3f} s with the return before it")
    same = reply(engine, 2000) == expected and same
    share = statistics.median(rates) / bandwidth
    fast = share >= LEAST_SHARE
    print(f"output {'is identical' if same else 'CHANGED'}")
    print(f"median {share:.2f} of the bandwidth, at least {LEAST_SHARE}: {'ok' if fast else 'MISSED'}")
    return same and fast


def cycle_small(shape: str, cycles: int) -> bool:
    residency = build_shape(shape, ModelConfig(device="cuda")).residency

    def cycle() -> None:
        residency.park()
        residency.unpark()

    cycle()
    before = memory_in_use(residency)
    for _ in range(cycles):
        cycle()
    after = memory_in_use(residency)
    good = True
    for name in before:
        change = (after[name] - before[name]) / residency.size
        good = good and abs(change) <= MOST_CHANGE
        print(f"{shape}, {cycles} cycles: {name} memory changed by {100 * change:+.2f}% of the model's size")
    print(f"at most {100 * MOST_CHANGE:.0f}%: {'ok' if good else 'MISSED'}")
    releasing = seconds(lambda: residency.park(Place.RELEASED))
    print(f"{shape}: to disk in {releasing:.1f} s, from disk in {seconds(residency.unpark):.1f} s")
    return good


def memory_in_use(residency: Residency) -> dict[str, int]:
    """Bytes in use on the device, by the whole of it, and on the host, at most so far."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"device": total - free, "host": host, "copied": residency.state("target").host_bytes}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--small", default="qwen3-0.6b")
    parser.add_argument("--cycles", type=positive, default=5, help="of the large shape")
    args = parser.parse_args()
    need_cuda(parser)
    small = cycle_small(args.small, 50)
    gc.collect()
    torch.cuda.empty_cache()
    tell(f"building {args.shape}")
    return 0 if cycle_large(args.shape, args.cycles) and small else 1


if __name__ == "__main__":
    run(main)
