"""Runs one sample in one mode, through the engine's public interface. An invalid measurement is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skim.evals.room import Turns
from skim.evals.task import Sample
from skim.measure.modes import Mode, may_read_densely
from skim.measure.report import MeasurementError
from skim.tokenization import encode_with_offsets

if TYPE_CHECKING:
    from skim.engine.sequence import Finished, RequestMetrics
    from skim.llm import LLM, Prepared
    from skim.prefill.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """The last reply of a conversation, and the metrics of its last prompt."""

    reply: str
    metrics: RequestMetrics
    kept: float | None  # fraction of the evidence that was read in full; None without evidence


def ask(llm: LLM, sample: Sample, mode: Mode, salt: str) -> Outcome:
    """Run the conversation. Its turns share a prefix cache under `salt`, and share nothing with others.

    Raises MeasurementError if a reply is empty or a prompt was not read as the mode says.
    """
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        messages.append(_user(turn))
        prompt = llm.encode_chat(messages, skimmed=mode.prefill.sparse_prefill != "off")
        reply, done = _generate(llm, prompt, sample.max_tokens, mode, salt)
        check_read(mode, done.metrics, done.plan)
        if not reply.strip():
            raise MeasurementError("the reply is empty")
        messages.append({"role": "assistant", "content": reply})
    kept = kept_share(llm, prompt, done.plan, sample.evidence) if sample.evidence else None
    return Outcome(reply, done.metrics, kept)


def check_read(mode: Mode, metrics: RequestMetrics, plan: Plan | None) -> None:
    """Raise MeasurementError unless the prompt was read as the mode says."""
    if metrics.fallback is not None:
        raise MeasurementError(f"the prompt was read in full, because planning failed: {metrics.fallback}")
    skims = mode.prefill.skims(metrics.prompt_tokens)  # `auto` is dense below its threshold
    if skims and may_read_densely(mode.prefill, metrics.prompt_tokens, metrics.cached_tokens):
        return
    if skims == (plan is None):
        raise MeasurementError(f"the prompt was {'read in full' if plan is None else 'skimmed'}")
    asked = mode.prefill.keep_ratio == 1 or mode.prefill.keep_mass is not None
    if plan is not None and plan.kept_tokens == plan.prompt_tokens and not asked:
        raise MeasurementError(  # every scorer would look as good as dense
            f"all {plan.prompt_tokens} tokens were kept, so nothing was skimmed; use longer contexts, keep "
            f"less, or lower min_scored_tokens, which is {mode.prefill.min_scored_tokens}"
        )


def count_prompt(llm: LLM, turns: Turns) -> int:
    """Tokens of the last prompt of a conversation, with empty replies."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [_user(turn), {"role": "assistant", "content": ""}]
    return len(llm.encode_chat(messages[:-1], skimmed=False).tokens)


def kept_share(llm: LLM, prompt: Prepared, plan: Plan | None, evidence: Sequence[str]) -> float:
    """The fraction of these passages of the prompt that were read in full.

    A passage may occur several times, such as a sentence shared by two documents. It counts if one
    occurrence was read in full.
    """
    if plan is None:
        return 1.0
    text = prompt.text or ""
    _, offsets = encode_with_offsets(llm.tokenizer, text)
    read = set(plan.token_indices())

    def is_read(start: int, end: int) -> bool:
        return all(index in read for index, (a, b) in enumerate(offsets) if a < end and b > start)

    kept = 0
    for passage in evidence:
        places = [found.start() for found in re.finditer(f"(?={re.escape(passage)})", text)]
        if not places:
            raise MeasurementError(f"the evidence {passage!r} is not in the prompt")
        kept += any(is_read(start, start + len(passage)) for start in places)
    return kept / len(evidence)


def _user(parts: Sequence[str]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}


def _generate(llm: LLM, prompt: Prepared, max_tokens: int, mode: Mode, salt: str) -> tuple[str, Finished]:
    from skim.engine.sequence import Finished
    from skim.prefill.request import Request
    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request(prompt.tokens, params, mode.prefill, prompt.anatomy, cache_salt=salt)
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
