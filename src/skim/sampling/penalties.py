"""Token counts per sequence, and the penalties computed from them.

Counts are kept on the logits' device and updated by one scatter per step, so a step costs the same after ten
tokens as after a hundred thousand. Nothing is allocated before the first sequence with penalties.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from skim.device import to_device
from skim.errors import RequestError

_FIRST_CAPACITY = 4


class TokenCounts:
    """An arena of per-sequence token counts. An index belongs to one sequence from `take` to `release`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [capacity, vocab]
        self.prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [capacity, vocab]
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Sequences that fit, taken and free indices together."""
        return self.output.shape[0]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, prompt_token_ids: Iterable[int]) -> int:
        """Take an index for a sequence with this prompt and no output yet."""
        seen = sorted(set(prompt_token_ids))
        if seen and not 0 <= seen[0] <= seen[-1] < self.vocab_size:
            wrong = seen[0] if seen[0] < 0 else seen[-1]
            raise RequestError(
                f"the prompt contains token {wrong}, but the model's token ids are 0 to {self.vocab_size - 1}"
            )
        if not self._free:
            self._grow()
        index = self._free.pop()
        self.output[index].zero_()
        self.prompt[index].zero_()
        if seen:
            ids = to_device(torch.tensor(seen, dtype=torch.int64), self.device)
            self.prompt[index].index_fill_(0, ids, True)
        return index

    def copy(self, index: int) -> int:
        """Take an index with the counts of another."""
        made = self.take(())
        self.output[made] = self.output[index]
        self.prompt[made] = self.prompt[index]
        return made

    def release(self, index: int) -> None:
        self._free.append(index)

    def _grow(self) -> None:
        old, new = self.capacity, max(_FIRST_CAPACITY, self.capacity * 2)
        for name in ("output", "prompt"):
            small: Tensor = getattr(self, name)
            large = small.new_zeros(new, self.vocab_size)
            large[:old] = small
            setattr(self, name, large)
        self._free.extend(range(new - 1, old - 1, -1))

    def add(self, indices: Tensor, tokens: Tensor, times: Tensor) -> None:
        """Add `times[i]` to the count of `tokens[i]` in the sequence at `indices[i]`."""
        self.output.index_put_((indices, tokens), times.to(torch.int32), accumulate=True)

    def penalize(
        self, logits: Tensor, indices: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """Apply all penalties to the float32 `logits` [rows, vocab]; row i has the counts at `indices[i]`."""
        counts = self.output.index_select(0, indices)  # [rows, vocab]
        generated = counts > 0
        seen = generated | self.prompt.index_select(0, indices)
        repeated = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        logits = torch.where(seen, repeated, logits)
        logits -= generated * presence[:, None]
        logits -= counts * frequency[:, None]
        return logits
