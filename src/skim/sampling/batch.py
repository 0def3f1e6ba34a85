"""What one step needs of each of its rows, worked out on the host and sent to the device in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from skim.device import to_device
from skim.sampling.grammar import Matcher
from skim.sampling.params import SamplingParams
from skim.sampling.rng import uniform

_HOTTEST = 1e30
"""Temperatures are cut here: beyond it float32 division would turn -inf logits into NaN."""


@dataclass(eq=False)
class SamplerRow:
    """One sequence as the sampler knows it. It outlives preemption: nothing in it is KV."""

    params: SamplingParams
    seed: int
    step: int = 0
    """Tokens generated so far."""
    slot: int | None = None
    """Its slot among the token counts; None if it has no penalties."""
    suppressed: tuple[int, ...] = ()
    """Tokens that cannot be chosen before `min_tokens` were generated."""
    matcher: Matcher | None = None
    """Where it stands in its grammar; None if it has none."""
    closed: bool = False

    @property
    def edited(self) -> bool:
        """Whether its next token may differ from the argmax of the raw logits."""
        return (
            not self.params.greedy
            or self.slot is not None
            or bool(self.params.logit_bias)
            or self.held_open
            or self.matcher is not None
        )

    @property
    def held_open(self) -> bool:
        """Whether its end tokens are suppressed in the next step."""
        return bool(self.suppressed) and self.step < self.params.min_tokens


@dataclass
class StepPlan:
    """Which rows of a step need what. Work is done on sub-batches, each a list of positions.

    A sub-batch's positions count within the one it was chosen from: `edited` within the step, `penalized`,
    `random`, `bias_rows`, `suppress_rows` and `grammar_rows` within `edited`, `top_k_rows` and `top_p_rows`
    within `random`.
    They ascend, so a sub-batch as long as its parent is its parent.
    """

    edited: list[int] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    penalized: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)  # the penalized rows' positions within the step
    slots: list[int] = field(default_factory=list)
    bias_rows: list[int] = field(default_factory=list)
    bias_ids: list[int] = field(default_factory=list)
    suppress_rows: list[int] = field(default_factory=list)
    suppress_ids: list[int] = field(default_factory=list)
    grammar_rows: list[int] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)  # of the grammar rows; stays on the host
    random: list[int] = field(default_factory=list)
    top_k_rows: list[int] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    top_p_rows: list[int] = field(default_factory=list)

    repetition: list[float] = field(default_factory=list)
    presence: list[float] = field(default_factory=list)
    frequency: list[float] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)
    uniform: list[float] = field(default_factory=list)
    temperature: list[float] = field(default_factory=list)
    log_min_p: list[float] = field(default_factory=list)
    top_k_mass: list[float] = field(default_factory=list)
    top_p_mass: list[float] = field(default_factory=list)

    most_logprobs: int = 0

    @property
    def any_min_p(self) -> bool:
        return any(value > -math.inf for value in self.log_min_p)


# Annotations are strings in this file, so a field's kind can be read off its type.
_REAL = [spec.name for spec in fields(StepPlan) if spec.type == "list[float]"]
_WHOLE = [spec.name for spec in fields(StepPlan) if spec.type == "list[int]"]


def plan_step(rows: Sequence[SamplerRow], vocab_size: int) -> StepPlan:
    """Sort the rows of one step into sub-batches by what each of them needs."""
    plan = StepPlan()
    for position, row in enumerate(rows):
        params = row.params
        if params.logprobs is not None:
            plan.reported.append(position)
            plan.most_logprobs = max(plan.most_logprobs, min(params.logprobs, vocab_size))
        if not row.edited:
            continue
        within = len(plan.edited)
        plan.edited.append(position)
        if row.slot is not None:
            plan.penalized.append(within)
            plan.counted.append(position)
            plan.slots.append(row.slot)
            plan.repetition.append(params.repetition_penalty)
            plan.presence.append(params.presence_penalty)
            plan.frequency.append(params.frequency_penalty)
        if params.logit_bias:
            plan.bias_rows.extend([within] * len(params.logit_bias))
            plan.bias_ids.extend(params.logit_bias)
            plan.bias.extend(params.logit_bias.values())
        if row.held_open:
            plan.suppress_rows.extend([within] * len(row.suppressed))
            plan.suppress_ids.extend(row.suppressed)
        if row.matcher is not None:
            plan.grammar_rows.append(within)
            plan.matchers.append(row.matcher)
        if not params.greedy:
            _plan_draw(plan, within, row, vocab_size)
    return plan


def _plan_draw(plan: StepPlan, within: int, row: SamplerRow, vocab_size: int) -> None:
    params = row.params
    drawn = len(plan.random)
    plan.random.append(within)
    plan.uniform.append(uniform(row.seed, row.step))
    plan.temperature.append(min(params.temperature, _HOTTEST))
    plan.log_min_p.append(math.log(params.min_p) if params.min_p > 0 else -math.inf)
    mass = params.top_p if params.top_p < 1 else math.inf
    if 0 < params.top_k < vocab_size:
        plan.top_k_rows.append(drawn)
        plan.top_k.append(params.top_k)
        plan.top_k_mass.append(mass)
    elif mass < 1:
        plan.top_p_rows.append(drawn)
        plan.top_p_mass.append(mass)


def upload(plan: StepPlan, device: torch.device) -> dict[str, Tensor]:
    """The plan's lists as device tensors by name: int64 for the whole numbers, float64 for the others.

    One host-to-device copy carries them all: reals travel as their bits. An empty plan copies nothing.
    """
    whole = [getattr(plan, name) for name in _WHOLE]
    real = [getattr(plan, name) for name in _REAL]
    sizes = [len(values) for values in whole + real]
    count = sum(sizes[: len(whole)])
    if sum(sizes) == 0:
        return {}
    host = torch.empty(sum(sizes), dtype=torch.int64)
    host[:count] = torch.tensor([value for values in whole for value in values], dtype=torch.int64)
    host[count:].view(torch.float64)[:] = torch.tensor(
        [v for values in real for v in values], dtype=torch.float64
    )
    parts = to_device(host, device).split_with_sizes(sizes)
    tensors = dict(zip(_WHOLE + _REAL, parts, strict=True))
    return {name: part.view(torch.float64) if name in _REAL else part for name, part in tensors.items()}
