"""A forward that is under way: what was launched for whom, until the host has seen what came of it.

While the device computes one step the host launches the next: tokens that were drawn go from step to step on
the device, and the host reads them, turns them into text and tells the callers one step behind. A sequence
that turns out to have ended has then been computed for one token too many, which nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch

from skim.engine.sequence import Sequence
from skim.sampling.logprobs import Draw


@dataclass(frozen=True)
class Flight:
    """The sequences a step has drawn a token for, in the order of the draw."""

    sequences: Rows[Sequence] = ()
    lengths: Rows[int] = ()  # of their tables, by then
    draw: Draw | None = None  # None where no row was at its end
    done: torch.cuda.Event | None = None  # for a step without a draw, on a device that runs behind
    places: dict[int, int] = field(default_factory=dict)  # of sequences in the draw, by order

    @classmethod
    def of(cls, sequences: Rows[Sequence], draw: Draw) -> Flight:
        lengths = [sequence.computed for sequence in sequences]
        return cls(sequences, lengths, draw, None, {s.order: i for i, s in enumerate(sequences)})

    @classmethod
    def without_draw(cls, device: torch.device) -> Flight:
        """Chunks of prompts alone. The host waits for them too: it is never more than one step ahead."""
        if device.type != "cuda":
            return cls()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(done=done)

    @property
    def must_land(self) -> bool:
        """Whether the tokens are to be seen before the next step: a grammar goes by them, or it is the first
        one, for which somebody waits."""
        rows = self.draw.rows if self.draw is not None else ()
        first = any(sequence.generated == 0 for sequence in self.sequences)
        return first or any(row.matcher is not None for row in rows)
