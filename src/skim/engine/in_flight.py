"""The in-flight step: launched on the device, its results not yet read by the host.

While the device computes one step, the host launches the next. Sampled tokens go from step to step on the
device; the host reads them, detokenizes and emits events one step behind. A sequence that turns out to have
ended has been computed for one token too many, which is dropped.

A step also checks the chunks that no token is sampled after. Their flags are read together with the tokens,
and so are the log-probabilities of prompt tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from skim.device import to_host
from skim.engine.pace import Work
from skim.engine.runner import Targets
from skim.engine.sequence import Sequence
from skim.sampling.logprobs import Draw, Sampled


@dataclass(frozen=True)
class Chunks:
    """A step's chunks that no token is sampled after: most do not end their prompt."""

    sequences: Rows[Sequence] = ()
    lengths: Rows[int] = ()  # computed tokens of each, after this step
    finite: torch.Tensor | None = None  # flags on the host, valid once the step is done

    @classmethod
    def of(cls, sequences: Rows[Sequence], finite: torch.Tensor | None) -> Chunks:
        """Called after the block tables have advanced. `finite` is the forward's, on the device."""
        lengths = [sequence.computed for sequence in sequences]
        return cls(sequences, lengths, to_host([finite])[0] if finite is not None else None)

    def read(self) -> Iterator[tuple[Sequence, int, bool]]:
        """Each chunk's sequence, its computed tokens, and True if the chunk's keys and values are finite."""
        flags = self.finite.tolist() if self.finite is not None else [False] * len(self.sequences)
        return zip(self.sequences, self.lengths, flags, strict=True)


@dataclass(frozen=True)
class PromptReports:
    """Log-probabilities of prompt tokens, computed in a step."""

    sequences: Rows[Sequence] = ()
    counts: Rows[int] = ()  # tokens of each
    packed: torch.Tensor | None = None  # on the host, valid once the step is done

    @classmethod
    def of(cls, targets: Iterable[tuple[Sequence, Targets]], packed: torch.Tensor | None) -> PromptReports:
        """`packed` is the forward's, on the device."""
        if packed is None:
            return cls()
        sequences, wanted = zip(*targets, strict=True)
        return cls(sequences, [len(one.tokens) for one in wanted], to_host([packed])[0])

    def read(self) -> Iterator[tuple[Sequence, torch.Tensor]]:
        """Each sequence with its part."""
        parts = self.packed.split_with_sizes(list(self.counts)) if self.packed is not None else ()
        return zip(self.sequences, parts, strict=True)


@dataclass(frozen=True)
class Masses:
    """The estimated attention mass in the blocks that a step's fast rows read."""

    places: dict[int, int]  # index of the row in the step, by `Sequence.order`
    held: torch.Tensor | None = None  # on the host, valid once the step is done

    @classmethod
    def of(cls, places: dict[int, int], mass: torch.Tensor | None) -> Masses:
        """`mass` is the forward's, on the device."""
        return cls(places if mass is not None else {}, to_host([mass])[0] if mass is not None else None)

    def read(self) -> dict[int, float]:
        """By `Sequence.order`."""
        if self.held is None:
            return {}
        values = self.held.tolist()
        return {order: values[place] for order, place in self.places.items()}


class Timer:
    """The time that the device takes for a step, without work that was launched before it."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work = work
        self._device = device
        self._begin = self._end = self._now()

    def stop(self) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """Call it when the step has been read."""
        if self._device.type == "cuda":
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1e3
        return float(self._end - self._begin)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Sampling(NamedTuple):
    """A sequence that a step samples tokens for."""

    sequence: Sequence
    length: int  # its computed tokens after this step
    drawn: int = 1  # tokens that are drawn: several if they verify drafts
    draft: bool = False  # True if the token is a draft


@dataclass(frozen=True)
class InFlightStep:
    """The sequences that a step samples for, in the order of the draw, and its other chunks."""

    sampling: Rows[Sampling] = ()
    draw: Draw | None = None  # None if no row reached the end of its tokens
    chunks: Chunks = field(default_factory=Chunks)
    prompts: PromptReports = field(default_factory=PromptReports)
    done: torch.cuda.Event | None = None  # set on a GPU if there is more to read than tokens
    places: dict[int, int] = field(default_factory=dict)  # last index in the draw, by `Sequence.order`
    timer: Timer | None = None
    masses: Masses = field(default_factory=lambda: Masses({}))

    @classmethod
    def of(
        cls,
        sampling: Rows[Sampling],
        draw: Draw | None,
        chunks: Chunks,
        prompts: PromptReports,
        device: torch.device,
        timer: Timer | None = None,
        masses: Masses | None = None,
    ) -> InFlightStep:
        """A step that has been launched. The host waits for a step without a draw too: it is never more than
        one step ahead."""
        done = None
        masses = masses or Masses({})
        if device.type == "cuda" and (chunks.sequences or prompts.sequences or masses.places):
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        ends = itertools.accumulate(one.drawn for one in sampling)
        places = {one.sequence.order: end - 1 for one, end in zip(sampling, ends, strict=True)}
        return cls(sampling, draw, chunks, prompts, done, places, timer, masses)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that the step has a row of."""
        sampling = (one.sequence for one in self.sampling)
        return [*sampling, *self.chunks.sequences, *self.prompts.sequences]

    def results(self, sampled: Rows[Sampled]) -> Iterator[tuple[Sampling, Rows[Sampled]]]:
        """What was drawn for each sequence."""
        start = 0
        for one in self.sampling:
            yield one, sampled[start : start + one.drawn]
            start += one.drawn

    @property
    def must_finish(self) -> bool:
        """True if the host must read the tokens before it launches the next step.

        That is so if a grammar or a bad word depends on them, if one is the first token of a reply, or if
        they verify drafts.
        """
        rows = self.draw.rows if self.draw is not None else ()
        waits = any(one.sequence.generated == 0 or one.drawn > 1 for one in self.sampling)
        return waits or any(row.needs_tokens for row in rows)
