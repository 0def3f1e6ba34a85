"""Progress of requests: written by the engine's thread, read by any other without a lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["queued", "scoring", "reading", "generating"]
PHASES: tuple[Phase, ...] = ("queued", "scoring", "reading", "generating")
"""The phases of a request, in order. A preempted request goes back to the first."""


@dataclass(frozen=True)
class Progress:
    """A request at one moment. `total` is the number of prompt tokens to compute, as far as it is known."""

    phase: Phase = "queued"
    computed: int = 0  # prompt tokens that are computed, or found in the prefix cache
    total: int = 0

    @property
    def share(self) -> float:
        """The computed share of the prompt, 0 to 1."""
        return self.computed / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"reading {int(self.share * 100)}%" if self.phase == "reading" else self.phase


class Tracker:
    """Holds the latest progress of one request.

    The engine's thread replaces `latest`, an immutable object, so readers never see half an update.
    """

    __slots__ = ("latest",)

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.latest = Progress(total=prompt_tokens)

    def queued(self, prompt_tokens: int) -> None:
        self.latest = Progress("queued", 0, prompt_tokens)

    def scoring(self) -> None:
        self.latest = Progress("scoring", 0, self.latest.total)

    def advanced(self, computed: int, prompt_tokens: int, *, left: bool) -> None:
        """`computed` slots are done. Called for each row of each step: generating changes nothing."""
        if left or self.latest.phase != "generating":
            phase: Phase = "reading" if left else "generating"
            self.latest = Progress(phase, min(computed, prompt_tokens), prompt_tokens)


def combined(each: Sequence[Progress]) -> Progress:
    """Progress of several prompts that are answered together.

    The phase is the latest that one of them is in, but not `generating` before all are.
    """
    latest = max((PHASES.index(one.phase) for one in each), default=0)
    if any(one.phase != "generating" for one in each):
        latest = min(latest, PHASES.index("reading"))
    return Progress(PHASES[latest], sum(one.computed for one in each), sum(one.total for one in each))
