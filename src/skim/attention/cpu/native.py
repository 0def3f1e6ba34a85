"""The CPU backend: decode rows by a kernel of our own, everything else by the torch backend.

The kernel takes rows of a float32 pool that have one query, which reads every slot up to its own or from a
window's edge on, in layers without a softcap. It is compiled on the machine it runs on, and compared with the
torch backend before it is trusted.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from skim.attention.cpu.native_kernel import MAX_HEADS, Kernel, Plan, SlabTable, fits
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Backend, Role, Row, Step
from skim.memory.pool import KVPool, LayerShape
from skim.native.build import NativeUnavailable

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of the check: far above rounding, far below any mistake


def choose_backend(pool: KVPool) -> Backend:
    """The fastest backend that works here; on the CPU the native one if it is built and agrees with torch."""
    if pool.device.type == "cuda":
        return _cuda_backend(pool)
    shapes = sorted({replace(shape, window=None) for shape in pool.layers if fits(shape)}, key=repr)
    if pool.device.type != "cpu" or pool.dtype != torch.float32 or not shapes:
        return TorchBackend()
    try:
        backend = NativeBackend(Kernel())
        with ThreadPoolExecutor(1) as thread:  # OpenMP keeps workers for every thread that has computed
            for shape in shapes:
                thread.submit(check, backend, shape).result()
    except NativeUnavailable as reason:
        log.info("decode uses torch's attention, the native kernel is not available: %s", reason)
        return TorchBackend()
    return backend


def _cuda_backend(pool: KVPool) -> Backend:
    """The Triton kernels if they can be had and can read the pool; otherwise torch, and the log says why."""
    try:
        from skim.attention.cuda.backend import TritonBackend
    except ImportError as reason:
        log.warning("attention uses torch and is slow, Triton is not available: %s", reason)
        return TorchBackend()
    refusal = TritonBackend.refuses(pool)
    if refusal is not None:
        log.warning("attention uses torch and is slow, the Triton kernels do not apply: %s", refusal)
        return TorchBackend()
    return TritonBackend()


@dataclass
class Split:
    """A step's rows: those for the kernel, and the others as a step of their own."""

    decode: list[int]
    others: Step | None
    tokens: slice | torch.Tensor  # of the others
    plans: dict[int | None, Plan] = field(default_factory=dict)  # by window

    @classmethod
    def of(cls, step: Step, windowed: bool) -> Split:
        """Rows are for the kernel if their one query reads a run of slots up to its own."""
        decode = [
            i
            for i, row in enumerate(step.rows)
            if row.queries == 1 and (row.in_order if windowed else row.sees_all_before)
        ]
        rest = sorted(set(range(len(step.rows))) - set(decode))
        if not rest:
            return cls(decode, None, slice(0))
        first, end = step.starts[rest[0]], step.starts[rest[-1] + 1]
        tokens: slice | torch.Tensor = slice(first, end)
        if len(rest) != rest[-1] + 1 - rest[0]:
            spans = [torch.arange(step.starts[i], step.starts[i + 1]) for i in rest]
            tokens = torch.cat(spans)
        return cls(decode, Step(step.pool, tuple(step.rows[i] for i in rest), step.backend), tokens)


class NativeBackend:
    """Fast on the CPU with a float32 pool; what the kernel does not take, the torch backend does."""

    capturable = False

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._torch = TorchBackend()
        self.counter = self._torch.counter
        self._tables: WeakKeyDictionary[KVPool, SlabTable] = WeakKeyDictionary()

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        splits = step.notes.setdefault(Split, {})
        windowed = call.window is not None
        if windowed not in splits:
            splits[windowed] = Split.of(step, windowed)
        split: Split = splits[windowed]
        shape = step.pool.layers[layer]
        heads = query.shape[1]
        served = (
            call.softcap is None
            and fits(shape)
            and heads <= MAX_HEADS
            and all(t.is_cpu and t.dtype == torch.float32 for t in (query, key, value))
        )
        if not split.decode or not served:
            return self._torch.attend(step, layer, query, key, value, call)
        out = query.new_empty(query.shape[0], heads, shape.value_dim)
        if split.others is not None:
            at = split.tokens
            out[at] = self._torch.attend(split.others, layer, query[at], key[at], value[at], call)
        plan = split.plans.get(call.window)
        if plan is None:
            plan = split.plans[call.window] = Plan(self._kernel, step, split.decode, call.window)
        plan.decode(shape, self._table(step.pool).layers[layer], query, key, value, call, out)
        return out

    def _table(self, pool: KVPool) -> SlabTable:
        table = self._tables.get(pool)
        if table is None or table.slabs != len(pool.slabs):
            table = self._tables[pool] = SlabTable(pool)
        return table


def check(backend: Backend, shape: LayerShape) -> None:
    """Compare with the torch backend on rows of a fragmented pool, and see that a NaN is not swallowed."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    blocks = 24
    block_bytes = 16 * shape.width * 4
    pool = KVPool(
        [shape],
        block_size=16,
        budget_bytes=blocks * block_bytes,
        dtype=torch.float32,
        device=torch.device("cpu"),
        slab_bytes=10 * block_bytes,
    )
    order = torch.randperm(len(pool.allocate(blocks)), generator=generator).tolist()
    for slab in pool.slabs:
        slab.key_slots[0].copy_(random(*slab.key_slots[0].shape))
        slab.value_slots[0].copy_(random(*slab.value_slots[0].shape))
    rows = tuple(
        Row(Role.DECODE, part, context, 1)
        for part, context in ((order[:1], 0), (order[1:4], 40), (order[4:], 300))
    )
    heads = 3 * shape.kv_heads
    query, sinks = random(3, heads, shape.key_dim), random(heads)
    key, value = random(3, shape.kv_heads, shape.key_dim), random(3, shape.kv_heads, shape.value_dim)
    for call in (
        AttentionCall(shape.key_dim**-0.5),
        AttentionCall(shape.key_dim**-0.5, window=33, sinks=sinks),
    ):
        expected = Step(pool, rows, TorchBackend()).attend(0, query, key, value, call)
        got = Step(pool, rows, backend).attend(0, query, key, value, call)
        if not torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise NativeUnavailable(f"its results differ from torch's for {shape}")
    query[1, 0, 0] = float("nan")
    broken = Step(pool, rows, backend).attend(0, query, key, value, AttentionCall(1.0))
    if not (broken[1, 0].isnan().all() and broken[0].isfinite().all()):
        raise NativeUnavailable(f"it loses a NaN for {shape}")
