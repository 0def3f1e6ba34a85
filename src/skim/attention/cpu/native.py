"""The native CPU backend: decode rows by compiled C kernels, everything else by the torch backend.

The kernels take rows whose one query reads a run of slots up to its own, with or without a sliding window, in
layers without a softcap. One reads float32 keys and values, the other codes. They are compiled on the machine
they run on, and compared with the torch backend before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from skim.attention.backend import Backend
from skim.attention.cpu.native_codes import decode_codes, load_kernel, reads_codes
from skim.attention.cpu.native_glance import CSummaries, Glances
from skim.attention.cpu.native_kernel import (
    LANES,
    MAX_HEADS,
    DecodeReads,
    Kernel,
    SlabTable,
    decode_plain,
    fits,
)
from skim.attention.cpu.torch_backend import TorchBackend, TorchMetadata, write
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.codec import CodedStore
from skim.memory.formats import AUTO
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, LayerStore, PlainStore
from skim.native.build import NativeUnavailable

TOLERANCE = 1e-4  # of the check: far above rounding errors, far below any mistake
CODES_TOLERANCE = 1e-2  # the same where a new token's code may be rounded the other way


def make_native(pool: KVPool) -> NativeBackend:
    """The native backend for this pool; NativeUnavailable if it cannot be built or differs from torch."""
    if pool.dtype != torch.float32:
        raise NativeUnavailable(f"the pool holds {pool.dtype}, and the kernel reads torch.float32")
    plain, coded = (
        sorted({replace(store.shape, window=None) for store in pool.stores if test(store)}, key=repr)
        for test in (reads_plain, reads_codes)
    )
    if not plain and not coded:
        raise NativeUnavailable(
            f"it reads no layer of this model with kv_cache_dtype {pool.kv_format}: head sizes must be "
            f"multiples of {LANES}"
        )
    backend = NativeBackend(Kernel() if plain else None, load_kernel() if coded else None)
    with ThreadPoolExecutor(1) as thread:  # OpenMP keeps workers for every thread that has computed
        for shape in plain:
            thread.submit(check, backend, shape).result()
        for shape in coded:
            thread.submit(check, backend, shape, pool.kv_format).result()
    return backend


def reads_plain(store: LayerStore) -> bool:
    return isinstance(store, PlainStore) and fits(store.shape)


@dataclass
class Split:
    """A step's rows: those for the kernel, and the others as a step for the torch backend."""

    decode: list[int]
    others: Step | None
    tokens: slice | torch.Tensor  # of the other rows
    own: Step | None  # the rows for the kernel, if there are others
    own_tokens: slice | torch.Tensor
    reads: dict[tuple[int | None, int, tuple[int, int, int] | None], DecodeReads] = field(
        default_factory=dict
    )
    """By sliding window, layer group and, in layers with summaries, numbers of heads and size of keys."""

    @classmethod
    def of(cls, step: Step, windowed: bool, fallback: Backend) -> Split:
        """The kernel takes rows whose one query reads a run of slots up to its own."""
        decode = [
            i
            for i, row in enumerate(step.rows)
            if row.queries == 1 and (row.in_order if windowed else row.sees_all_before)
        ]
        rest = sorted(set(range(len(step.rows))) - set(decode))
        if not rest:
            return cls(decode, None, slice(0), None, slice(None))
        others, own = (
            Step(step.pool, tuple(step.rows[i] for i in part), fallback) for part in (rest, decode)
        )
        return cls(decode, others, tokens_of(step, rest), own, tokens_of(step, decode))


def tokens_of(step: Step, rows: Sequence[int]) -> slice | torch.Tensor:
    """An index of the tokens of some rows, in order."""
    starts = step.cumulative_lengths
    if not rows or len(rows) == rows[-1] + 1 - rows[0]:
        return slice(starts[rows[0]], starts[rows[-1] + 1]) if rows else slice(0)
    return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])


class NativeMetadata(TorchMetadata):
    """The torch backend's metadata, for layers that the kernel does not take, and the rows that it does."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.splits: dict[bool, Split] = {}  # by whether the layer has a sliding window


class NativeBackend(Backend):
    """Fast on the CPU with a float32 model; the torch backend does what the kernels do not take."""

    def __init__(self, plain: Kernel | None, codes: Kernel | None = None) -> None:
        self._plain = plain
        self._codes = codes
        self._torch = TorchBackend()
        self.counter = self._torch.counter
        self._tables: WeakKeyDictionary[KVPool, SlabTable] = WeakKeyDictionary()

    def prepare(self, step: Step) -> NativeMetadata:
        return NativeMetadata(step)

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        splits = step.metadata.splits
        windowed = call.window is not None
        if windowed not in splits:
            splits[windowed] = Split.of(step, windowed, self._torch)
        split: Split = splits[windowed]
        store = step.pool.stores[layer]
        heads = query.shape[1]
        kernel = self._kernel(store, call)
        alike = query.dtype == key.dtype == value.dtype == torch.float32
        served = heads <= MAX_HEADS and alike and query.is_cpu
        if not split.decode or kernel is None or not served:
            return self._torch.attend(step, layer, query, key, value, call)
        out = query.new_empty(query.shape[0], heads, store.shape.value_dim)
        if split.others is not None:
            at = split.tokens
            out[at] = self._torch.attend(split.others, layer, query[at], key[at], value[at], call)
        planes = self._table(step.pool).layers[layer]
        group, sizes, summaries = step.pool.group_of[layer], None, None
        if store.summarized:
            metadata: TorchMetadata = (split.own or step).metadata
            if metadata.filled(group):
                write(step.pool, metadata, layer, key[split.own_tokens], value[split.own_tokens])
            if any(step.rows[index].evidence or step.picks[index] for index in split.decode):
                sizes = heads, store.shape.kv_heads, store.shape.key_dim
                summaries = CSummaries.of(step.pool, layer, planes)
        kind = call.window, group, sizes
        reads = split.reads.get(kind)
        if reads is None:
            glances = Glances(step, split.decode, group, *sizes) if sizes is not None else None
            reads = DecodeReads(kernel, step, split.decode, call.window, group, glances)
            split.reads[kind] = reads
        if isinstance(store, CodedStore):
            decode_codes(kernel, reads, store, planes, query, key, value, call, out, summaries)
        else:
            decode_plain(kernel, reads, store.shape, planes, query, key, value, call, out, summaries)
        return out

    def _kernel(self, store: LayerStore, call: AttentionCall) -> Kernel | None:
        """The kernel for a layer; None if torch must read it."""
        way = reading(store, call)
        if way is Reading.PLAIN and call.softcap is None and reads_plain(store):
            return self._plain
        return self._codes if way is Reading.CODES and reads_codes(store) else None

    def _table(self, pool: KVPool) -> SlabTable:
        table = self._tables.get(pool)
        if table is None or table.slabs != len(pool.slabs):
            table = self._tables[pool] = SlabTable(pool)
        return table


def check(backend: Backend, shape: LayerShape, kv_format: str = AUTO) -> None:
    """Compare with the torch backend on a fragmented pool, and check that a NaN is propagated."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    blocks = 24
    pool = KVPool.of_blocks(
        [shape],
        blocks,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        slab_blocks=10,
        kv_format=kv_format,
    )
    every = pool.allocate(blocks)
    order = torch.randperm(len(every), generator=generator).tolist()
    slots = pool.runs(every, 0, pool.token_capacity)
    heads = 3 * shape.kv_heads

    def keys_values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = random(tokens, shape.kv_heads, shape.key_dim)
        return key, random(tokens, shape.kv_heads, shape.value_dim)

    pool.write(0, slots, *keys_values(pool.token_capacity))
    first = 0 if kv_format == AUTO else 13  # one code must not decide
    rows = tuple(
        Row(Role.DECODE, part, context, 1)
        for part, context in ((order[:1], first), (order[1:4], 40), (order[4:], 300))
    )
    query, sinks = random(3, heads, shape.key_dim), random(heads)
    key, value = keys_values(3)
    for call in (
        AttentionCall(shape.key_dim**-0.5),
        AttentionCall(shape.key_dim**-0.5, window=33, sinks=sinks),
    ):
        expected = Step(pool, rows, TorchBackend()).attend(0, query, key, value, call)
        got = Step(pool, rows, backend).attend(0, query, key, value, call)
        tolerance = TOLERANCE if kv_format == AUTO else CODES_TOLERANCE
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
            raise NativeUnavailable(f"its results differ from torch's for {shape}")
    query[1, 0, 0] = float("nan")
    broken = Step(pool, rows, backend).attend(0, query, key, value, AttentionCall(1.0))
    if not (broken[1, 0].isnan().all() and broken[0].isfinite().all()):
        raise NativeUnavailable(f"it loses a NaN for {shape}")
