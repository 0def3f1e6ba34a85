"""The native decode kernel over quantized keys and values: its structures, and the formats that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, addressof, c_double, c_int64, c_void_p

import torch

from skim.attention.cpu.native_glance import CSummaries
from skim.attention.cpu.native_kernel import LANES, CTokens, DecodeReads, Kernel
from skim.attention.step import AttentionCall
from skim.memory.basis import Basis
from skim.memory.codec import Codec, CodedStore
from skim.memory.int4 import Int4, groups
from skim.memory.int8 import Int8
from skim.memory.store import LayerStore
from skim.native import build

SOURCE = build.SOURCES / "decode_codes.c"
MAX_DIM = 512
BITS: dict[type[Codec], int] = {Int8: 8, Int4: 4}
READS = frozenset({(Int8, Int8), (Int8, Int4), (Int4, Int4)})  # codecs of keys and of values


class CSide(Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("dim", c_int64),
        ("bits", c_int64),
        ("groups", c_int64),
        ("to_stored", c_void_p),
        ("turn", c_void_p),
    )

    @classmethod
    def of(cls, codec: Codec, basis: Basis, use: str, codes: int, scales: int) -> CSide:
        """Keys or values of a layer. `use`: the basis turns the `query` or the `out`put of attention."""
        return cls(
            codes,
            scales,
            codec.dim,
            BITS[type(codec)],
            groups(codec.dim) if isinstance(codec, Int4) else 1,
            basis.to_stored.data_ptr(),
            basis.matrix(use, torch.float32).data_ptr(),
        )


class CCodes(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("keys", CSide),
        ("values", CSide),
        ("query", CTokens),
        ("key", CTokens),
        ("value", CTokens),
        ("turned", c_void_p),
        ("partials", c_void_p),
        ("out", c_void_p),
        ("scale", c_double),
        ("summaries", c_void_p),
    )


def load_kernel() -> Kernel:
    return Kernel(SOURCE, "skim_decode_codes")


def reads_codes(store: LayerStore) -> bool:
    """True if the kernel can read layers of this store."""
    if not isinstance(store, CodedStore) or (type(store.key), type(store.value)) not in READS:
        return False
    return all(
        codec.dim <= MAX_DIM and codec.dim * BITS[type(codec)] // 8 % LANES == 0
        for codec in (store.key, store.value)
    )


def decode_codes(
    kernel: Kernel,
    reads: DecodeReads,
    store: CodedStore,
    planes: Mapping[str, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    out: torch.Tensor,
    summaries: CSummaries | None = None,
) -> None:
    """Store the rows' new keys and values of one layer, attend, and write the rows' tokens of `out`."""
    heads, shape = query.shape[1], store.shape
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    bases = store.bases(query.device)
    layer = CCodes(
        heads,
        shape.kv_heads,
        CSide.of(store.key, bases[0], "query", *(planes[name] for name in store.KEYS)),
        CSide.of(store.value, bases[1], "out", *(planes[name] for name in store.VALUES)),
        CTokens.of(query),
        CTokens.of(key),
        CTokens.of(value),
        reads.turned(heads, max(shape.key_dim, shape.value_dim)),
        reads.partials(heads, shape.value_dim),
        out.data_ptr(),
        call.scale,
        None if summaries is None else addressof(summaries),
    )
    kernel.decode(reads.step, layer, reads.threads)
