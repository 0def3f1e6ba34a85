"""The prefill plan: the prompt blocks to read, the reason for each, and the time that planning took.

Plain data for responses, logs and reports. It knows nothing of models, text or memory, and it reports the
achieved numbers, not the requested ones.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, get_args

Positions = Literal["original", "compact"]


class Reason(StrEnum):
    """The reason to keep a prompt block. If several reasons apply, the first one found counts."""

    PINNED = "pinned"  # must be kept: template, system, tools, question, edges
    SCORED = "scored"  # among the best scores
    RESCUED = "rescued"  # shares rare tokens with the question
    CONTINUED = "continued"  # continues the passage of a kept block
    NEIGHBOUR = "neighbour"  # next to a scored or rescued block
    EVEN = "even"  # the question is about the whole text, of which this is a sample
    EARLIER = "earlier"  # read for an earlier question of the conversation


class DenseReason(StrEnum):
    """The reason for a dense prefill instead of a skimmed one. Values are metric labels and reply fields."""

    SHORT = "short"  # it has no more than one prompt block
    NO_QUESTION = "no_question"  # nothing in it asks, so no part of it is better than another
    UNMAPPABLE = "unmappable"  # the chat template's output does not show the question or the tokens to keep
    SCORER_WINDOW = "scorer_window"  # longer than the scoring model's context window
    WHOLE = "whole"  # the question is about the whole text
    MOSTLY_CACHED = "mostly_cached"  # so much of it that `auto` reads the rest in full
    NON_FINITE = "non_finite"  # scores that are not finite, or of the wrong number
    OUT_OF_MEMORY = "out_of_memory"  # while scoring
    DRAFTER_PARKED = "drafter_parked"  # by an administrator
    SCORER_FAILED = "scorer_failed"  # any other error
    PROMPT_LOGPROBS = "prompt_logprobs"  # log-probabilities of its tokens are wanted, so all are computed


@dataclass(frozen=True)
class Span:
    """Prompt tokens `start:end`: a run kept for one reason."""

    start: int
    end: int
    reason: Reason


@dataclass(frozen=True)
class Plan:
    """The prompt blocks that are prefilled. Construction raises `ValueError` if fields are inconsistent."""

    block_size: int
    prompt_tokens: int
    reasons: tuple[Reason | None, ...]  # one per block, None if skipped; the last block may be partial
    positions: Positions  # kept tokens have their original positions, or are renumbered from 0
    scorer: str
    scores: tuple[float, ...] | None = None  # one per block
    timings_ms: Mapping[str, float] = field(default_factory=dict, hash=False)  # such as {"scoring": 12.3}
    asked: tuple[tuple[int, int], ...] = ()  # prompt tokens `start, end` of the question, in order
    read_again: int = 0  # blocks that the scorer read a second time before it ranked them

    def __post_init__(self) -> None:
        for name in ("block_size", "prompt_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.positions not in get_args(Positions):
            raise ValueError(f"positions must be 'original' or 'compact', got {self.positions!r}")
        blocks = -(-self.prompt_tokens // self.block_size)
        if isinstance(self.read_again, bool) or self.read_again not in range(blocks + 1):
            raise ValueError(
                f"read_again must be 0 to {blocks}, the number of blocks, got {self.read_again!r}"
            )
        reasons = tuple(None if reason is None else Reason(reason) for reason in self.reasons)
        object.__setattr__(self, "reasons", reasons)
        if len(reasons) != blocks:
            raise ValueError(f"{blocks} blocks need {blocks} reasons, got {len(reasons)}")
        if self.scores is not None:
            scores = tuple(map(float, self.scores))
            object.__setattr__(self, "scores", scores)
            if len(scores) != blocks:
                raise ValueError(f"{blocks} blocks need {blocks} scores, got {len(scores)}")
            if not all(map(math.isfinite, scores)):
                block, score = next((b, s) for b, s in enumerate(scores) if not math.isfinite(s))
                raise ValueError(f"the score of block {block} is {score}; scores must be finite")
        asked = tuple((int(start), int(end)) for start, end in self.asked)
        object.__setattr__(self, "asked", asked)
        edges = [0, *itertools.chain.from_iterable(asked), self.prompt_tokens]
        if any(a > b for a, b in itertools.pairwise(edges)):
            raise ValueError(f"asked must be ordered ranges of {self.prompt_tokens} tokens, got {asked}")
        timings = {phase: float(ms) for phase, ms in self.timings_ms.items()}
        object.__setattr__(self, "timings_ms", timings)
        for phase, ms in timings.items():
            if not 0 <= ms < math.inf:
                raise ValueError(f"timings_ms[{phase!r}] must be a number of at least 0, got {ms}")

    @cached_property
    def kept(self) -> tuple[bool, ...]:
        """True for each block that is prefilled."""
        return tuple(reason is not None for reason in self.reasons)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Runs of neighbouring blocks with the same reason."""
        return tuple(
            Span(tokens.start, tokens.stop, reason)
            for reason, tokens in self._coalesced(self.reasons)
            if reason is not None
        )

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """Runs of kept tokens without a gap, for any reasons."""
        return tuple(tokens for kept, tokens in self._coalesced(self.kept) if kept)

    @cached_property
    def kept_tokens(self) -> int:
        return sum(map(len, self.runs))

    @property
    def ratio(self) -> float:
        """Achieved fraction of prompt tokens that are kept."""
        return self.kept_tokens / self.prompt_tokens

    @cached_property
    def coverage(self) -> float | None:
        """Kept fraction of the score mass; None without positive scores. Negative scores count as 0."""
        if self.scores is None or (top := max(self.scores)) <= 0:
            return None
        mass = [max(score, 0.0) / top for score in self.scores]
        return math.fsum(m for m, kept in zip(mass, self.kept, strict=True) if kept) / math.fsum(mass)

    @property
    def first_gap(self) -> int:
        """Index of the first skipped token: all before it is exact. `prompt_tokens` if nothing is skipped."""
        runs = self.runs
        return runs[0].stop if runs and runs[0].start == 0 else 0

    def token_indices(self) -> list[int]:
        """Indices of the kept tokens, in order."""
        return list(itertools.chain.from_iterable(self.runs))

    @property
    def span_count(self) -> str:
        """`17 spans`, or `1 span`."""
        return f"{len(self.spans)} span{'' if len(self.spans) == 1 else 's'}"

    def summary(self) -> str:
        """`52/1024 blocks kept (5.1%, 17 spans) blend 0.21s, 128 read again`; the percentage is of tokens."""
        share = f"{self.ratio:.1%}, {self.span_count}"
        text = f"{sum(self.kept)}/{len(self.kept)} blocks kept ({share}) {self.scorer}"
        scoring = self.timings_ms.get("scoring")
        text = text if scoring is None else f"{text} {scoring / 1000:.2f}s"
        return f"{text}, {self.read_again} read again" if self.read_again else text

    def to_json(self) -> str:
        """All fields as JSON, without derived ones; `from_json` returns an equal plan."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the output of `to_json`; anything else is a `ValueError`."""
        fields: Any = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"a plan in JSON has the fields {', '.join(cls.__dataclass_fields__)}")
        try:
            return cls(**fields)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a field of the plan has the wrong type: {error}") from error

    def _coalesced(self, values: tuple[Any, ...]) -> list[tuple[Any, range]]:
        """Runs of equal values over blocks, with the prompt tokens of those blocks."""
        found = []
        block = 0
        for value, same in itertools.groupby(values):
            start, block = block, block + sum(1 for _ in same)
            tokens = range(start * self.block_size, min(block * self.block_size, self.prompt_tokens))
            found.append((value, tokens))
        return found
