"""Features of the question's attention: what a calibration weighs, and what must be captured for it.

A feature is one statistic of one head's attention to each block, over the question's tokens:

- `max`: the log of the most attention that any question token pays;
- `mean`: the log of their mean attention;
- `zmax`, `zmean`, `zcube`: each question token's log attention is standardised over the blocks first. Then
  the maximum, the mean, or the cubic mean of the positive values over the question's tokens.

Every feature is standardised over the blocks at the end. `max` finds the block that one word points at;
`zmean` finds the block that many words point at a little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MOST_EACH = 64  # rows of a head that is captured for each question token; a long question's tokens share rows


class Statistic(StrEnum):
    MAX = "max"
    MEAN = "mean"
    ZMAX = "zmax"
    ZMEAN = "zmean"
    ZCUBE = "zcube"


Name = tuple[Statistic, int, int]
"""Statistic, layer and head of a feature."""


class Feature(NamedTuple):
    """A statistic of a head's attention, and its weight. Negative: the head points away from evidence."""

    statistic: Statistic
    layer: int
    head: int
    weight: float


@dataclass(frozen=True)
class Capture:
    """The heads of one layer to capture, by the part of their question attention that is needed.

    A captured layer has one row of attention for each head of `most` and `mean`, and a row for each
    question token (see `tokens_per_row`) for each head of `each`, in this order. Heads ascend.
    """

    most: tuple[int, ...] | None = ()  # the maximum over the question's tokens; None for all heads
    mean: tuple[int, ...] = ()  # their mean
    each: tuple[int, ...] = ()  # each of them

    @property
    def heads(self) -> tuple[int, ...] | None:
        """All captured heads, ascending; None for all heads of the layer."""
        return None if self.most is None else tuple(sorted({*self.most, *self.mean, *self.each}))


Captures = Mapping[int, Capture]
"""The captured heads by layer."""


def tokens_per_row(question: int) -> int:
    """Neighbouring question tokens that share a row of a head in `Capture.each`."""
    return max(1, -(-question // MOST_EACH))


def captures_of(features: Iterable[Feature]) -> dict[int, Capture]:
    """The heads that these features need, by layer, ascending."""
    needed: dict[int, dict[str, set[int]]] = {}
    for statistic, layer, head, _ in features:
        part = {Statistic.MAX: "most", Statistic.MEAN: "mean"}.get(statistic, "each")
        needed.setdefault(layer, {}).setdefault(part, set()).add(head)
    return {
        layer: Capture(**{part: tuple(sorted(heads)) for part, heads in parts.items()})
        for layer, parts in sorted(needed.items())
    }


def names_of(captures: Captures) -> list[Name]:
    """Statistic, layer and head of every statistic that captured heads have, in the order of computation.

    The heads are named: no capture is of all heads.
    """
    found = []
    for layer, capture in captures.items():
        assert capture.most is not None
        found += [(Statistic.MAX, layer, head) for head in capture.most]
        found += [(Statistic.MEAN, layer, head) for head in capture.mean]
        for statistic in (Statistic.ZMAX, Statistic.ZMEAN, Statistic.ZCUBE):
            found += [(statistic, layer, head) for head in capture.each]
    return found


def weights_of(features: Iterable[Feature], captures: Captures) -> list[float]:
    """The weight of each of `names_of`; 0 for a statistic that is no feature."""
    known = {(statistic, layer, head): weight for statistic, layer, head, weight in features}
    return [known.get(name, 0.0) for name in names_of(captures)]
