"""Plans samples without generating replies: the evidence that each mode would read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skim.evals.ask import Places, Read, check_read, evidence_tokens, kept_share, told
from skim.evals.messages import messages_of
from skim.evals.task import Sample
from skim.measure.modes import Mode
from skim.measure.report import MeasurementError, reason_of

if TYPE_CHECKING:
    from skim.llm import LLM, Prepared
    from skim.prefill.reading import Planned

Results = list[dict[str, Any]]


def look(
    llm: LLM, samples: Sequence[Sample], modes: Sequence[Mode], tell: Callable[[int], None]
) -> list[Results | MeasurementError]:
    """The results of the samples in each mode, or the first error in it.

    Each prompt is encoded once for all modes. The last prompt of a conversation is planned with empty
    earlier replies and without a cache.
    """
    found: list[Results | MeasurementError] = [[] for _ in modes]
    for number, sample in enumerate(samples):
        try:
            prompt = encode(llm, sample)
            places = evidence_tokens(llm, prompt, sample.evidence) if sample.evidence else ()
        except Exception as error:
            return [_named(number, error) for _ in modes]
        for index, mode in enumerate(modes):
            results = found[index]
            if isinstance(results, list):
                try:
                    results.append(_planned(llm, sample, mode, prompt, places))
                except Exception as error:
                    found[index] = _named(number, error)
            tell(number * len(modes) + index + 1)
    return found


def encode(llm: LLM, sample: Sample) -> Prepared:
    """The last prompt of the conversation, with empty earlier replies."""
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        messages += [*messages_of(llm, turn), {"role": "assistant", "content": ""}]
    return llm.encode_chat(messages[:-1], skimmed=True)


def _planned(llm: LLM, sample: Sample, mode: Mode, prompt: Prepared, places: Places) -> dict[str, Any]:
    """The result of one sample in one mode, as stored in the report's notes."""
    planned = _plan(llm, prompt, sample.max_tokens, mode)
    count, plan = len(prompt.tokens), planned.plan
    check_read(mode, Read(count, plan, planned.fallback), whole=sample.whole)
    window = llm.engine.core.max_model_len
    if plan is None and count >= window:
        raise MeasurementError(
            f"the prompt has {count} tokens and would be read in full, but the context window has {window}"
        )
    found: dict[str, Any] = {"kept": kept_share(plan, places)} if places else {}
    if sample.whole:
        found["told"] = told(plan)
    return {
        **found,
        "read": 1.0 if plan is None else plan.ratio,
        "scoring": 0.0 if plan is None else plan.timings_ms.get("scoring", 0.0) / 1e3,
        "prompt_tokens": count,
    }


def _plan(llm: LLM, prompt: Prepared, max_tokens: int, mode: Mode) -> Planned:
    from skim.prefill.reading import Planned, Reading
    from skim.prefill.request import Request
    from skim.sampling.params import SamplingParams

    if not mode.prefill.skims(len(prompt.tokens)):
        return Planned(Reading(prompt.tokens))
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.engine.plan(Request(prompt.tokens, params, mode.prefill, prompt.anatomy)).result()


def _named(number: int, error: Exception) -> MeasurementError:
    return MeasurementError(f"sample {number}: {reason_of(error)}")
