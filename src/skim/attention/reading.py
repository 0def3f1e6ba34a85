"""How a layer's attention reads its keys and values: the one table that backends follow.

*plain*: keys and values are stored as the model computes them.
*codes*: attention runs on stored codes, with queries turned into the store's basis. All scores of a query
then lack the same constant, which a softmax ignores.
*restored*: keys and values are restored first, for layers in which that constant would matter.
"""

from __future__ import annotations

from enum import Enum

from skim.attention.step import AttentionCall
from skim.memory.store import LayerStore


class Reading(Enum):
    """A way to read stored keys and values."""

    PLAIN = "plain"
    CODES = "kernel"
    RESTORED = "dequant"


def reading(store: LayerStore, call: AttentionCall) -> Reading:
    """The way to read a layer. A sink is a score without a key, and a softcap is not linear."""
    if store.exact:
        return Reading.PLAIN
    if call.sinks is not None or call.softcap is not None:
        return Reading.RESTORED
    return Reading.CODES
