"""Metrics of the checkpoint directory, as rows of the tables in `engine.py`. All are 0 without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from skim.engine.stats import EngineStats
from skim.memory.checkpoint import CheckpointStats

Count = Callable[[EngineStats], int]


def _kept(stats: EngineStats) -> CheckpointStats:
    return stats.checkpoints or CheckpointStats()


CHECKPOINT_GAUGES: tuple[tuple[str, str, Count], ...] = (
    ("checkpoint_bytes", "Size of the checkpoint directory.", lambda s: _kept(s).bytes),
)
CHECKPOINT_COUNTERS: tuple[tuple[str, str, Count], ...] = (
    ("checkpoint_spills", "Pieces of prefixes written to checkpoint files.", lambda s: _kept(s).spills),
    ("checkpoint_spilled_bytes", "Bytes written to checkpoint files.", lambda s: _kept(s).spilled_bytes),
    (
        "checkpoint_restores",
        "Requests that began on tokens from checkpoint files.",
        lambda s: _kept(s).restores,
    ),
    (
        "checkpoint_restored_tokens",
        "Tokens restored from checkpoint files.",
        lambda s: _kept(s).restored_tokens,
    ),
    (
        "checkpoint_restored_bytes",
        "Bytes restored from checkpoint files.",
        lambda s: _kept(s).restored_bytes,
    ),
)
CHECKPOINT_COUNTERS_BY_REASON: tuple[tuple[str, str, Callable[[EngineStats], Mapping[str, int]]], ...] = (
    ("checkpoint_lost", "Pieces of prefixes that were not written, by reason.", lambda s: _kept(s).lost),
    ("checkpoint_refused", "Checkpoint files that were not used, by reason.", lambda s: _kept(s).refused),
)
