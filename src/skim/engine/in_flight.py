"""The in-flight step: launched on the device, its results not yet read by the host.

While the device computes one step, the host launches the next. Sampled tokens go from step to step on the
device; the host reads them, detokenizes and emits events one step behind. A sequence that turns out to have
ended has been computed for one token too many, which is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch

from skim.engine.sequence import Sequence
from skim.sampling.logprobs import Draw


@dataclass(frozen=True)
class InFlightStep:
    """The sequences that a step samples a token for, in the order of the draw."""

    sequences: Rows[Sequence] = ()
    lengths: Rows[int] = ()  # computed tokens of each, after this step
    draw: Draw | None = None  # None if no row reached the end of its tokens
    done: torch.cuda.Event | None = None  # set on a GPU for a step without a draw
    places: dict[int, int] = field(default_factory=dict)  # index in the draw, by `Sequence.order`

    @classmethod
    def of(cls, sequences: Rows[Sequence], draw: Draw) -> InFlightStep:
        lengths = [sequence.computed for sequence in sequences]
        return cls(sequences, lengths, draw, None, {s.order: i for i, s in enumerate(sequences)})

    @classmethod
    def without_draw(cls, device: torch.device) -> InFlightStep:
        """A step of prefill chunks only. The host waits for it too: it is never more than one step ahead."""
        if device.type != "cuda":
            return cls()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(done=done)

    @property
    def must_finish(self) -> bool:
        """True if the host must read the tokens before it launches the next step.

        That is so if a grammar depends on them, or if one is the first token of a reply.
        """
        rows = self.draw.rows if self.draw is not None else ()
        first = any(sequence.generated == 0 for sequence in self.sequences)
        return first or any(row.matcher is not None for row in rows)
