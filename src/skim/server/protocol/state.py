"""The state of a server, as `/health`, `/admin/stats` and the residency routes show it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from skim.engine.stats import EngineStats
from skim.server.protocol.replies import DecodeStats, StatsModel


class PrefillStats(StatsModel):
    activations: int
    blocks_total: int
    blocks_kept: int
    below_threshold: int
    follow_ups: dict[str, int]
    fallbacks: dict[str, int]


class KVStats(StatsModel):
    format: str = Field(validation_alias="kv_format")
    bytes_per_token: int = Field(validation_alias="token_bytes")
    used_bytes: int
    reserved_bytes: int


class CheckpointStats(StatsModel):
    """The checkpoint directory: prefixes written (`spills`), restored, lost and refused, and its size."""

    spills: int
    spilled_bytes: int
    restores: int
    restored_tokens: int
    restored_bytes: int
    lost: dict[str, int]
    refused: dict[str, int]
    files: int
    bytes: int


class WeightStats(StatsModel):
    """Weights of the target in memory: their bytes, and the bits that a value takes on average."""

    bytes: int
    bits: float


class Transfer(StatsModel):
    """The last move of a model's weights. `bytes` are those that were copied: a second park copies none."""

    direction: Literal["to_device", "to_host", "to_disk"]
    bytes: int
    seconds: float
    at: float
    """Unix time of its end."""


class TransferStats(StatsModel):
    """Moves of a model's weights in one direction, since start."""

    count: int
    bytes: int
    seconds: float


class ModelState(StatsModel):
    """Where a model's weights are, and their bytes in each place. Copies stay where they were made."""

    role: Literal["target", "drafter"]
    place: Literal["resident", "parked", "released"]
    """On the device, in host memory (of a model on a CPU: on disk), or on disk only."""
    standing: Literal["ready", "park_waits", "held", "idle", "policy"]
    """`ready`: on the device. `park_waits`: an administrator's park waits for running requests, and new ones
    are refused. `held`: parked by an administrator. `idle`: parked after some time without work; the
    next request brings it. `policy`: away by the residency policy; it comes when needed."""
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    transfers: dict[str, TransferStats]
    """Moves by direction: `to_device`, `to_host` or `to_disk`."""
    last_transfer: Transfer | None = Field(validation_alias="last")
    """Null before the first."""


class Residency(BaseModel):
    """The models of the server, and the policy that moves them."""

    policy: str
    models: list[ModelState]

    @classmethod
    def of(cls, stats: EngineStats) -> Residency:
        models = [ModelState.model_validate(one) for one in stats.residency]
        return cls(policy=stats.residency_policy, models=models)


class Health(BaseModel):
    status: Literal["ok", "parking", "parked", "loading", "draining", "stalled", "dead"]
    reason: str | None
    """The problem as a sentence, or what brings parked models back; null if there is neither."""
    prefill: PrefillStats | None
    """Counters of sparse prefill; null while the model is loading."""
    kv: KVStats | None
    """Format and bytes of the KV pool; null while the model is loading."""
    checkpoints: CheckpointStats | None
    """Counters of the checkpoint directory; null without one."""
    decode: DecodeStats | None
    """Counters of slow-fast decode; null while the model is loading."""
    weights: WeightStats | None
    """Size of the weights; null while the model is loading."""
    residency: Residency | None
    """Places of the models' weights; null while the model is loading."""


class PoolStats(StatsModel):
    capacity: int
    allocated: int
    live: int
    cold: int = Field(validation_alias="evictable")
    free: int
    block_bytes: int
    reserved_bytes: int
    used_bytes: int
    token_bytes: int
    kv_format: str
    ended: int  # blocks given back behind sliding windows, since start


class PrefixStats(StatsModel):
    queries: int
    hits: int
    misses: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    bypasses: dict[str, int]


class AttentionStats(StatsModel):
    """Key blocks (128 slots) that block-sparse prefill could read (`visible`) and did."""

    visible: int
    read: int
    chunks: dict[str, int]


class Stats(StatsModel):
    """The engine's counters, with blocks and bytes of the KV pool and lookups in the prefix tree."""

    running: int
    waiting: int
    steps: int
    tokens_computed: int
    tokens_generated: int
    preemptions: int
    outcomes: dict[str, int]
    paths: dict[str, int]
    pool: PoolStats
    prefix: PrefixStats
    prefill: PrefillStats
    decode: DecodeStats
    attention: AttentionStats
    checkpoints: CheckpointStats | None
    step_seconds: float
