"""Log-probabilities of the chosen and the most likely tokens, and the one tensor a step sends to the host.

Log-probabilities are the model's own: of the raw logits, in float32, before penalties, bias, temperature or
filters. This is vLLM's default and makes them comparable between requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skim.sampling.batch import SamplerRow
from skim.sampling.filters import rank

_CHOSEN = 2


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
    error: str | None = None
    """The error of the row's grammar matcher, if it failed."""


@dataclass(frozen=True)
class Draw:
    """The tokens drawn in a step: on the device, and being copied to the host."""

    packed: Tensor  # [rows, 2 + report width] int32, as `pack` makes it
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

    Floats are stored as their bits.
    """
    logits = logits.float()
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)  # [rows, 1]
    chosen = logits.gather(1, tokens[:, None]) - norm
    if most == 0:
        return chosen.view(torch.int32)
    ids = rank(logits, most)  # [rows, most]
    top = logits.gather(1, ids) - norm
    return torch.cat((chosen.view(torch.int32), ids.int(), top.view(torch.int32)), dim=1)


def pack(tokens: Tensor, finite: Tensor, report: Tensor | None, report_rows: Tensor | None) -> Tensor:
    """int32 [rows, 2 + report width]: token, finite, and the logprobs of the rows that requested them."""
    width = _CHOSEN + (report.shape[1] if report is not None else 0)
    packed = torch.zeros(tokens.shape[0], width, dtype=torch.int32, device=tokens.device)
    packed[:, 0] = tokens
    packed[:, 1] = finite
    if report is not None and report_rows is not None:
        packed[:, _CHOSEN:].index_copy_(0, report_rows, report)
    return packed


def unpack(packed: Tensor, asked: list[int | None], most: int) -> list[Sampled]:
    """The results in a packed host tensor; `asked[i]` is row i's `logprobs` setting."""
    whole = packed[:, : _CHOSEN + 1 + most].tolist()
    reals = packed[:, _CHOSEN:].view(torch.float32).tolist()
    results = []
    for ints, floats, wanted in zip(whole, reals, asked, strict=True):
        token, finite = ints[0], bool(ints[1])
        if not finite:
            results.append(Sampled(-1, None, None, False))
        elif wanted is None:
            results.append(Sampled(token, None, None, True))
        else:
            ids, values = ints[_CHOSEN + 1 :], floats[1 + most :]
            results.append(Sampled(token, floats[0], tuple(zip(ids, values, strict=True))[:wanted], True))
    return results
