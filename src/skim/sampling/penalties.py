"""Token counts of the sequences that are penalised for repeating, and the penalties.

Counts live on the logits' device, one slot a sequence, and grow by one entry a token: a step costs the same
after ten tokens as after a hundred thousand. Nothing is allocated until a sequence with penalties comes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from skim.device import to_device
from skim.errors import RequestError

_FIRST_SLOTS = 4


class TokenCounts:
    """An arena of per-sequence token counts. A slot belongs to one sequence from `take` to `give_back`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [slots, vocab]
        self.prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [slots, vocab]
        self._free: list[int] = []

    @property
    def slots(self) -> int:
        """Slots there are, taken or free."""
        return self.output.shape[0]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, prompt_token_ids: Iterable[int]) -> int:
        """A slot with no output counted yet, whose prompt is made of these tokens."""
        seen = sorted(set(prompt_token_ids))
        if seen and not 0 <= seen[0] <= seen[-1] < self.vocab_size:
            wrong = seen[0] if seen[0] < 0 else seen[-1]
            raise RequestError(
                f"the prompt holds token {wrong}, but the model's token ids are 0 to {self.vocab_size - 1}"
            )
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.output[slot].zero_()
        self.prompt[slot].zero_()
        if seen:
            ids = to_device(torch.tensor(seen, dtype=torch.int64), self.device)
            self.prompt[slot].index_fill_(0, ids, True)
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def _grow(self) -> None:
        old, new = self.slots, max(_FIRST_SLOTS, self.slots * 2)
        for name in ("output", "prompt"):
            small: Tensor = getattr(self, name)
            large = small.new_zeros(new, self.vocab_size)
            large[:old] = small
            setattr(self, name, large)
        self._free.extend(range(new - 1, old - 1, -1))

    def add(self, slots: Tensor, tokens: Tensor, times: Tensor) -> None:
        """Count `tokens[i]` as generated `times[i]` times by the sequence of `slots[i]`."""
        self.output.index_put_((slots, tokens), times.to(torch.int32), accumulate=True)

    def penalize(
        self, logits: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """The float32 `logits` [rows, vocab] after all three penalties; row i belongs to `slots[i]`."""
        counts = self.output.index_select(0, slots)  # [rows, vocab]
        generated = counts > 0
        seen = generated | self.prompt.index_select(0, slots)
        repeated = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        logits = torch.where(seen, repeated, logits)
        logits -= generated * presence[:, None]
        logits -= counts * frequency[:, None]
        return logits
