"""The results of a step: its tokens, flags and reports, taken over by the requests that are still open."""

from __future__ import annotations

import math
from dataclasses import replace

from skim.engine.drafting import Drafting
from skim.engine.in_flight import InFlightStep
from skim.engine.lifecycle import Lifecycle
from skim.engine.pace import Pace
from skim.engine.slow_fast import SlowFast


class Results:
    """Reads steps that were launched."""

    def __init__(self, lifecycle: Lifecycle, drafting: Drafting, slow_fast: SlowFast, pace: Pace) -> None:
        self._lifecycle = lifecycle
        self._drafting = drafting
        self._slow_fast = slow_fast
        self._pace = pace

    def read(self, step: InFlightStep) -> None:
        """Wait for a step, note the chunks that are finite, read its tokens and emit events."""
        if step.done is not None:
            step.done.synchronize()
        for sequence, part in step.prompts.read():
            self._lifecycle.report(sequence, part)
        for sequence, length, finite in step.chunks.read():
            if sequence.table is not None:  # it has not ended meanwhile
                sequence.verify(length, finite)
                if length == len(sequence.tokens):
                    self._lifecycle.end_of_prompt(sequence)
                else:
                    self._lifecycle.slide(sequence, length)
        sampled = self._lifecycle.sampler.read(step.draw) if step.draw is not None else []
        if step.timer is not None:
            self._pace.observe(step.timer.work, step.timer.seconds())
        masses = step.masses.read()
        for (sequence, length, drawn, draft), results in step.results(sampled):
            if not self._lifecycle.is_open(sequence):
                continue  # it ended a step ago, was aborted, or another sequence of its request just failed
            mass = masses.get(sequence.order)
            if mass is not None and not math.isfinite(mass):
                results = [replace(results[0], finite=False)]
            if draft:
                self._drafting.read(sequence, length, results[0], mass)
            elif drawn > 1:
                self._drafting.verify(sequence, results)
            else:
                if results[0].finite:
                    self._slow_fast.read(sequence, length, results[0].token_id, mass)
                self._lifecycle.take(sequence, length, results[0])
