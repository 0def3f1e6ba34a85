"""Slow-fast decode in the engine: asks the policy before a step, tells it the results, and counts.

`drafting.py` has the rounds of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from skim.attention.glance import Evidence
from skim.attention.step import Row
from skim.attention.watch import WATCHED, Watch
from skim.config import DecodeConfig
from skim.decode.policy import Pulse, Refresh, glance_of, refresh_reason
from skim.decode.sentences import SentenceEnds
from skim.decode.stats import DecodeStats
from skim.engine.sequence import RequestState, Sequence
from skim.memory.pool import KVPool


class SlowFast:
    """The slow and fast rows of one engine. Used by its thread."""

    def __init__(
        self, pool: KVPool, config: DecodeConfig, max_model_len: int, decode: Callable[[list[int]], str]
    ) -> None:
        self.stats = DecodeStats()
        self._pool = pool
        self._on_gpu = pool.device.type == "cuda"
        config.candidates(self._on_gpu)  # an error at the start, not at the first request
        self._config = config
        self._max_model_len = max_model_len
        self._ends_sentence = SentenceEnds(decode)

    def applied(self, state: RequestState, length: int) -> DecodeConfig | None:
        """The settings of a request; None if slow-fast decode does not apply to its rows of this length."""
        config = state.request.decode or self._config
        return config if self._pool.summarized and config.applies(length) else None

    def interrupts(self, sequence: Sequence) -> bool:
        """True if a round of drafts ends here because the policy wants a slow step. Not in exact mode."""
        length = len(sequence.tokens)
        config = self.applied(sequence.parent, length)
        if config is None:
            return True
        return not config.is_exact and refresh_reason(sequence.pulse, length, config) is not None

    def row(self, sequence: Sequence, row: Row) -> Row:
        """A decode row as the policy wants it. Nothing is counted before `launched`."""
        config = self.applied(sequence.parent, row.length)
        if config is None:
            return row
        pulse = sequence.pulse
        if self._reason(sequence, row.length, config) is None:
            candidates = config.candidates(self._on_gpu)
            glance = glance_of(pulse, row.length, config, self._pool.block_size, candidates)
            return row._replace(fast=glance, evidence=sequence.evidence)
        return row._replace(evidence=self._evidence(sequence))

    def watched(self, state: RequestState, prompt: int) -> int:
        """The last slots of a prompt that are watched, if the first decode step is under slow-fast decode."""
        applies = state.max_tokens > 1 and self.applied(state, prompt + 1) is not None
        return min(WATCHED, prompt) if applies else 0

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
        if sequence.drafts is not None and not sequence.drafts.due:
            return None
        reason = refresh_reason(sequence.pulse, length, config)
        return Refresh.VERIFY if config.is_exact and reason is not Refresh.FIRST else reason

    def launched(self, sequences: Iterable[Sequence], rows: Iterable[Row]) -> dict[int, int]:
        """Take note of a launched step. Returns the places of its fast rows, by `Sequence.order`."""
        fast: dict[int, int] = {}
        for place, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            if row.evidence is None:
                continue
            config = self.applied(sequence.parent, row.length)
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
                    if not config.is_exact:  # which writes all of its slots again
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
