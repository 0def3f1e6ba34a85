"""Teacher forcing: the model's distribution at every token of a given text.

The engine runs as usual: prefill, pool and decode. Only its sampler is replaced while a request runs, by one
that returns the text's next token and records the model's distribution. So distributions are complete, not
the twenty most likely tokens that a client may ask for.
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
from skim.prefill.request import Request
from skim.sampling.batch import StepPlan
from skim.sampling.params import SamplingParams
from skim.sampling.sampler import Sampler

if TYPE_CHECKING:
    from skim.llm import LLM


class Teacher(Sampler):
    """A sampler that returns the tokens of a text in order, for a single sequence."""

    def __init__(self, text: Sequence[int], vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.noted: list[Tensor] = []  # log-probabilities, [vocab] for each token
        self._text = text

    def choose(self, logits: Tensor, plan: StepPlan) -> Tensor:
        packed = super().choose(logits, plan)
        packed[0, 0] = self._text[len(self.noted)]
        self.noted.append(torch.log_softmax(logits[0].float(), dim=-1))
        return packed


@dataclass(frozen=True)
class Led:
    """The model's distribution at each token of the text, and how the prompt was read."""

    text: Tensor  # [tokens]
    logprobs: Tensor  # [tokens, vocab]
    metrics: RequestMetrics
    plan: Plan | None


def lead(llm: LLM, prompt: Sequence[int], text: Sequence[int], mode: Mode) -> Led:
    """Read the prompt as the mode says and continue with the text. No other request may run meanwhile."""
    lifecycle = llm.engine.core.lifecycle
    teacher = Teacher(text, lifecycle.sampler.vocab_size, lifecycle.sampler.device)
    params = SamplingParams(temperature=0, max_tokens=len(text), ignore_eos=True)
    sampler, lifecycle.sampler = lifecycle.sampler, teacher
    try:
        handle = llm.engine.submit(Request(tuple(prompt), params, mode.prefill))
        try:
            *_, done = handle
        except BaseException:
            handle.abort()
            raise
    finally:
        lifecycle.sampler = sampler
    assert isinstance(done, Finished)
    if len(teacher.noted) != len(text):
        raise MeasurementError(f"the engine went along {len(teacher.noted)} tokens of {len(text)}")
    logprobs = torch.stack(teacher.noted)
    return Led(torch.tensor(text, device=logprobs.device), logprobs, done.metrics, done.plan)


def compare(reference: Led, other: Led) -> dict[str, float]:
    """Distance of another reading of the same prompt from the reference, as means over the text."""
    p, q = reference.logprobs.double(), other.logprobs.double()  # [tokens, vocab]
    agree = p.argmax(dim=-1) == q.argmax(dim=-1)
    # Tokens with probability 0 in the reference add nothing.
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    nll = -q.gather(1, other.text[:, None])
    return {
        "score": agree.double().mean().item(),
        "kl": terms.sum(dim=-1).mean().item(),
        "nll": nll.mean().item(),
    }
