"""The engine's counters."""

from __future__ import annotations

from dataclasses import dataclass

from skim.attention.blocksparse.counter import BlockStats
from skim.memory.pool import PoolStats
from skim.memory.prefix import PrefixStats
from skim.prefill.planner import PrefillStats


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment; counts are since start."""

    running: int
    waiting: int
    steps: int
    tokens_computed: int
    tokens_generated: int
    preemptions: int
    outcomes: dict[str, int]  # finished requests by how they ended
    paths: dict[str, int]  # steps run as a CUDA `graph`, or by why they were not: `off` where there are none
    pool: PoolStats
    prefix: PrefixStats
    prefill: PrefillStats
    attention: BlockStats  # of prompts with block-sparse attention
