"""Slow-fast decode in the engine: asks the policy before a step, tells it the results, and counts.

`drafting.py` has the rounds of exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from skim.attention.glance import Evidence
from skim.attention.step import Row
from skim.attention.watch import Watch
from skim.config import DecodeConfig
from skim.decode.policy import Pulse, Refresh, glance_of, refresh_reason
from skim.decode.sentences import SentenceEnds
from skim.decode.stats import DecodeStats
from skim.engine.sequence import Sequence
from skim.memory.pool import KVPool


class SlowFast:
    """The slow and fast rows of one engine. Used by its thread."""

    def __init__(
        self, pool: KVPool, config: DecodeConfig, max_model_len: int, decode: Callable[[list[int]], str]
    ) -> None:
        self.stats = DecodeStats()
        self._pool = pool
        self._config = config
        self._max_model_len = max_model_len
        self._ends_sentence = SentenceEnds(decode)

    def applied(self, sequence: Sequence, length: int) -> DecodeConfig | None:
        """The settings of a sequence; None if slow-fast decode does not apply to a row of this length."""
        config = sequence.parent.request.decode or self._config
        return config if self._pool.summarized and config.applies(length) else None

    def row(self, sequence: Sequence, row: Row) -> Row:
        """A decode row as the policy wants it. Nothing is counted before `launched`."""
        config = self.applied(sequence, row.length)
        if config is None:
            return row
        pulse = sequence.pulse
        if self._reason(sequence, row.length, config) is None:
            glance = glance_of(pulse, row.length, config, self._pool.block_size)
            return row._replace(fast=glance, evidence=sequence.evidence)
        return row._replace(evidence=self._evidence(sequence))

    def chunk(self, sequence: Sequence, row: Row) -> Row:
        """A prefill chunk that adds to the evidence, if it computes some of the last slots of the prompt."""
        prompt = sequence.slots.prompt
        slots = range(prompt - sequence.watched, prompt)
        if not slots or row.length <= slots.start or row.context >= slots.stop:
            return row
        return row._replace(watch=Watch(slots, self._evidence(sequence)))

    def _evidence(self, sequence: Sequence) -> Evidence:
        if sequence.evidence is None:
            longest = sequence.slots.prompt + sequence.parent.max_tokens
            sequence.evidence = Evidence.of(self._pool, min(self._max_model_len, longest) + 1)
        return sequence.evidence

    def _reason(self, sequence: Sequence, length: int, config: DecodeConfig) -> Refresh | None:
        """The reason that the next row of a sequence is slow; None if it is fast."""
        if not config.drafts:
            return refresh_reason(sequence.pulse, length, config)
        if sequence.drafts is not None:
            return Refresh.VERIFY if sequence.drafts.due else None
        return Refresh.FIRST if sequence.pulse.slow_at is None else Refresh.VERIFY

    def launched(self, sequences: Iterable[Sequence], rows: Iterable[Row]) -> dict[int, int]:
        """Take note of a launched step. Returns the places of its fast rows, by `Sequence.order`."""
        fast: dict[int, int] = {}
        for place, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            if row.evidence is None:
                continue
            config = self.applied(sequence, row.length)
            assert config is not None
            reason = self._reason(sequence, row.length, config)
            picks = row.picks(self._pool.block_size)
            for stats in (self.stats, sequence.parent.decode_stats):
                blocks = -(-row.length // self._pool.block_size)
                stats.blocks += blocks
                stats.blocks_read += blocks if picks is None else picks.reads
                if reason is None:
                    stats.fast += 1
                else:
                    stats.slow += 1
                    stats.refreshes[reason.value] += 1
            if reason is None:
                if picks is not None and picks.reads < picks.blocks:  # otherwise it reads everything
                    fast[sequence.order] = place
                    if sequence.drafts is None:  # slots of drafts are written again
                        sequence.inexact(row.context)
            else:
                sequence.pulse = sequence.pulse.slow(row.length)
        return fast

    def read(self, sequence: Sequence, length: int, token: int, mass: float | None) -> None:
        """Take note of a step's results: the mass of a fast row, None of another."""
        self.count_mass(sequence, mass)
        if sequence.pulse.slow_at is not None:
            ends = self._ends_sentence(token)
            sequence.pulse = sequence.pulse.read(
                length, ends_sentence=ends, mass=1.0 if mass is None else mass
            )

    def verified(self, sequence: Sequence, length: int, drafted: int, accepted: int) -> None:
        """Take note of verified drafts. The first `length` slots of the sequence stay."""
        for stats in (self.stats, sequence.parent.decode_stats):
            stats.drafted += drafted
            stats.accepted += accepted
        sequence.acceptance = sequence.acceptance.after(drafted, accepted)
        sequence.pulse = Pulse(length)

    def count_mass(self, sequence: Sequence, mass: float | None) -> None:
        if mass is not None:
            for stats in (self.stats, sequence.parent.decode_stats):
                stats.mass += mass
                stats.masses += 1
