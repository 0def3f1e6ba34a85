"""Metrics of slow-fast decode, as rows of the tables in `engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from skim.engine.stats import EngineStats

DECODE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("slow_fast_slow_rows", "Decode rows that read the whole context.", lambda s: s.decode.slow),
    ("slow_fast_fast_rows", "Decode rows that read selected KV blocks.", lambda s: s.decode.fast),
    ("slow_fast_blocks", "KV blocks in the contexts of slow and fast rows.", lambda s: s.decode.blocks),
    ("slow_fast_blocks_read", "KV blocks that slow and fast rows read.", lambda s: s.decode.blocks_read),
    (
        "slow_fast_mass",
        "Estimated shares of attention mass in the blocks that fast rows read, added up.",
        lambda s: s.decode.mass,
    ),
    (
        "slow_fast_drafted",
        "Tokens that fast rows drafted and slow rows verified.",
        lambda s: s.decode.drafted,
    ),
    ("slow_fast_accepted", "Drafted tokens that slow rows accepted.", lambda s: s.decode.accepted),
)

DECODE_COUNTERS_BY_REASON: tuple[tuple[str, str, Callable[[EngineStats], Mapping[str, int]]], ...] = (
    ("slow_fast_refreshes", "Slow rows by reason.", lambda s: s.decode.refreshes),
)
