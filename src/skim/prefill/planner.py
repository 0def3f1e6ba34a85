"""From a prompt to what of it is read: a scorer ranks its blocks, a selection decides, the rest is skipped.

Planning goes in slices, between which the engine runs steps for the others. Whatever goes wrong in it means
a clean dense prefill: nothing has been written yet.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from skim.attention.blocksparse.policy import Policy
from skim.config import PrefillConfig
from skim.errors import PromptTooLongError
from skim.memory.budget import is_out_of_memory
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import QUESTION_TOKENS, Anatomy, UnmappableError, map_text, with_edges
from skim.prefill.plan import Plan, Positions, Reason
from skim.prefill.reading import Reading
from skim.prefill.rescue import rescue
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask
from skim.prefill.select import Budget, select_blocks

log = logging.getLogger(__name__)

DEFAULT_RATIO = 0.1
BACKFILL_SHARE = 0.5  # of a fresh plan's tokens, that a follow-up computes
CONVERSATIONS = 64  # sparse prompts remembered, so that a further question can build on one


@dataclass
class PrefillStats:
    """Counts since start."""

    activations: int = 0
    blocks_total: int = 0
    blocks_kept: int = 0
    below_threshold: int = 0
    mostly_cached: int = 0  # dense, because no more than a short prompt was left to read
    follow_ups: Counter[str] = field(default_factory=Counter)  # backfill, or why a plan was made afresh
    fallbacks: Counter[str] = field(default_factory=Counter)  # dense prefills for want of a plan, by reason

    def copy(self) -> PrefillStats:
        return replace(self, follow_ups=self.follow_ups.copy(), fallbacks=self.fallbacks.copy())


@dataclass(frozen=True)
class SparseTask:
    """A prompt to be skimmed, and how."""

    prompt: tuple[int, ...]
    anatomy: Anatomy | UnmappableError | None  # None: a raw text, whose end is the question
    config: PrefillConfig
    salt: str
    reply_tokens: int | None  # most tokens that will be generated; None for what is left of the window
    use_prefix_cache: bool = True  # whether it may build on what was read earlier

    @property
    def namespace(self) -> Namespace:
        return namespace_of(self.salt, self.config)


@dataclass(frozen=True)
class Planned:
    """What is read, and how that came about."""

    reading: Reading
    plan: Plan | None = None
    fallback: str | None = None  # why there is no plan, in a word
    problem: str | None = None  # and in a sentence
    follow_up: str | None = None  # backfill, or why not


@dataclass(frozen=True)
class _Conversation:
    """A prompt that was skimmed at original positions, and what was read of it."""

    namespace: Namespace
    prompt: tuple[int, ...]
    indices: tuple[int, ...]
    plan: Plan


class Fallback(Exception):
    """A plan cannot be made, for a reason that is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Planner:
    """Plans for one model. `scorers` makes a scorer by its name, or raises."""

    def __init__(
        self,
        scorers: Callable[[str], Scorer],
        window: int,
        is_cached: Callable[[Reading, Namespace], int],  # tokens of a reading that are in memory
    ) -> None:
        self.stats = PrefillStats()
        self._scorers = scorers
        self._window = window
        self._is_cached = is_cached
        self._conversations: deque[_Conversation] = deque(maxlen=CONVERSATIONS)

    def wanted(self, config: PrefillConfig, prompt_tokens: int) -> bool:
        """Whether a prompt of this length is to be skimmed; one that is too short is counted."""
        skimmed = config.skims(prompt_tokens)
        self.stats.below_threshold += config.sparse_prefill == "auto" and not skimmed
        return skimmed

    def plan(self, task: SparseTask) -> Generator[None, None, Planned]:
        """What to read of the prompt; all of it where a plan fails."""
        try:
            return (yield from self._plan(task))
        except PromptTooLongError:
            raise
        except Exception as error:
            reason = _reason(error)
            self.stats.fallbacks[reason] += 1
            log.warning("[prefill] dense, because planning failed (%s): %s", reason, error)
            return Planned(Reading(task.prompt), fallback=reason, problem=str(error))

    def _plan(self, task: SparseTask) -> Generator[None, None, Planned]:
        config, prompt = task.config, task.prompt
        if (dense := self._mostly_cached(task)) is not None:
            return dense
        if isinstance(task.anatomy, UnmappableError):
            raise task.anatomy
        size = config.prefill_block_size
        if len(prompt) <= size:
            raise Fallback("short", f"the prompt has {len(prompt)} tokens, no more than a block of {size}")
        anatomy = task.anatomy or map_text(prompt, min(max(1, config.tail_tokens), QUESTION_TOKENS))
        anatomy = with_edges(anatomy, config.head_tokens, config.tail_tokens)
        began = time.perf_counter()
        scorer = self._scorers(config.scorer)
        asked = ScoringTask(prompt, anatomy.question, size, policy=policy_of(config))
        scores = yield from scorer.score(asked)
        if len(scores) != -(-len(prompt) // size) or not all(map(math.isfinite, scores)):
            raise Fallback("non_finite", f"{scorer.name} gave scores that are not finite, or not one a block")
        rescued = rescue(asked.ids, anatomy.question, size, edge=size // 4)
        scoring_ms = (time.perf_counter() - began) * 1e3

        positions, most = self._room(task)
        reasons = self._select(task, anatomy, scores, rescued, most)
        plan = Plan(
            size, len(prompt), reasons, positions, config.scorer, tuple(scores), {"scoring": scoring_ms}
        )
        planned = self._follow_up(task, anatomy, plan) or self._fresh(task, plan)
        read = planned.plan or plan
        self.stats.activations += 1
        self.stats.blocks_total += len(read.kept)
        self.stats.blocks_kept += sum(read.kept)
        log.info(
            "[prefill] plan: %s%s", read.summary(), f", {planned.follow_up}" if planned.follow_up else ""
        )
        return planned

    def _mostly_cached(self, task: SparseTask) -> Planned | None:
        """All of a prompt that is mostly cached, if `auto` finds no more to read of it than of a short one:
        to score it would take longer, and see less."""
        count = len(task.prompt)
        if task.config.sparse_prefill != "auto" or not task.use_prefix_cache or count >= self._window:
            return None
        reading = Reading(task.prompt)
        known = self._is_cached(reading, task.namespace)
        if count - known >= min(task.config.min_prompt_tokens, known):
            return None
        self.stats.mostly_cached += 1
        log.info("[prefill] dense: %d of %d tokens are in memory", known, count)
        return Planned(reading)

    def _room(self, task: SparseTask) -> tuple[Positions, int]:
        """Where kept tokens stand, and how many there may be.

        A prompt that fits the window is treated as a dense one is: the reply gets what the window leaves. At
        compact positions a reply has room after what is kept.
        """
        chosen = task.config.positions
        fits = len(task.prompt) < self._window
        if chosen != "compact" and fits:
            return "original", len(task.prompt)
        if chosen == "original":
            raise PromptTooLongError(
                f"the prompt has {len(task.prompt)} tokens, which at original positions leaves no room for a "
                f"reply in the window of {self._window}; set positions to auto or compact"
            )
        return "compact", self._window - min(task.reply_tokens or self._window // 4, self._window // 2)

    def _select(
        self, task: SparseTask, anatomy: Anatomy, scores: list[float], rescued: list[int], most: int
    ) -> tuple[Reason | None, ...]:
        config, count = task.config, len(task.prompt)

        def choose(budget: Budget, floor: int) -> tuple[Reason | None, ...]:
            return select_blocks(
                prompt_tokens=count,
                block_size=config.prefill_block_size,
                scores=scores,
                pinned=anatomy.pinned,
                rescued=rescued,
                budget=budget,
                radius=config.neighbour_radius,
                min_scored_tokens=floor,
                rescue_cap=config.rescue_cap,
            )

        reasons = choose(budget_of(config), config.min_scored_tokens)
        size = config.prefill_block_size
        kept = sum(min(size, count - i * size) for i, reason in enumerate(reasons) if reason is not None)
        if kept > most:
            reasons = choose(Budget(tokens=most), 1)
            kept = sum(min(size, count - i * size) for i, reason in enumerate(reasons) if reason is not None)
        if kept > most:
            raise PromptTooLongError(
                f"what must be kept of the prompt has {kept} tokens, but the window of {self._window} has "
                f"room for {most} beside a reply; shorten the system message, the tools or the question, "
                "lower head_tokens or tail_tokens, or raise max_model_len"
            )
        return reasons

    def _fresh(self, task: SparseTask, plan: Plan) -> Planned:
        indices = plan.token_indices()
        self._remember(task, tuple(indices), plan)
        if plan.positions == "compact":
            return Planned(Reading(tuple(task.prompt[i] for i in indices)), plan)
        return Planned(Reading.of(task.prompt, indices), plan)

    # -- a further question about what was read

    def _earlier(self, task: SparseTask) -> _Conversation | None:
        """The longest skimmed prompt that this one continues; of equal ones the newest."""
        found = [
            one
            for one in reversed(self._conversations)
            if one.namespace == task.namespace
            and len(one.prompt) < len(task.prompt)
            and task.prompt[len(one.prompt) - 1] == one.prompt[-1]  # before the whole is copied and compared
            and task.prompt[: len(one.prompt)] == one.prompt
        ]
        return max(found, key=lambda one: len(one.prompt), default=None)

    def _follow_up(self, task: SparseTask, anatomy: Anatomy, plan: Plan) -> Planned | None:
        """Add what the new question needs to what was read for an earlier one, if that is still in memory.

        Late blocks stand at their own positions, and queries read only earlier positions, so it does not
        matter that they come later in memory. They go right before the new question, which reads them.
        """
        earlier = self._earlier(task)
        if earlier is None or not task.use_prefix_cache:
            return None
        have = Reading.of(task.prompt, earlier.indices)
        missing = len(earlier.indices) - self._is_cached(have, task.namespace)
        afresh = _why_afresh(task.config, plan, earlier.plan, missing)
        if afresh is not None:
            short, reason = afresh
            self.stats.follow_ups[short] += 1
            return replace(self._fresh(task, plan), follow_up=f"replan: {reason}")
        turn = max(len(earlier.prompt), anatomy.question.start)
        new = _new(plan, len(earlier.prompt))
        late: list[int] = []
        if task.config.follow_up == "backfill":
            late = _late(plan, set(earlier.indices), len(earlier.prompt), missing + len(new))
        before, after = [i for i in new if i < turn], [i for i in new if i >= turn]
        indices = (*earlier.indices, *before, *late, *after)
        plan = replace(plan, reasons=_reasons(plan, indices))
        self.stats.follow_ups[task.config.follow_up] += 1
        self._remember(task, indices, plan)
        told = f"{task.config.follow_up}: {len(late)} tokens"
        return Planned(Reading.of(task.prompt, indices), plan, follow_up=told)

    def _remember(self, task: SparseTask, indices: tuple[int, ...], plan: Plan) -> None:
        self._conversations.append(_Conversation(task.namespace, task.prompt, indices, plan))


def _why_afresh(config: PrefillConfig, plan: Plan, earlier: Plan, missing: int) -> tuple[str, str] | None:
    """Why a further question is planned afresh, as a word for the metrics and in words; None if it is not."""
    if "compact" in (plan.positions, earlier.positions):
        return "compact", "positions are compact"
    if config.follow_up == "replan":
        return "replan", "as asked"
    if plan.block_size != earlier.block_size:
        return "block_size", f"blocks were of {earlier.block_size} tokens, now of {plan.block_size}"
    if missing > BACKFILL_SHARE / 2 * plan.kept_tokens:
        return "evicted", "what was read is no longer in memory"
    return None


def _new(plan: Plan, begin: int) -> list[int]:
    """What is read from `begin` on, where an earlier turn ended: all, if that is little; else what is kept.

    The rest of the block that the earlier turn ended in always belongs to it: blocks are read whole.
    """
    if plan.prompt_tokens - begin <= BACKFILL_SHARE * plan.kept_tokens:
        return list(range(begin, plan.prompt_tokens))
    edge = min(-(-begin // plan.block_size) * plan.block_size, plan.prompt_tokens)
    return [*range(begin, edge), *(i for i in plan.token_indices() if i >= edge)]


def _reasons(plan: Plan, indices: Sequence[int]) -> tuple[Reason | None, ...]:
    """Why each block of these tokens is kept: for the plan's reason, or because it was read earlier."""
    read = {index // plan.block_size for index in indices}
    return tuple((why or Reason.EARLIER) if b in read else None for b, why in enumerate(plan.reasons))


def _late(plan: Plan, have: set[int], begin: int, new: int) -> list[int]:
    """The tokens before `begin` that a new question needs most: as many as half of a fresh plan allows.

    `new` tokens are computed in any case; one block always is.
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


def budget_of(config: PrefillConfig) -> Budget:
    if config.keep_tokens is not None:
        return Budget(tokens=config.keep_tokens)
    if config.keep_mass is not None:
        return Budget(mass=config.keep_mass)
    return Budget(ratio=config.keep_ratio or DEFAULT_RATIO)


def policy_of(config: PrefillConfig) -> Policy | None:
    """Which blocks attention reads while a prompt is computed; None for all."""
    sparse = config.prefill_attention == "blocksparse"
    return Policy(float(config.blocksparse_alpha)) if sparse else None


def namespace_of(salt: str, config: PrefillConfig) -> Namespace:
    """Who may share what is computed: what came of a policy is for those with the same one."""
    policy = policy_of(config)
    return Namespace(salt) if policy is None else Namespace(salt, repr(policy))


def _reason(error: Exception) -> str:
    """A short word for the metrics."""
    if isinstance(error, Fallback):
        return error.reason
    if isinstance(error, UnmappableError):
        return "unmappable"
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, ScoringError):
        return error.reason
    return "scorer_failed"
