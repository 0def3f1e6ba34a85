"""Follow-up questions: the next turn of a skimmed conversation adds prompt blocks to those already read.

The blocks that a new question needs and the earlier turn skipped are computed late: they take later slots at
their original, earlier positions. Queries read by position, so the order of slots does not matter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skim.config import PrefillConfig
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import Anatomy
from skim.prefill.plan import Plan, Reason
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request

BACKFILL_SHARE = 0.5  # a follow-up computes at most this fraction of the tokens of a fresh plan
CONVERSATIONS = 64  # skimmed prompts that are remembered

CachedTokens = Callable[[Reading, Namespace], int]
"""Number of leading slots of a reading whose keys and values are in the prefix cache."""


@dataclass(frozen=True)
class _Conversation:
    """A skimmed prompt and the indices of its tokens that were read."""

    namespace: Namespace
    prompt: tuple[int, ...]
    indices: tuple[int, ...]
    plan: Plan


class FollowUps:
    """Remembers skimmed prompts and turns each new plan into a reading. `counts` is updated by outcome."""

    def __init__(self, cached_tokens: CachedTokens, counts: Counter[str]) -> None:
        self._cached_tokens = cached_tokens
        self._counts = counts
        self._conversations: deque[_Conversation] = deque(maxlen=CONVERSATIONS)

    def reading_of(self, request: Request, anatomy: Anatomy, plan: Plan) -> Planned:
        """Read the tokens that `plan` keeps; build on an earlier turn if its slots are cached."""
        earlier = self._earlier(request)
        if earlier is None or not request.use_prefix_cache:
            return self._fresh(request, plan)
        have = Reading.of(request.prompt_token_ids, earlier.indices)
        missing = len(earlier.indices) - self._cached_tokens(have, request.namespace)
        afresh = _why_afresh(request.prefill, plan, earlier.plan, missing)
        if afresh is not None:
            label, reason = afresh
            self._counts[label] += 1
            return replace(self._fresh(request, plan), follow_up=f"replan: {reason}")
        return self._extended(request, anatomy, plan, earlier, missing)

    def _fresh(self, request: Request, plan: Plan) -> Planned:
        indices = plan.token_indices()
        self._remember(request, tuple(indices), plan)
        prompt = request.prompt_token_ids
        if plan.positions == "compact":
            return Planned(Reading(tuple(prompt[i] for i in indices)), plan)
        return Planned(Reading.of(prompt, indices), plan)

    def _extended(
        self, request: Request, anatomy: Anatomy, plan: Plan, earlier: _Conversation, missing: int
    ) -> Planned:
        """The earlier turn's slots, then the new tokens. Late blocks go right before the new question."""
        mode = request.prefill.follow_up
        turn = max([len(earlier.prompt), *(run.start for run in anatomy.question[-1:])])
        new = _new(plan, len(earlier.prompt))
        late: list[int] = []
        if mode == "backfill":
            late = _late(plan, set(earlier.indices), len(earlier.prompt), missing + len(new))
        before, after = [i for i in new if i < turn], [i for i in new if i >= turn]
        indices = (*earlier.indices, *before, *late, *after)
        plan = replace(plan, reasons=_reasons(plan, indices))
        self._counts[mode] += 1
        self._remember(request, indices, plan)
        reading = Reading.of(request.prompt_token_ids, indices)
        return Planned(reading, plan, follow_up=f"{mode}: {len(late)} tokens")

    def _earlier(self, request: Request) -> _Conversation | None:
        """The longest remembered prompt that this one continues; of equal ones the newest."""
        prompt = request.prompt_token_ids
        found = [
            one
            for one in reversed(self._conversations)
            if one.namespace == request.namespace
            and len(one.prompt) < len(prompt)
            and prompt[len(one.prompt) - 1] == one.prompt[-1]  # cheap test before the whole is compared
            and prompt[: len(one.prompt)] == one.prompt
        ]
        return max(found, key=lambda one: len(one.prompt), default=None)

    def _remember(self, request: Request, indices: tuple[int, ...], plan: Plan) -> None:
        self._conversations.append(_Conversation(request.namespace, request.prompt_token_ids, indices, plan))


def _why_afresh(config: PrefillConfig, plan: Plan, earlier: Plan, missing: int) -> tuple[str, str] | None:
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
