"""Log-probabilities of the chosen and the most likely tokens, and the tensors a step sends to the host.

Log-probabilities are the model's own: of the raw logits, in float32, before penalties, bias, temperature or
filters. This is vLLM's default and makes them comparable between requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skim.sampling.batch import SamplerRow
from skim.sampling.filters import rank

_FIXED = 3  # columns of every row: token, finite, margin
_NOTHING_LEFT = (
    "no token is left to sample: the request's allowed_token_ids, bad_words and grammar exclude all"
)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None  # its place among all tokens, from 1; known for prompt tokens


@dataclass(frozen=True)
class Sampled:
    """The result of one row in one step."""

    token_id: int
    """The token; -1 when `finite` is False."""
    logprob: float | None
    """The chosen token's log-probability, if the request wants logprobs."""
    top_logprobs: tuple[tuple[int, float], ...] | None
    """(token, log-probability), most likely first; ties go to the lower id; -inf where the logit is -inf."""
    finite: bool
    """False if no token could be drawn: the logits contain NaN or +inf, or no finite logit is left after
    penalties, bias and masks. No token is counted for such a row."""
    margin: float | None = None
    """How far the likeliest token is ahead of the second, in nats, after penalties, bias and masks. Known if
    the row wants it."""
    error: str | None = None
    """The error of the request, if it is one: its matcher failed, or its masks leave no token."""


@dataclass(frozen=True)
class Draw:
    """The tokens drawn in a step: on the device, and being copied to the host."""

    packed: Tensor  # [rows, 3 + report width] int32, as `pack` makes it
    rows: tuple[SamplerRow, ...]
    most_logprobs: int
    _host: Tensor
    _arrived: torch.cuda.Event | None  # None on the CPU

    @classmethod
    def of(cls, packed: Tensor, rows: tuple[SamplerRow, ...], most_logprobs: int) -> Draw:
        if not packed.is_cuda:
            return cls(packed, rows, most_logprobs, packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(packed, rows, most_logprobs, host, arrived)

    @property
    def tokens(self) -> Tensor:
        """[rows] int32 on the device; undefined for rows whose logits are not finite."""
        return self.packed[:, 0]

    def wait(self) -> Tensor:
        """Wait for the copy; return `packed` on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def report_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """int32 [rows, 1 + 2 * most]: the chosen token's log-probability, the top ids, their log-probabilities.

    Floats are stored as their bits. They are NaN if the logits contain NaN or +inf.
    """
    logits = logits.float()
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)  # [rows, 1]
    norm = torch.where(norm.isfinite(), norm, torch.nan)
    chosen = logits.gather(1, tokens[:, None]) - norm
    if most == 0:
        return chosen.view(torch.int32)
    ids = rank(logits, most)  # [rows, most]
    top = logits.gather(1, ids) - norm
    return torch.cat((chosen.view(torch.int32), ids.int(), top.view(torch.int32)), dim=1)


def report_prompt(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """int32 [rows, 2 + 2 * most]: the rank of each row's token, then its report. Ties rank by token id."""
    chosen = logits.gather(1, tokens[:, None])  # [rows, 1]
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))
    rank = before.sum(dim=1, keepdim=True, dtype=torch.int32) + 1
    return torch.cat((rank, report_logprobs(logits, tokens, most)), dim=1)


class PromptLogprobs:
    """Log-probabilities of all prompt tokens but the first, kept as packed tensors on the host.

    A prompt of 100,000 tokens has millions of numbers. Readers unpack them in parts, where they can wait.
    """

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        self.tokens = tokens
        self.top = top
        """Number of alternatives that were requested."""
        self._parts: list[Tensor] = []  # rows of `report_prompt`, of at least `top` alternatives

    def add(self, part: Tensor) -> bool:
        """Add the next tokens' reports, on the host. False if one is NaN."""
        self._parts.append(part)
        return not bool(part[:, 1].view(torch.float32).isnan().any())

    def __len__(self) -> int:
        """Number of tokens that are known; the first token of the prompt counts."""
        return 1 + sum(part.shape[0] for part in self._parts)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        """One entry per prompt token. The first is None: nothing comes before it."""
        yield None
        after = 1
        for part in self._parts:
            most = part.shape[1] // 2 - 1
            wanted = slice(0, self.top)
            ranks = part[:, 0].tolist()
            values = part[:, 1].view(torch.float32).tolist()
            ids = part[:, 2 : 2 + most][:, wanted].tolist()
            tops = part[:, 2 + most :].view(torch.float32)[:, wanted].tolist()
            tokens = self.tokens[after : after + len(ranks)]
            after += len(ranks)
            for token, place, value, *best in zip(tokens, ranks, values, ids, tops, strict=True):
                yield TokenLogprob(token, value, tuple(zip(*best, strict=True)), place)


def margins_of(logits: Tensor) -> Tensor:
    """The distance between the two highest logits of each row; infinite if the second is -inf. [rows]"""
    if logits.shape[-1] < 2:
        return torch.full(logits.shape[:1], torch.inf, device=logits.device)
    first, second = logits.topk(2, dim=-1).values.float().unbind(dim=-1)
    return first - second


def pack(
    tokens: Tensor,
    finite: Tensor,
    usable: Tensor,
    margins: Tensor | None,
    report: Tensor | None,
    report_rows: Tensor | None,
) -> Tensor:
    """int32 [rows, 3 + report width]: token, finite, margin, the logprobs of the rows that requested them.

    `finite` is 0 for logits that are not finite, and -1 if masks left no token of finite ones.
    """
    width = _FIXED + (report.shape[1] if report is not None else 0)
    packed = torch.zeros(tokens.shape[0], width, dtype=torch.int32, device=tokens.device)
    packed[:, 0] = tokens
    packed[:, 1] = 2 * usable.int() - finite.int()
    if margins is not None:
        packed[:, 2] = margins.view(torch.int32)
    if report is not None and report_rows is not None:
        packed[:, _FIXED:].index_copy_(0, report_rows, report)
    return packed


def unpack(packed: Tensor, rows: Sequence[SamplerRow], most: int) -> list[Sampled]:
    """The results in a packed host tensor."""
    whole = packed[:, : _FIXED + 1 + most].tolist()
    reals = packed[:, 2:].view(torch.float32).tolist()
    results = []
    for ints, floats, row in zip(whole, reals, rows, strict=True):
        token, finite, wanted = ints[0], ints[1], row.params.logprobs
        margin = floats[0] if row.wants_margin else None
        if finite != 1:
            error = _NOTHING_LEFT if finite < 0 else None
            results.append(Sampled(-1, None, None, False, error=error))
        elif wanted is None:
            results.append(Sampled(token, None, None, True, margin))
        else:
            ids, values = ints[_FIXED + 1 :], floats[2 + most :]
            top = tuple(zip(ids, values, strict=True))[:wanted]
            results.append(Sampled(token, floats[1], top, True, margin))
    return results
