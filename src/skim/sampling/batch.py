"""The sampling inputs of one step, built on the host and sent to the device in one copy."""

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

_MAX_TEMPERATURE = 1e30
"""Higher temperatures are clamped to this: above it, float32 division turns -inf logits into NaN."""


@dataclass(eq=False)
class SamplerRow:
    """The sampler's state for one sequence. It holds no KV, so it survives preemption."""

    params: SamplingParams
    seed: int
    step: int = 0
    """Tokens generated so far."""
    counts_index: int | None = None
    """Index of its counts in `TokenCounts`; None without penalties."""
    suppressed: tuple[int, ...] = ()
    """Tokens that cannot be chosen until `min_tokens` have been generated."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are not generated: the last token is suppressed after the others."""
    recent: list[int] = field(default_factory=list)
    """The last generated tokens that the host has read, as many as `bad_words` need."""
    matcher: Matcher | None = None
    """Its position in its grammar; None without a grammar."""
    wants_margin: bool = False
    """True if its results have a margin."""
    closed: bool = False

    @property
    def edited(self) -> bool:
        """True if its next token may differ from the argmax of the raw logits."""
        return (
            not self.params.greedy
            or self.counts_index is not None
            or bool(self.params.logit_bias)
            or self.below_min_tokens
            or self.params.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.matcher is not None
        )

    @property
    def needs_tokens(self) -> bool:
        """True if the host must have read its earlier tokens before the next one is sampled."""
        return self.matcher is not None or any(len(word) > 1 for word in self.bad_words)

    def note(self, token: int) -> None:
        """Remember a generated token, if a bad word may begin with it."""
        longest = max(map(len, self.bad_words), default=1) - 1
        if longest:
            self.recent = [*self.recent, token][-longest:]

    def ruled_out(self) -> list[int]:
        """The tokens that cannot be chosen in the next step."""
        found = list(self.suppressed) if self.below_min_tokens else []
        for *before, last in self.bad_words:
            if not before or self.recent[-len(before) :] == before:
                found.append(last)
        return found

    @property
    def below_min_tokens(self) -> bool:
        """True if its end tokens are suppressed in the next step."""
        return bool(self.suppressed) and self.step < self.params.min_tokens


@dataclass
class SamplingBatch:
    """The rows of one step, grouped into sub-batches by the work they need.

    A sub-batch is a list of indices into its parent. The parent of `edited` and `reported` is the step; of
    `penalized`, `random`, `bias_rows`, `suppress_rows`, `allowed` and `grammar_rows` it is `edited`; of
    `top_k_rows` and `top_p_rows` it is `random`. Indices increase, so a sub-batch that is as long as its
    parent equals its parent.
    """

    edited: list[int] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    penalized: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)  # indices of the penalized rows in the step
    counts_indices: list[int] = field(default_factory=list)
    bias_rows: list[int] = field(default_factory=list)
    bias_ids: list[int] = field(default_factory=list)
    suppress_rows: list[int] = field(default_factory=list)
    suppress_ids: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    allowed_rows: list[int] = field(default_factory=list)  # indices into `allowed`, one for each allowed id
    allowed_ids: list[int] = field(default_factory=list)
    grammar_rows: list[int] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)  # one per grammar row; stays on the host
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
    margins: bool = False  # True if a row wants its margin

    @property
    def any_min_p(self) -> bool:
        return any(value > -math.inf for value in self.log_min_p)


# Annotations are strings in this file, so they can be compared as text.
_REAL = [spec.name for spec in fields(SamplingBatch) if spec.type == "list[float]"]
_WHOLE = [spec.name for spec in fields(SamplingBatch) if spec.type == "list[int]"]


def build_batch(rows: Sequence[SamplerRow], vocab_size: int) -> SamplingBatch:
    """Group the rows of one step into sub-batches by the work they need."""
    batch = SamplingBatch()
    for position, row in enumerate(rows):
        params = row.params
        if params.logprobs is not None:
            batch.reported.append(position)
            batch.most_logprobs = max(batch.most_logprobs, min(params.logprobs, vocab_size))
        batch.margins |= row.wants_margin
        if not row.edited:
            continue
        within = len(batch.edited)
        batch.edited.append(position)
        if row.counts_index is not None:
            batch.penalized.append(within)
            batch.counted.append(position)
            batch.counts_indices.append(row.counts_index)
            batch.repetition.append(params.repetition_penalty)
            batch.presence.append(params.presence_penalty)
            batch.frequency.append(params.frequency_penalty)
        if params.logit_bias:
            batch.bias_rows.extend([within] * len(params.logit_bias))
            batch.bias_ids.extend(params.logit_bias)
            batch.bias.extend(params.logit_bias.values())
        if ruled_out := row.ruled_out():
            batch.suppress_rows.extend([within] * len(ruled_out))
            batch.suppress_ids.extend(ruled_out)
        if params.allowed_token_ids is not None:
            batch.allowed_rows.extend([len(batch.allowed)] * len(params.allowed_token_ids))
            batch.allowed_ids.extend(params.allowed_token_ids)
            batch.allowed.append(within)
        if row.matcher is not None:
            batch.grammar_rows.append(within)
            batch.matchers.append(row.matcher)
        if not params.greedy:
            _add_draw(batch, within, row, vocab_size)
    return batch


def _add_draw(batch: SamplingBatch, within: int, row: SamplerRow, vocab_size: int) -> None:
    params = row.params
    drawn = len(batch.random)
    batch.random.append(within)
    batch.uniform.append(uniform(row.seed, row.step))
    batch.temperature.append(min(params.temperature, _MAX_TEMPERATURE))
    batch.log_min_p.append(math.log(params.min_p) if params.min_p > 0 else -math.inf)
    mass = params.top_p if params.top_p < 1 else math.inf
    if 0 < params.top_k < vocab_size:
        batch.top_k_rows.append(drawn)
        batch.top_k.append(params.top_k)
        batch.top_k_mass.append(mass)
    elif mass < 1:
        batch.top_p_rows.append(drawn)
        batch.top_p_mass.append(mass)


def upload(batch: SamplingBatch, device: torch.device) -> dict[str, Tensor]:
    """Copy the batch's lists to the device: tensors by name, int64 for integers and float64 for floats.

    All lists share one host-to-device copy; floats travel as their bits. An empty batch copies nothing.
    """
    whole = [getattr(batch, name) for name in _WHOLE]
    real = [getattr(batch, name) for name in _REAL]
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
