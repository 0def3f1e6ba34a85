"""Statistics of captured attention, computed on the device that captured it (see `features`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skim.prefill.scoring.features import Capture, Captures, Statistic

_LEAST = 1e-6  # attention below this counts as none
ENOUGH = 16  # values whose spread is known
_NO_SPREAD = 1e-4  # values that spread less are equal: float32 cannot tell them apart


def standardised(values: torch.Tensor) -> torch.Tensor:
    """Deviations from the mean in units of the spread, along the last axis. All 0 without a spread.

    Few values say little about the spread: of two, any difference would be one of 2 units. So values that
    are missing to `ENOUGH` are taken to have a spread of 1.
    """
    spread = values.std(dim=-1, keepdim=True, correction=0)
    if (count := values.shape[-1]) < ENOUGH:
        spread = ((count * spread.square() + ENOUGH - count) / ENOUGH).sqrt()
    found: torch.Tensor = (values - values.mean(dim=-1, keepdim=True)) / spread.masked_fill(
        spread < _NO_SPREAD, float("inf")
    )
    return found


def statistics_of(rows: torch.Tensor, capture: Capture) -> dict[Statistic, torch.Tensor]:
    """The statistics of one layer's captured heads, in the order of the capture's. Each [heads, blocks].

    rows: [rows, blocks], attention as `Capture` orders it
    """
    logs = torch.log(rows.float() + _LEAST)
    most = len(logs) if capture.most is None else len(capture.most)
    first = most + len(capture.mean)
    found = {}
    if most:
        found[Statistic.MAX] = standardised(logs[:most])
    if capture.mean:
        found[Statistic.MEAN] = standardised(logs[most:first])
    if capture.each:
        each = standardised(
            logs[first:].view(len(capture.each), -1, logs.shape[1])
        )  # [heads, tokens, blocks]
        above = each.clamp_min(0.0).pow(3).mean(dim=1).pow(1 / 3)
        found[Statistic.ZMAX] = standardised(each.amax(dim=1))
        found[Statistic.ZMEAN] = standardised(each.mean(dim=1))
        found[Statistic.ZCUBE] = standardised(above)
    return found


def stacked(attention: Mapping[int, torch.Tensor], captures: Captures) -> torch.Tensor:
    """All statistics of all captured heads, in the order of `names_of`. [names, blocks]

    attention: the captured rows of each layer, [rows, blocks]
    """
    return torch.cat(
        [
            statistic
            for layer, capture in captures.items()
            for statistic in statistics_of(attention[layer], capture).values()
        ]
    )
