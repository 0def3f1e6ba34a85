"""Rounds in which fast rows draft tokens and one slow row verifies them.

Drafts are awaited tokens of their sequence, so nothing publishes or emits them. The verifying row is a chunk
with logits after each of its tokens. Tokens are drawn from these logits with the sampler's states, and hence
the random numbers, of dense decode. So in exact mode the tokens are those of dense decode, up to rounding:
the logits of a chunk are not bit for bit those of single tokens.

Otherwise nothing is verified: a draft that the model is sure of is final as soon as it is read. The first one
that it is not sure of is dropped, and a slow step of one token follows. A round also ends where the policy
wants a slow step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from skim.decode.drafts import MOST, count_accepted
from skim.decode.policy import Pulse
from skim.engine.drafts import Drafts
from skim.engine.in_flight import Sampling
from skim.engine.lifecycle import Lifecycle
from skim.engine.sequence import Sequence
from skim.engine.slow_fast import SlowFast
from skim.memory.manager import MemoryManager
from skim.sampling.batch import SamplerRow
from skim.sampling.logprobs import Sampled


class Drafting:
    """The rounds of one engine. Used by its thread."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        memory: MemoryManager,
        slow_fast: SlowFast,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        step_tokens: int,
    ) -> None:
        self._lifecycle = lifecycle
        self._memory = memory
        self._slow_fast = slow_fast
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._most = step_tokens // 2 - 1
        """A verifying row takes at most half of a step's tokens: prefill may have the other half."""

    # -- before a step

    def plan(self, sequences: Iterable[Sequence]) -> None:
        """Begin rounds, and end those that have all their drafts, or that the policy ends.

        Rounds with half of their drafts end together with another: one forward then verifies them all.
        """
        rounds: list[tuple[Sequence, Drafts]] = []
        for sequence in sequences:
            drafts = sequence.drafts
            if drafts is None:
                self._begin(sequence)
            elif drafts.settling:
                if self._slow_fast.interrupts(sequence):
                    self._drop(sequence)
            elif not drafts.due:
                rounds.append((sequence, drafts))
        ending = any(drafts.full for _, drafts in rounds)
        for sequence, drafts in rounds:
            if drafts.full or (ending and 2 * drafts.count >= drafts.most):
                sequence.end_round()

    def _begin(self, sequence: Sequence) -> None:
        """Let fast rows draft, after a slow one."""
        table, slots = sequence.table, sequence.slots
        if table is None or sequence.pulse.slow_at is None or not sequence.decoding:
            return
        config = self._slow_fast.applied(sequence.parent, table.length + 1)
        if config is None:
            return
        margin = config.least_margin(greedy=sequence.parent.request.params.greedy)
        if config.is_exact:
            left = slots.prompt + sequence.parent.max_tokens - len(slots.tokens)
            room = self._max_model_len - slots.end
            most = min(sequence.acceptance.drafts, self._most, left - 1, room - 1)
            if most > 0:
                sequence.drafts = Drafts(table.length, most)
        elif margin and not self._slow_fast.interrupts(sequence):
            sequence.drafts = Drafts(table.length, MOST, margin)

    @property
    def waits(self) -> bool:
        """True if drafts in flight must be read first: the next step is slow and follows the last that is
        final."""
        return any(
            one.drafts is not None
            and one.drafts.settling
            and one.drafts.count
            and self._slow_fast.interrupts(one)
            for one in self._lifecycle.sequences.values()
        )

    def drop(self) -> bool:
        """Drop all drafts, for their blocks; False if there are none. A slow step of one token follows.

        No step may be in flight.
        """
        found = [
            one for one in self._lifecycle.sequences.values() if one.drafts is not None and one.drafts.count
        ]
        for sequence in found:
            self._drop(sequence)
            sequence.pulse = Pulse()
        return bool(found)

    def _drop(self, sequence: Sequence) -> None:
        """End a round and forget its drafts, none of which is in flight."""
        drafts, table = sequence.drafts, sequence.table
        assert drafts is not None
        assert table is not None
        self._lifecycle.forget_drafts(sequence)
        if drafts.count:
            sequence.slots.forget_awaited()
            self._memory.roll_back(table, drafts.base)

    # -- in a step

    def sampler_rows(self, sequence: Sequence) -> list[SamplerRow]:
        """The states that the next tokens of a sequence are drawn with: several if they verify drafts."""
        row, drafts = self._lifecycle.sampler_row(sequence), sequence.drafts
        if drafts is None:
            return [row]
        if drafts.due:
            return drafts.states(row)
        branch = drafts.branch(self._lifecycle.sampler, row)
        branch.wants_margin = drafts.settling
        return [branch]

    def expect(self, sequence: Sequence) -> list[Sampling]:
        """Note that tokens are drawn for a sequence, and for those that are forked from it."""
        found = []
        for one in (sequence, *self._lifecycle.fork_followers(sequence)):
            one.slots.expect()
            drafts = one.drafts
            if drafts is None:
                found.append(Sampling(one, one.computed))
            elif drafts.due:
                found.append(Sampling(one, one.computed, drafts.count + 1))
            else:
                drafts.count += 1
                found.append(Sampling(one, one.computed, draft=True))
        return found

    # -- after a step

    def read(self, sequence: Sequence, slot: int, result: Sampled, mass: float | None) -> None:
        """Take over a draft for a slot. No more are drawn after one that is not sure or ends the reply."""
        drafts, params = sequence.drafts, sequence.parent.request.params
        assert drafts is not None
        token = result.token_id
        if drafts.settles(slot, result):
            self._close([self._lifecycle.sampler_row(sequence)])
            sequence.sampler_row = drafts.settle()
            self._slow_fast.read(sequence, slot, token, mass)
            self._lifecycle.take(sequence, slot, result)
            return
        if result.finite:
            self._slow_fast.count_mass(sequence, mass)
        else:
            drafts.usable = min(drafts.usable, slot - drafts.base - 1)
        if drafts.settling:
            sequence.pulse = sequence.pulse.doubt()
        elif not result.finite or token in self._eos_token_ids or token in params.stop_token_ids:
            drafts.most = drafts.count
        sequence.slots.draft(slot, max(token, 0))

    def verify(self, sequence: Sequence, results: Rows[Sampled]) -> None:
        """Take over the accepted drafts, and the token that was drawn after them. Drop the other drafts."""
        drafts, sequence.drafts = sequence.drafts, None
        assert drafts is not None
        assert sequence.table is not None
        first = drafts.base + 1
        tokens = sequence.tokens[first : first + min(drafts.count, drafts.usable)]
        accepted = count_accepted(tokens, [result.token_id for result in results])
        self._slow_fast.verified(sequence, first + accepted, drafts.count, accepted)
        before = self._lifecycle.sampler_row(sequence)
        sequence.sampler_row = drafts.states(before)[accepted]
        self._close(row for row in (before, *drafts.branches) if row is not sequence.sampler_row)
        self._memory.roll_back(sequence.table, first + accepted)
        for length, result in enumerate(results[: accepted + 1], start=first):
            self._lifecycle.take(sequence, length, result)
            if not self._lifecycle.is_open(sequence):
                return
        sequence.slots.forget_awaited()

    def _close(self, rows: Iterable[SamplerRow]) -> None:
        for row in rows:
            self._lifecycle.sampler.close(row)
