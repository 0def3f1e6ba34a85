"""The planner: chooses the prompt blocks to read. A scorer ranks them, a budget selects, the rest is skipped.

Planning runs in slices, so that the engine can run steps in between. A failure means a dense prefill:
planning writes nothing to the pool, so there is nothing to undo.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skim.errors import ParkedError, PromptTooLongError
from skim.memory.budget import is_out_of_memory
from skim.memory.store import LayerShape
from skim.prefill.anatomy import (
    QUESTION_TOKENS,
    Anatomy,
    UnmappableError,
    map_text,
    with_edges,
    with_results,
)
from skim.prefill.budget import beside_pinned, budget_of
from skim.prefill.embed import embed
from skim.prefill.follow_up import CachedTokens, FollowUps
from skim.prefill.passages import Passages, follow
from skim.prefill.plan import DenseReason, Plan, Positions, Reason
from skim.prefill.rank import Ranking, rank
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.prefill.rescue import rescue
from skim.prefill.scoring.decoding import Decode
from skim.prefill.scoring.scorer import SLICE_SECONDS, Scorer, ScoringError, ScoringTask, together
from skim.prefill.select import Budget, block_size_of, even_blocks, select_blocks
from skim.prefill.whole import FLAT, asks_for_everything, spread
from skim.registry import scorers

log = logging.getLogger(__name__)

HOPS = {"1": 1, "2": 2, "auto": 6}
"""Most looks at the prompt, by setting."""

WHY_WHOLE = {
    DenseReason.WHOLE: "the question is about the whole text, and no part of it stands out",
    DenseReason.NO_QUESTION: "nothing in the prompt asks; add a question or a task as a text of its own",
}


EXPECTED = {*WHY_WHOLE, DenseReason.MOSTLY_CACHED, DenseReason.DRAFTER_PARKED}
"""Reasons for a dense prefill that are no faults."""


@dataclass
class PrefillStats:
    """Counts since start."""

    activations: int = 0
    blocks_total: int = 0
    blocks_kept: int = 0
    below_threshold: int = 0
    follow_ups: Counter[str] = field(default_factory=Counter)  # by mode, or by reason to start afresh
    fallbacks: Counter[DenseReason] = field(default_factory=Counter)  # dense prefills

    def copy(self) -> PrefillStats:
        return replace(self, follow_ups=self.follow_ups.copy(), fallbacks=self.fallbacks.copy())


class Fallback(Exception):
    """No plan can be made. `reason` is counted, and the prompt is read densely."""

    def __init__(self, reason: DenseReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_SLICE = 1 << 19  # tokens between two yields


class Planner:
    """Plans for one model. `scorers` returns a scorer by name, or raises."""

    def __init__(
        self,
        scorers: Callable[[str], Scorer],
        window: int,  # the context window that is served
        cached_tokens: CachedTokens,
        decode: Decode,
        slice_seconds: float = SLICE_SECONDS,  # of scoring on a GPU; fixed, since batches change last bits
    ) -> None:
        self._slice_seconds = slice_seconds
        self.handed_over = False
        """True after a slice that left work to the device or waits for it. The plan queue resets it."""
        self.stats = PrefillStats()
        self._scorers = scorers
        self._window = window
        self._cached_tokens = cached_tokens
        self._decode = decode
        self._passages = Passages(decode)
        self._follow_ups = FollowUps(cached_tokens, self.stats.follow_ups)

    def forget(self) -> None:
        """Forget the skimmed prompts that follow-ups might continue."""
        self._follow_ups.conversations.clear()

    def wanted(self, request: Request) -> bool:
        """True if the prompt is to be skimmed."""
        return request.prefill.skims(len(request.prompt_token_ids)) and request.params.prompt_logprobs is None

    def refusal(self, request: Request) -> str | None:
        """The reason that a long prompt is not skimmed though its settings ask for it."""
        if request.params.prompt_logprobs is None or request.prefill.sparse_prefill == "off":
            return None
        return "log-probabilities of all its tokens are wanted"

    def unplanned(self, request: Request) -> Planned:
        """The reading of a prompt that is not `wanted`. One below the threshold of `auto` is counted as such,
        and one that only its log-probabilities keep from being skimmed as a dense prefill."""
        reading = Reading(request.prompt_token_ids)
        problem = self.refusal(request)
        skims = request.prefill.skims(len(request.prompt_token_ids))
        self.stats.below_threshold += request.prefill.sparse_prefill == "auto" and not skims
        if problem is None or not skims:
            return Planned(reading)
        self.stats.fallbacks[DenseReason.PROMPT_LOGPROBS] += 1
        return Planned(reading, fallback=DenseReason.PROMPT_LOGPROBS, problem=problem)

    def plan(self, request: Request) -> Generator[str | None, None, Planned]:
        """Plan in slices. A failure is counted and returns the dense prompt; PromptTooLongError is raised.

        Announces the model of its scorer before that is used, and its end after it (see `PlanQueue`).
        """
        try:
            return (yield from self._plan(request))
        except PromptTooLongError:
            raise
        except Exception as error:
            reason = _dense_reason(error)
            self.stats.fallbacks[reason] += 1
            if reason in EXPECTED:
                log.info("[prefill] dense (%s): %s", reason, error)
            else:
                log.warning("[prefill] dense, because planning failed (%s): %s", reason, error)
            return Planned(Reading(request.prompt_token_ids), fallback=reason, problem=str(error))

    def rank(self, ranking: Ranking) -> Generator[None, None, list[float]]:
        """Rank documents in slices, with the scorers of plans."""
        return rank(ranking, self._scorers, self._hand_over, self._slice_seconds)

    def embed(
        self, module: Any, layers: Sequence[LayerShape], texts: Sequence[tuple[int, ...]]
    ) -> Generator[None, None, list[np.ndarray]]:
        """Embed texts in slices."""
        return embed(module, layers, texts, seconds=self._slice_seconds, hand_over=self._hand_over)

    def _hand_over(self) -> None:
        self.handed_over = True

    def _plan(self, request: Request) -> Generator[str | None, None, Planned]:
        config, prompt = request.prefill, request.prompt_token_ids
        self._check_mostly_uncached(request)
        if isinstance(request.anatomy, UnmappableError):
            raise request.anatomy
        size = block_size_of(len(prompt), config.prefill_block_size)
        if len(prompt) <= size:
            raise Fallback(
                DenseReason.SHORT, f"the prompt has {len(prompt)} tokens, no more than a block of {size}"
            )
        anatomy = request.anatomy or map_text(prompt, min(max(1, config.tail_tokens), QUESTION_TOKENS))
        anatomy = with_edges(anatomy, config.head_tokens, config.tail_tokens)
        kept = with_results(anatomy, config.tool_results)
        ids = yield from _array_of(prompt)
        if not anatomy.question:
            return (yield from self._whole(request, ids, kept))
        began = time.perf_counter()
        read_again: list[int] = []
        task = ScoringTask(
            prompt,
            anatomy.question,
            size,
            policy=request.policy,
            scoring_budget=config.scoring_budget,
            hops=HOPS[config.hops],
            slice_seconds=self._slice_seconds,
            hand_over=self._hand_over,
            on_second_look=read_again.append,
        ).with_ids(ids)
        if asks_for_everything(" ".join(self._decode(task.question_runs))):
            return (yield from self._whole(request, ids, kept))
        positions, most = self._room(request)
        self._check_fits(sum(map(len, anatomy.pinned)), most)  # before the work of scoring
        if (declared := scorers().get(config.scorer)) is not None:
            yield declared.model
        scorer = self._scorers(config.scorer)
        scores, (rescued, carry) = yield from together([scorer.score(task), self._meanwhile(task)])
        yield "none"
        if len(scores) != task.blocks or not np.isfinite(np.array(scores, dtype=np.float64)).all():
            raise Fallback(
                DenseReason.NON_FINITE,
                f"{config.scorer} gave scores that are not finite, or not one per block",
            )
        yield None
        if not config.has_fixed_budget and _found_nothing(config.scorer, scores):
            return (yield from self._whole(request, ids, kept))
        carried = yield from follow(scores, carry)
        scoring_ms = (time.perf_counter() - began) * 1e3
        try:
            reasons = yield from self._select(request, kept, scores, carried, rescued, most)
        except PromptTooLongError:  # tool results are the first to give way
            reasons = yield from self._select(request, anatomy, scores, carried, rescued, most)
        yield None
        plan = Plan(
            size,
            len(prompt),
            reasons,
            positions,
            config.scorer,
            tuple(scores),
            {"scoring": scoring_ms},
            tuple((run.start, run.stop) for run in anatomy.question),
            sum(read_again),
        )
        return (yield from self._planned(request, ids, anatomy, plan))

    def _meanwhile(self, task: ScoringTask) -> Generator[None, None, tuple[list[int], np.ndarray]]:
        """Rescued blocks and edges that passages continue across: found while a GPU scores."""
        rescued = yield from rescue(task.ids, task.question, task.block_size, edge=task.block_size // 4)
        carry = yield from self._passages.carry(task.ids, task.block_size)
        return rescued, carry

    def _planned(
        self, request: Request, ids: np.ndarray, anatomy: Anatomy, plan: Plan
    ) -> Generator[None, None, Planned]:
        yield
        planned = yield from self._follow_ups.reading_of(request, ids, anatomy, plan)
        yield
        read = planned.plan or plan
        self.stats.activations += 1
        self.stats.blocks_total += len(read.kept)
        self.stats.blocks_kept += sum(read.kept)
        log.info(
            "[prefill] plan: %s%s", read.summary(), f", {planned.follow_up}" if planned.follow_up else ""
        )
        return planned

    def _whole(self, request: Request, ids: np.ndarray, anatomy: Anatomy) -> Generator[None, None, Planned]:
        """Read the whole prompt, or cover it evenly if it does not fit.

        With a question and a fixed number of tokens, cover it evenly within that number.
        """
        config, count = request.prefill, len(request.prompt_token_ids)
        reason = DenseReason.WHOLE if anatomy.question else DenseReason.NO_QUESTION
        fixed = anatomy.question and (config.keep_ratio is not None or config.keep_tokens is not None)
        if count < self._window and not fixed:
            raise Fallback(reason, WHY_WHOLE[reason])
        positions, room = self._room(request)
        most = min(room, budget_of(config).allowed(count)) if fixed else room
        size = block_size_of(count, config.prefill_block_size)
        reasons = even_blocks(count, size, anatomy.pinned, most)
        asked = tuple((run.start, run.stop) for run in anatomy.question)
        plan = Plan(size, count, reasons, positions, config.scorer, asked=asked)
        self._check_fits(plan.kept_tokens, room)
        log.info("[prefill] covered evenly: %s", WHY_WHOLE[reason])
        return (yield from self._planned(request, ids, anatomy, plan))

    def _check_mostly_uncached(self, request: Request) -> None:
        """Raise if `auto` finds fewer uncached tokens than in a prompt below its threshold.

        Scoring would take longer than reading them, and would see less.
        """
        config, prompt = request.prefill, request.prompt_token_ids
        count = len(prompt)
        if config.sparse_prefill != "auto" or not request.use_prefix_cache or count >= self._window:
            return
        cached = self._cached_tokens(Reading(prompt), request.namespace)
        if count - cached < min(config.min_prompt_tokens, cached):
            raise Fallback(DenseReason.MOSTLY_CACHED, f"{cached} of {count} tokens are cached")

    def _room(self, request: Request) -> tuple[Positions, int]:
        """Positions of the kept tokens, and the most that may be kept.

        A prompt within the context window keeps original positions, and the reply gets the rest of it,
        as after a dense prefill. At compact positions, room is reserved for the reply.
        """
        chosen, count = request.prefill.positions, len(request.prompt_token_ids)
        if chosen != "compact" and count < self._window:
            return "original", count
        if chosen == "original":
            raise PromptTooLongError(
                f"the prompt has {count} tokens, which at original positions leaves no room for a "
                f"reply in the context window of {self._window}; set positions to auto or compact",
                fields="positions",
            )
        reply = request.params.max_tokens or self._window // 4
        return "compact", self._window - min(reply, self._window // 2)

    def _select(
        self,
        request: Request,
        anatomy: Anatomy,
        scores: list[float],
        carried: list[float],
        rescued: list[int],
        most: int,
    ) -> Generator[None, None, tuple[Reason | None, ...]]:
        """The reasons to keep blocks by their `carried` scores, which passages that continue have raised."""
        config, count = request.prefill, len(request.prompt_token_ids)
        size = block_size_of(count, config.prefill_block_size)
        continued = set(np.flatnonzero(np.array(carried) > np.array(scores)).tolist())

        def choose(
            budget: Budget, least: int, beside: int
        ) -> Generator[None, None, tuple[tuple[Reason | None, ...], int]]:
            """Reasons by block, and the number of kept tokens."""
            reasons = yield from select_blocks(
                prompt_tokens=count,
                block_size=size,
                scores=carried,
                pinned=anatomy.pinned,
                continued=continued,
                rescued=rescued,
                budget=budget,
                radius=config.neighbour_radius,
                min_scored_tokens=least,
                beside_pinned=beside,
                rescue_cap=config.rescue_cap,
            )
            yield
            return reasons, sum(
                min(size, count - i * size) for i, why in enumerate(reasons) if why is not None
            )

        budget = budget_of(config)
        if not config.has_fixed_budget and most < count:  # at compact positions, half of the window is enough
            budget = Budget(tokens=min(budget.allowed(count), most // 2), mass=budget.mass)
        beside = beside_pinned(config, count, size, anatomy.question)
        reasons, kept = yield from choose(budget, config.min_scored_tokens, beside)
        if kept > most:
            reasons, kept = yield from choose(Budget(tokens=most), 1, 0)
        self._check_fits(kept, most)
        return reasons

    def _check_fits(self, kept: int, most: int) -> None:
        if kept > most:
            raise PromptTooLongError(
                f"the prompt has {kept} tokens that must be kept, but the context window of {self._window} "
                f"has room for {most} in addition to a reply; shorten the system message, the tools, calls "
                "or the question, send fewer messages, lower head_tokens or tail_tokens, or raise "
                "max_model_len",
                fields=("head_tokens", "tail_tokens", "max_model_len"),
            )


def _array_of(prompt: tuple[int, ...]) -> Generator[None, None, np.ndarray]:
    """The tokens as an array. Converting a million takes tens of milliseconds, so it is done in slices."""
    ids = np.empty(len(prompt), dtype=np.int64)
    for start in range(0, len(prompt), _SLICE):
        ids[start : start + _SLICE] = prompt[start : start + _SLICE]
        yield
    return ids


def _found_nothing(scorer: str, scores: list[float]) -> bool:
    """True if there is no score at all, or if scores that are chances are spread over the whole text."""
    declared = scorers().get(scorer)
    return max(scores) <= 0 or (declared is not None and declared.odds and spread(scores) > FLAT)


def _dense_reason(error: Exception) -> DenseReason:
    if isinstance(error, Fallback):
        return error.reason
    if isinstance(error, UnmappableError):
        return DenseReason.UNMAPPABLE
    if is_out_of_memory(error):
        return DenseReason.OUT_OF_MEMORY
    if isinstance(error, ScoringError):
        return error.reason
    if isinstance(error, ParkedError):
        return DenseReason.DRAFTER_PARKED
    return DenseReason.SCORER_FAILED
