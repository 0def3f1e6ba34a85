"""Runs one sample in one mode, through the engine's public interface. An invalid measurement is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from skim.evals.messages import messages_of
from skim.evals.task import Sample
from skim.measure.modes import Mode
from skim.measure.report import MeasurementError
from skim.prefill.plan import DenseReason, Reason
from skim.tokenization import encode_with_offsets

if TYPE_CHECKING:
    from skim.engine.sequence import Finished, RequestMetrics
    from skim.llm import LLM, Prepared
    from skim.prefill.plan import Plan

READ_WHOLE = (DenseReason.WHOLE, DenseReason.NO_QUESTION)  # reasons to read a prompt in full, not failures


@dataclass(frozen=True)
class Outcome:
    """The last reply of a conversation, and the metrics of its last prompt."""

    reply: str
    metrics: RequestMetrics
    kept: float | None  # fraction of the evidence that was read in full; None without evidence
    told: float | None  # 1 if a sample that needs the whole text was read in full or evenly; else None


@dataclass(frozen=True)
class Read:
    """The way in which a prompt was read, or would be."""

    prompt_tokens: int
    plan: Plan | None  # None: in full
    fallback: str | None = None  # the reason for that, if it was to be skimmed

    @classmethod
    def of(cls, metrics: RequestMetrics, plan: Plan | None) -> Read:
        return cls(metrics.prompt_tokens, plan, metrics.fallback)


def ask(llm: LLM, sample: Sample, mode: Mode, salt: str) -> Outcome:
    """Run the conversation. Its turns share a prefix cache under `salt`, and share nothing with others.

    Raises MeasurementError if a reply is empty or a prompt was not read as the mode says.
    """
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        messages += messages_of(llm, turn)
        prompt = llm.encode_chat(messages, skimmed=mode.prefill.sparse_prefill != "off")
        reply, done = _generate(llm, prompt, sample.max_tokens, mode, salt)
        check_read(mode, Read.of(done.metrics, done.plan), whole=sample.whole)
        if not reply.strip():
            raise MeasurementError("the reply is empty")
        messages.append({"role": "assistant", "content": reply})
    kept = None
    if sample.evidence:
        kept = kept_share(done.plan, evidence_tokens(llm, prompt, sample.evidence))
    return Outcome(reply, done.metrics, kept, told(done.plan) if sample.whole else None)


def check_read(mode: Mode, read: Read, *, whole: bool = False) -> None:
    """Raise MeasurementError unless the prompt was read as the mode says.

    A `whole` sample needs all of its text, so the planner may read it in full in any mode.
    """
    plan = read.plan
    skims = mode.prefill.skims(read.prompt_tokens)  # `auto` is dense below its threshold
    may_be_whole = whole or not mode.prefill.has_fixed_budget
    expected = (DenseReason.MOSTLY_CACHED, *(READ_WHOLE if may_be_whole else ()))
    if read.fallback is not None and read.fallback not in expected:
        raise MeasurementError(f"the prompt was read in full, because planning failed: {read.fallback}")
    if skims and (whole or read.fallback is not None):
        return
    if skims == (plan is None):
        raise MeasurementError(f"the prompt was {'read in full' if plan is None else 'skimmed'}")
    asked = mode.prefill.keep_ratio == 1 or mode.prefill.keep_mass is not None
    if plan is not None and plan.kept_tokens == plan.prompt_tokens and not asked:
        raise MeasurementError(  # every scorer would look as good as dense
            f"all {plan.prompt_tokens} tokens were kept, so nothing was skimmed; use longer contexts, keep "
            f"less, or lower min_scored_tokens, which is {mode.prefill.min_scored_tokens}"
        )


def told(plan: Plan | None) -> float:
    """1 if the prompt was read in full, or evenly from its beginning to its end; else 0."""
    return float(plan is None or all(plan.kept) or Reason.EVEN in plan.reasons)


Places = tuple[tuple[range, ...], ...]  # for each passage, the tokens of each of its occurrences


def evidence_tokens(llm: LLM, prompt: Prepared, evidence: Sequence[str]) -> Places:
    """The tokens of these passages in the prompt. Raises MeasurementError if a passage is not in it."""
    text = prompt.text or ""
    _, offsets = encode_with_offsets(llm.tokenizer, text)
    starts, ends = offsets.T

    def tokens(start: int, end: int) -> range:
        found = np.flatnonzero((starts < end) & (ends > start))
        return range(int(found[0]), int(found[-1]) + 1)

    places = []
    for passage in evidence:
        found = [match.start() for match in re.finditer(f"(?={re.escape(passage)})", text)]
        if not found:
            raise MeasurementError(f"the evidence {passage!r} is not in the prompt")
        places.append(tuple(tokens(start, start + len(passage)) for start in found))
    return tuple(places)


def kept_share(plan: Plan | None, places: Places) -> float:
    """The fraction of passages that were read in full.

    A passage may occur several times, such as a sentence shared by two documents. It counts if one
    occurrence was read in full.
    """
    if plan is None:
        return 1.0

    def is_read(tokens: range) -> bool:
        first, last = (index // plan.block_size for index in (tokens[0], tokens[-1]))
        return all(plan.kept[first : last + 1])

    return sum(any(map(is_read, occurrences)) for occurrences in places) / len(places)


def _generate(llm: LLM, prompt: Prepared, max_tokens: int, mode: Mode, salt: str) -> tuple[str, Finished]:
    from skim.engine.sequence import Finished
    from skim.prefill.request import Request
    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request(
        prompt.tokens, params, mode.prefill, prompt.anatomy, cache_salt=salt, decode=mode.decode
    )
    handle = llm.engine.submit(request)
    text = ""
    try:
        for event in handle:
            if isinstance(event, Finished):
                return text, event
            text += event.text
    except BaseException:
        handle.abort()
        raise
    raise AssertionError("the events ended without Finished")
