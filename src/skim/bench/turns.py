"""Contenders take turns, so that drift of the machine affects all of them. A turn that fails is a failed row.

On a CPU each turn has a thread that ends with it: OpenMP keeps workers for every thread that has computed,
and those of one contender would slow the next. With a GPU all turns share one thread, as all requests of an
engine do: cuDNN prepares its attention again for every thread, which takes as long as ten layers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from skim.measure.report import Figure, Key, MeasurementError, Row, reason_of

S = TypeVar("S")
T = TypeVar("T")

_POLL_S = 0.5

_interrupted = threading.Event()


def check_interrupt() -> None:
    """Raise after Ctrl-C. Long work calls this regularly so that it ends soon."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


_steady = ThreadPoolExecutor(1, thread_name_prefix="skim-turns")


def alone(work: Callable[[], T]) -> T:
    """Run work in a new thread, or in the thread that a GPU's turns share, and return its result.

    Ctrl-C asks the work to stop (`check_interrupt`) and waits until it has: a process that exits while one of
    its threads computes is aborted.
    """
    found: list[T] = []
    broke: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            broke.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="skim-turn", daemon=True)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _steady.submit(run)
    else:
        thread.start()
    try:
        _until(ended)  # an interrupted join() would mark the thread as ended
    except KeyboardInterrupt:
        _interrupted.set()
        _until(ended)
        raise
    finally:
        if thread.ident is not None:
            thread.join()
        _interrupted.clear()
    if broke:
        raise broke[0]
    return found[0]


def _until(event: threading.Event) -> None:
    """Wait by polling: a signal just before an unlimited wait would not interrupt it."""
    while not event.wait(_POLL_S):
        pass


@dataclass(frozen=True)
class Turn(Generic[S]):
    """One contender at one point: `measure(repeat)` yields a sample for each key, in order."""

    keys: Sequence[Mapping[str, Key]]
    measure: Callable[[int], Iterable[S]]


@dataclass
class Outcome(Generic[S]):
    """A row's samples, or the reason it failed."""

    key: Mapping[str, Key]
    samples: list[S] = field(default_factory=list)
    failed: str | None = None

    def row(self, repeats: int, figures: Callable[[Sequence[S]], Mapping[str, Figure]]) -> Row:
        """The row; failed if a repeat is missing or a figure is not finite."""
        failed = self.failed
        if failed is None and len(self.samples) != repeats:
            failed = f"only {len(self.samples)} of {repeats} repeats gave a result"
        if failed is None:
            try:
                return Row(self.key, figures(self.samples))
            except MeasurementError as error:
                failed = str(error)
        return Row(self.key, failed=failed)


def take_turns(
    turns: Sequence[Turn[S]], repeats: int, tell: Callable[[str], None] = lambda _: None
) -> list[Outcome[S]]:
    """Take every turn once per repeat, in a random order per repeat that is the same in every run.

    In a fixed order, a contender that follows a longer run would always be a few percent slower. A failed row
    is not tried again and does not affect the others. All rows are returned, in the order of turns and keys.
    """
    outcomes = [[Outcome[S](key) for key in turn.keys] for turn in turns]
    for repeat in range(repeats):
        for index in random.Random(repeat).sample(range(len(turns)), len(turns)):
            live = [outcome for outcome in outcomes[index] if outcome.failed is None]
            if not live:
                continue
            tell(f"repeat {repeat + 1} of {repeats}: {_named(turns[index])}")
            _take(turns[index], outcomes[index], repeat)
    return [outcome for group in outcomes for outcome in group]


def _take(turn: Turn[S], outcomes: list[Outcome[S]], repeat: int) -> None:
    taken = 0

    def work() -> None:
        nonlocal taken
        for sample in turn.measure(repeat):
            if taken < len(outcomes) and outcomes[taken].failed is None:
                outcomes[taken].samples.append(sample)
            taken += 1

    reason = "the turn gave fewer results than expected"
    try:
        alone(work)
    except Exception as error:
        reason = reason_of(error)
    for outcome in outcomes[taken:]:
        outcome.failed = outcome.failed or reason


def _named(turn: Turn[S]) -> str:
    key = turn.keys[0]
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else str(value) for name, value in key.items()
    )
