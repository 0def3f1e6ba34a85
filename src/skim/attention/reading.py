"""How a layer's attention reads its keys and values: the one table that backends follow.

*plain*: keys and values are stored as the model computes them.
*codes*: attention runs on stored codes, with queries turned into the store's basis, and results turned back.
*dequantized*: keys and values become floats first, for layers with a sink or a softcap, which the native
kernel over codes does not know. The decode kernel of CUDA does: there, only chunks are dequantized.
"""

from __future__ import annotations

from enum import Enum

from skim.attention.step import AttentionCall
from skim.memory.store import LayerStore


class Reading(Enum):
    """A way to read stored keys and values."""

    PLAIN = "plain"
    CODES = "codes"
    DEQUANTIZED = "dequantized"


def reading(store: LayerStore, call: AttentionCall) -> Reading:
    """The way to read a layer."""
    if store.exact:
        return Reading.PLAIN
    if call.sinks is not None or call.softcap is not None:
        return Reading.DEQUANTIZED
    return Reading.CODES
