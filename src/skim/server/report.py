"""The statistics at the end of a reply: OpenAI's `usage`, and Skim's report (`skim`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skim.decode.stats import DecodeStats
from skim.engine.sequence import RequestMetrics
from skim.prefill.plan import Plan
from skim.server.protocol import replies
from skim.server.protocol.replies import (
    CompletionTokensDetails,
    KeptSpan,
    PromptTokensDetails,
    SkimReport,
    Usage,
)

TOKEN_BYTES = 4  # of text, on average
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Outcome:
    """A finished prompt: its tokens, metrics and plan."""

    prompt: Sequence[int]
    metrics: RequestMetrics
    plan: Plan | None = None  # None if the whole prompt was read

    def question(self, decode: Decode) -> str | None:
        """The text that the prompt was skimmed for, its places on separate lines."""
        if self.plan is None or not self.plan.asked:
            return None
        return "\n".join(decode(self.prompt[start:end]).strip() for start, end in self.plan.asked)

    def spans(self, decode: Decode) -> list[KeptSpan] | None:
        if self.plan is None:
            return None
        return [
            KeptSpan(
                start=span.start,
                end=span.end,
                reason=span.reason,
                text=decode(self.prompt[span.start : span.end]),
            )
            for span in self.plan.spans
        ]


def usage(each: Sequence[RequestMetrics], *, reasoning_tokens: int = 0) -> Usage:
    prompt = sum(metrics.prompt_tokens for metrics in each)
    completion = sum(metrics.generated_tokens for metrics in each)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(m.cached_tokens for m in each)),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )


class RunningUsage:
    """`usage` of a reply in progress, for `continuous_usage_stats`."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._completion = 0

    def add(self, tokens: int) -> None:
        self._completion += tokens

    def dump(self) -> dict[str, int]:
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._completion}
        return {**counts, "total_tokens": self._prompt + self._completion}


def report(each: Sequence[RequestMetrics]) -> SkimReport:
    """Token counts summed over all prompts; times, scorer, fallback and follow-up of the slowest prompt."""
    slowest = max(each, key=_total_ms)
    prompt = sum(metrics.prompt_tokens for metrics in each)
    return SkimReport(
        prompt_tokens=prompt,
        kept_tokens=sum(metrics.kept_tokens for metrics in each),
        cached_tokens=sum(metrics.cached_tokens for metrics in each),
        restored_tokens=sum(metrics.restored_tokens for metrics in each),
        generated_tokens=sum(metrics.generated_tokens for metrics in each),
        preemptions=sum(metrics.preemptions for metrics in each),
        queue_ms=round(slowest.queue_ms, 3),
        scoring_ms=round(slowest.scoring_ms, 3),
        prefill_ms=round(slowest.prefill_ms, 3),
        decode_ms=round(slowest.decode_ms, 3),
        scorer=slowest.scorer,
        fallback=slowest.fallback,
        follow_up=slowest.follow_up,
        kv_format=slowest.kv_format,
        kv_bytes=sum(metrics.kv_bytes for metrics in each),
        decode=_decode(each),
    )


def _decode(each: Sequence[RequestMetrics]) -> replies.DecodeStats | None:
    total = DecodeStats()
    for metrics in each:
        if metrics.decode is not None:
            total.add(metrics.decode)
    return replies.DecodeStats.model_validate(total) if total.rows else None


def report_with_texts(each: Sequence[Outcome], decode: Decode, *, spans: bool) -> SkimReport:
    """The report with the question of the slowest prompt and, if `spans`, the texts that were read of it."""
    slowest = _slowest(each)
    found = report([outcome.metrics for outcome in each])
    found.question = slowest.question(decode)
    found.spans = slowest.spans(decode) if spans else None
    return found


def size_of_texts(each: Sequence[Outcome]) -> int:
    """About how many bytes of text `report_with_texts` decodes for spans."""
    plan = _slowest(each).plan
    if plan is None:
        return 0
    read = sum(span.end - span.start for span in plan.spans)
    return TOKEN_BYTES * (read + sum(end - start for start, end in plan.asked))


def _slowest(each: Sequence[Outcome]) -> Outcome:
    return max(each, key=lambda outcome: _total_ms(outcome.metrics))


def _total_ms(metrics: RequestMetrics) -> float:
    return metrics.ttft_ms + metrics.decode_ms
