"""The engine's counts at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from skim.attention.blocksparse.counter import BlockStats
from skim.decode.stats import DecodeStats
from skim.memory.checkpoint import CheckpointStats
from skim.memory.pool import PoolStats
from skim.memory.prefix import PrefixStats
from skim.models.residency_state import ResidencyState
from skim.models.sizes import WeightStats
from skim.prefill.planner import PrefillStats


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment; counts are since start."""

    running: int
    waiting: int
    step_sizes: dict[int, int]  # steps by their number of tokens
    tokens_computed: int
    tokens_generated: int
    prompt_tokens_reported: int  # prompt tokens whose log-probabilities were computed
    preemptions: int
    outcomes: dict[str, int]  # ended requests by finish reason, `abort` or `error`
    paths: dict[str, int]
    """Steps run as a CUDA `graph`, or by reason: `off` if graphs are disabled, `offload` with layers on the
    host."""
    pool: PoolStats
    prefix: PrefixStats
    prefill: PrefillStats
    attention: BlockStats  # of prompts with block-sparse attention
    decode: DecodeStats = field(default_factory=DecodeStats)  # of rows under slow-fast decode
    checkpoints: CheckpointStats | None = None  # None without a checkpoint directory
    weights: tuple[WeightStats, ...] = ()  # of the target, and of the drafter if there is one
    residency: tuple[ResidencyState, ...] = ()  # of the target, and of the drafter if there is one
    residency_policy: str = "both"
    step_seconds: float = 0.0  # since the present step began; 0 between steps

    @property
    def steps(self) -> int:
        return sum(self.step_sizes.values())
