"""The engine led along a given text: the model's distribution at every token of it.

The engine runs as it always does, prefill, pool and decode; only its sampler is exchanged while a request
runs, by one that says the text's next token whatever the model would have said, and notes what that was. So
distributions are whole, not the twenty likeliest tokens that a client may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skim.engine.sequence import Finished, RequestMetrics
from skim.measure.modes import Mode
from skim.measure.report import MeasurementError
from skim.prefill.plan import Plan
from skim.sampling.batch import SamplingBatch
from skim.sampling.params import SamplingParams
from skim.sampling.sampler import Sampler

if TYPE_CHECKING:
    from skim.llm import LLM


class Teacher(Sampler):
    """Says the tokens of a text one after the other, for a single sequence."""

    def __init__(self, text: Sequence[int], vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.noted: list[Tensor] = []  # log-probabilities, [vocab] for each token said
        self._text = text

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        packed = super().choose(logits, batch)
        packed[0, 0] = self._text[len(self.noted)]
        self.noted.append(torch.log_softmax(logits[0].float(), dim=-1))
        return packed


@dataclass(frozen=True)
class Led:
    """What the model would have said at each token of the text, and how it had read what came before."""

    text: Tensor  # [tokens]
    logprobs: Tensor  # [tokens, vocab]
    metrics: RequestMetrics
    plan: Plan | None


def lead(llm: LLM, prompt: Sequence[int], text: Sequence[int], mode: Mode) -> Led:
    """Read the prompt as the mode says, and go on with the text. Nothing else may run in the engine."""
    core = llm.engine.core
    teacher = Teacher(text, core.sampler.vocab_size, core.sampler.device)
    params = SamplingParams(temperature=0, max_tokens=len(text), ignore_eos=True)
    sampler, core.sampler = core.sampler, teacher
    try:
        handle = llm.engine.submit(tuple(prompt), params, prefill=mode.prefill)
        try:
            *_, done = handle
        except BaseException:
            handle.abort()
            raise
    finally:
        core.sampler = sampler
    assert isinstance(done, Finished)
    if len(teacher.noted) != len(text):
        raise MeasurementError(f"the engine went along {len(teacher.noted)} tokens of {len(text)}")
    logprobs = torch.stack(teacher.noted)
    return Led(torch.tensor(text, device=logprobs.device), logprobs, done.metrics, done.plan)


def compare(reference: Led, other: Led) -> dict[str, float]:
    """How far another reading of the same prompt is from the reference, as means over the text."""
    p, q = reference.logprobs.double(), other.logprobs.double()  # [tokens, vocab]
    agree = p.argmax(dim=-1) == q.argmax(dim=-1)
    # What has no probability in the reference adds nothing, whatever the other makes of it.
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    nll = -q.gather(1, other.text[:, None])
    return {
        "score": agree.double().mean().item(),
        "kl": terms.sum(dim=-1).mean().item(),
        "nll": nll.mean().item(),
    }
