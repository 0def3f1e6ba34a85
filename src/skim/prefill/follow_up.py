"""Follow-up questions: the next turn of a skimmed conversation adds prompt blocks to those already read.

The blocks that a new question needs and the earlier turn skipped are computed late: they take later slots at
their original, earlier positions. Queries read by position, so the order of slots does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np

from skim.config import PrefillConfig
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import Anatomy
from skim.prefill.conversations import Conversation, Conversations, digests_of, spans_of
from skim.prefill.plan import Plan, Reason
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request

BACKFILL_SHARE = 0.5  # a follow-up computes at most this fraction of the tokens of a fresh plan

CachedTokens = Callable[[Reading, Namespace], int]
"""Number of leading slots of a reading whose keys and values are in the prefix cache."""


class FollowUps:
    """Remembers skimmed prompts and turns each new plan into a reading. `counts` is updated by outcome."""

    def __init__(self, cached_tokens: CachedTokens, counts: Counter[str]) -> None:
        self.conversations = Conversations()
        self._cached_tokens = cached_tokens
        self._counts = counts

    def reading_of(
        self, request: Request, ids: np.ndarray, anatomy: Anatomy, plan: Plan
    ) -> Generator[None, None, Planned]:
        """Read the tokens that `plan` keeps; build on an earlier turn if its slots are cached.

        `ids` are the prompt's tokens as an array.
        """
        if not request.use_prefix_cache:
            return _fresh(request, plan)
        known, namespace = self.conversations, request.namespace
        lengths = {*known.lengths(namespace, len(ids)), len(ids)}
        digests = yield from digests_of(ids, lengths)
        own = digests.pop(len(ids))
        earlier = known.find(namespace, digests)
        planned = _fresh(request, plan) if earlier is None else self._next(request, anatomy, plan, earlier)
        read = planned.reading
        spans = spans_of(() if plan.positions == "compact" else read.positions or range(len(read.tokens)))
        conversation = Conversation(len(ids), plan.block_size, plan.positions, spans)
        known.remember(namespace, own, conversation)
        return planned

    def _next(self, request: Request, anatomy: Anatomy, plan: Plan, earlier: Conversation) -> Planned:
        """The reading of a prompt that continues an earlier one."""
        have = earlier.indices().tolist()
        slots = Reading.of(request.prompt_token_ids, have)
        cached = self._cached_tokens(slots, request.namespace) if have else 0
        afresh = _why_afresh(request.prefill, plan, earlier, len(have) - cached)
        if afresh is not None:
            label, reason = afresh
            self._counts[label] += 1
            return replace(_fresh(request, plan), follow_up=f"replan: {reason}")
        return self._extended(request, anatomy, plan, earlier, have, len(have) - cached)

    def _extended(
        self,
        request: Request,
        anatomy: Anatomy,
        plan: Plan,
        earlier: Conversation,
        have: list[int],
        missing: int,
    ) -> Planned:
        """The earlier turn's slots, then the new tokens. Late blocks go right before the new question."""
        mode = request.prefill.follow_up
        turn = max([earlier.tokens, *(run.start for run in anatomy.question[-1:])])
        new = _new(plan, earlier.tokens)
        late: list[int] = []
        if mode == "backfill":
            late = _late(plan, set(have), earlier.tokens, missing + len(new))
        before, after = [i for i in new if i < turn], [i for i in new if i >= turn]
        indices = (*have, *before, *late, *after)
        plan = replace(plan, reasons=_reasons(plan, indices))
        self._counts[mode] += 1
        reading = Reading.of(request.prompt_token_ids, indices)
        return Planned(reading, plan, follow_up=f"{mode}: {len(late)} tokens")


def _fresh(request: Request, plan: Plan) -> Planned:
    indices, prompt = plan.token_indices(), request.prompt_token_ids
    if plan.positions == "compact":
        return Planned(Reading(tuple(prompt[i] for i in indices)), plan)
    return Planned(Reading.of(prompt, indices), plan)


def _why_afresh(
    config: PrefillConfig, plan: Plan, earlier: Conversation, missing: int
) -> tuple[str, str] | None:
    """The reason to start afresh, as metric label and as text; None to build on the earlier turn."""
    if "compact" in (plan.positions, earlier.positions):
        return "compact", "positions are compact"
    if Reason.EVEN in plan.reasons:
        return "even", "the question is about the whole text"
    if config.follow_up == "replan":
        return "replan", "as asked"
    if plan.block_size != earlier.block_size:
        return "block_size", f"blocks were of {earlier.block_size} tokens, now of {plan.block_size}"
    if missing > BACKFILL_SHARE / 2 * plan.kept_tokens:
        return "evicted", "the earlier turn's slots are no longer cached"
    return None


def _new(plan: Plan, begin: int) -> list[int]:
    """Indices to read at or after `begin`, the end of the earlier turn: all if they are few, else those kept.

    Blocks are read whole, so the rest of the block in which the earlier turn ended is always included.
    """
    if plan.prompt_tokens - begin <= BACKFILL_SHARE * plan.kept_tokens:
        return list(range(begin, plan.prompt_tokens))
    edge = min(-(-begin // plan.block_size) * plan.block_size, plan.prompt_tokens)
    return [*range(begin, edge), *(i for i in plan.token_indices() if i >= edge)]


def _late(plan: Plan, have: set[int], begin: int, new: int) -> list[int]:
    """Indices before `begin` to compute late: the best-scored kept blocks that are not in `have`.

    `new` other tokens are computed anyway; with them, late blocks stay within `BACKFILL_SHARE` of a fresh
    plan. The best block is always included.
    """
    size = plan.block_size
    scores = plan.scores or (0.0,) * len(plan.kept)
    wanted = [block for block, kept in enumerate(plan.kept) if kept and block * size < begin]
    late: list[int] = []
    for block in sorted(wanted, key=lambda block: (-scores[block], block)):
        tokens = [i for i in range(block * size, min((block + 1) * size, begin)) if i not in have]
        if late and new + len(late) + len(tokens) > BACKFILL_SHARE * plan.kept_tokens:
            break
        late += tokens
    return sorted(late)


def _reasons(plan: Plan, indices: Sequence[int]) -> tuple[Reason | None, ...]:
    """Reason for each block that holds one of `indices`: the plan's, or that an earlier turn read it."""
    read = {index // plan.block_size for index in indices}
    return tuple((why or Reason.EARLIER) if b in read else None for b, why in enumerate(plan.reasons))
