"""One sample asked in one mode, through the engine as a client has it. What does not count is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skim.evals.room import Turns
from skim.evals.task import Sample
from skim.measure.modes import Mode, may_go_on_densely
from skim.measure.report import MeasurementError
from skim.tokenization import encode_with_offsets

if TYPE_CHECKING:
    from skim.engine.sequence import Finished, RequestMetrics
    from skim.llm import LLM, Prepared
    from skim.prefill.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """The last reply of a conversation, and what reading its last prompt took."""

    reply: str
    metrics: RequestMetrics
    kept: float | None  # the share of the evidence that was read whole; None where there is none


def ask(llm: LLM, sample: Sample, mode: Mode, salt: str) -> Outcome:
    """Have the conversation. `salt` keeps it apart from all others: nothing is shared but within it.

    An empty reply, and a prompt that was not read as the mode says, are a MeasurementError.
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
    """Refuse what another mode than the one measured has read."""
    if metrics.fallback is not None:
        raise MeasurementError(f"the prompt was read in full, because planning failed: {metrics.fallback}")
    skims = mode.prefill.skims(metrics.prompt_tokens)  # `auto` is dense below its threshold
    if skims and may_go_on_densely(mode.prefill, metrics.prompt_tokens, metrics.cached_tokens):
        return
    if skims == (plan is None):
        raise MeasurementError(f"the prompt was {'read in full' if plan is None else 'skimmed'}")
    asked = mode.prefill.keep_ratio == 1 or mode.prefill.keep_mass is not None
    if plan is not None and plan.kept_tokens == plan.prompt_tokens and not asked:
        raise MeasurementError(  # any scorer would seem as good as dense
            f"all {plan.prompt_tokens} tokens were kept, so nothing was skimmed; use longer contexts, keep "
            f"less, or lower min_scored_tokens, which is {mode.prefill.min_scored_tokens}"
        )


def count_prompt(llm: LLM, turns: Turns) -> int:
    """Tokens of the last prompt of a conversation, its replies counted as empty."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [_user(turn), {"role": "assistant", "content": ""}]
    return len(llm.encode_chat(messages[:-1], skimmed=False).tokens)


def kept_share(llm: LLM, prompt: Prepared, plan: Plan | None, evidence: Sequence[str]) -> float:
    """The share of these passages of the prompt of which every token was read.

    A passage may stand in a prompt several times, as a sentence that two documents share does: it counts if
    it was read whole at one of its places.
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
    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    handle = llm.engine.submit(prompt.tokens, params, salt=salt, prefill=mode.prefill, anatomy=prompt.anatomy)
    text = ""
    try:
        for event in handle:
            if isinstance(event, Finished):
                return text, event
            text += event.text
    except BaseException:
        handle.abort()
        raise
    raise AssertionError("a handle ended without saying so")
