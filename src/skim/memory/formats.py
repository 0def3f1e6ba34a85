"""KV formats by name, and the layers that each applies to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skim.memory.codec import Codec, CodedStore
from skim.memory.fp8 import Fp8
from skim.memory.int4 import Int4
from skim.memory.int8 import Int8
from skim.memory.store import LayerShape, LayerStore, PlainStore
from skim.memory.summary import summary_planes

AUTO = "auto"
CODED: dict[str, tuple[type[Codec], type[Codec]]] = {
    "fp8": (Fp8, Fp8),
    "int8": (Int8, Int8),
    "int4": (Int4, Int4),
    "k8v4": (Int8, Int4),
}
"""The codecs of keys and of values."""
FORMATS = (AUTO, *CODED)


def is_coded(shape: LayerShape) -> bool:
    """True if a quantized format applies to the layer. Others are stored as the model computes them.

    A sliding window bounds what a layer stores, and its few keys carry more weight each.
    """
    return shape.window is None and shape.key_dim % 8 == 0 and shape.value_dim % 8 == 0


def refusal(kv_format: str, device: torch.device) -> str | None:
    """The reason that a device cannot use a format, with the remedy; None if it can."""
    if kv_format != "fp8":
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    return (
        f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later, not {device}; set int8, which "
        "is as small and more precise"
    )


def make_stores(
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    kv_format: str = AUTO,
    *,
    summaries: bool = False,
) -> tuple[LayerStore, ...]:
    """The store of each layer of a model that computes keys and values in `dtype`.

    With `summaries`, blocks of layers without a sliding window are summarized. The other layers have the same
    planes, unused, because layers share blocks only if their planes are equal.
    """
    stores = [_make_store(shape, dtype, kv_format) for shape in layers]
    if summaries and any(shape.window is None for shape in layers):
        for store in stores:
            store.planes += summary_planes(store.shape, dtype)
            store.summarized = store.shape.window is None
    return tuple(stores)


def _make_store(shape: LayerShape, dtype: torch.dtype, kv_format: str) -> LayerStore:
    if kv_format == AUTO or not is_coded(shape):
        return PlainStore(shape, dtype)
    return CodedStore(shape, dtype, *CODED[kv_format])
