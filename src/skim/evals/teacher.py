"""Teacher forcing: the model's distribution at every token of a given text.

Prefill, KV pool and decode run as always; only the engine's sampler is replaced during the request. The
replacement returns the next token of the text and records the model's distribution, which covers the whole
vocabulary and not just the twenty tokens that a client may request.
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
from skim.sampling.batch import SamplerRow, SamplingBatch
from skim.sampling.logprobs import Draw
from skim.sampling.params import SamplingParams
from skim.sampling.sampler import Sampler

if TYPE_CHECKING:
    from skim.llm import LLM


class TeacherForcingSampler(Sampler):
    """Returns the tokens of a text one by one, for a single sequence.

    A token that is drafted is drawn again when it is verified: the last draw counts.
    """

    def __init__(self, text: Sequence[int], vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.logprobs: dict[int, Tensor] = {}  # [vocab] for each token returned
        self._text = text
        self._places: list[int] = []

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draw:
        self._places = [row.step for row in rows]
        return super().draw(logits, rows)

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        packed = super().choose(logits, batch)
        for row, place in enumerate(self._places):
            packed[row, 0] = self._text[place]
            self.logprobs[place] = torch.log_softmax(logits[row].float(), dim=-1)
        return packed


@dataclass(frozen=True)
class TeacherForced:
    """The model's distribution at each token of a text, and the metrics and plan of its prompt."""

    text: Tensor  # [tokens]
    logprobs: Tensor  # [tokens, vocab]
    metrics: RequestMetrics
    plan: Plan | None


def teacher_force(llm: LLM, prompt: Sequence[int], text: Sequence[int], mode: Mode) -> TeacherForced:
    """Read the prompt as the mode says, then force the text. The engine must be otherwise idle."""
    lifecycle = llm.engine.core.lifecycle
    teacher = TeacherForcingSampler(text, lifecycle.sampler.vocab_size, lifecycle.sampler.device)
    params = SamplingParams(temperature=0, max_tokens=len(text), ignore_eos=True)
    sampler, lifecycle.sampler = lifecycle.sampler, teacher
    try:
        handle = llm.engine.submit(Request(tuple(prompt), params, mode.prefill, decode=mode.decode))
        try:
            *_, done = handle
        except BaseException:
            handle.abort()
            raise
    finally:
        lifecycle.sampler = sampler
    assert isinstance(done, Finished)
    if len(teacher.logprobs) != len(text):
        raise MeasurementError(f"the engine ran {len(teacher.logprobs)} of {len(text)} forced tokens")
    logprobs = torch.stack([teacher.logprobs[place] for place in range(len(text))])
    return TeacherForced(torch.tensor(text, device=logprobs.device), logprobs, done.metrics, done.plan)


def compare(reference: TeacherForced, other: TeacherForced) -> dict[str, float]:
    """Compare another run over the same text with the reference, as means over its tokens."""
    p, q = reference.logprobs.double(), other.logprobs.double()  # [tokens, vocab]
    agree = p.argmax(dim=-1) == q.argmax(dim=-1)
    # Tokens of probability 0 in the reference add nothing.
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    nll = -q.gather(1, other.text[:, None])
    return {
        "score": agree.double().mean().item(),
        "kl": terms.sum(dim=-1).mean().item(),
        "nll": nll.mean().item(),
    }
