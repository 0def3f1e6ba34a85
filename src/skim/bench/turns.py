"""Contenders take turns, so that what drifts on a machine drifts for all of them; what breaks is left out.

On a CPU a turn is a thread that ends with it: OpenMP keeps workers for every thread that has computed, and
those of one contender would slow the next. With a GPU all turns are one thread, as all requests of an engine
are: cuDNN plans its attention anew for every thread, which takes as long as ten layers do.
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

_LOOK_UP_S = 0.5

_interrupted = threading.Event()


def check_interrupt() -> None:
    """Called by long work now and then, so that it ends soon after Ctrl-C."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


_steady = ThreadPoolExecutor(1, thread_name_prefix="skim-turns")


def alone(work: Callable[[], T]) -> T:
    """The outcome of some work in a thread of its own, or in the one that a GPU's turns share.

    Ctrl-C asks the work to stop (`check_interrupt`) and waits for that: a process that ends while a thread of
    it computes is aborted.
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
        _until(ended)  # an interrupted join() would take the thread for ended
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
    """Wait, and look up now and then: a signal just before a wait without an end would not end it."""
    while not event.wait(_LOOK_UP_S):
        pass


@dataclass(frozen=True)
class Turn(Generic[S]):
    """One contender at one point: `measure(repeat)` gives a sample for each of the keys, in their order."""

    keys: Sequence[Mapping[str, Key]]
    measure: Callable[[int], Iterable[S]]


@dataclass
class Outcome(Generic[S]):
    """What a row's repeats gave: samples, or the reason why it does not count."""

    key: Mapping[str, Key]
    samples: list[S] = field(default_factory=list)
    failed: str | None = None

    def row(self, repeats: int, figures: Callable[[Sequence[S]], Mapping[str, Figure]]) -> Row:
        """The row, failed if a repeat is missing or a number is not one."""
        failed = self.failed
        if failed is None and len(self.samples) != repeats:
            failed = f"{len(self.samples)} of {repeats} repeats came back"
        if failed is None:
            try:
                return Row(self.key, figures(self.samples))
            except MeasurementError as error:
                failed = str(error)
        return Row(self.key, failed=failed)


def take_turns(
    turns: Sequence[Turn[S]], repeats: int, tell: Callable[[str], None] = lambda _: None
) -> list[Outcome[S]]:
    """Every turn once in each repeat, each repeat in another order, the same in every run.

    The order is drawn: in a fixed one, whoever comes right after a longer run is always a few percent slower.
    A row that failed is not tried again, and takes no part in what the others do. All rows come back, in the
    order of the turns and their keys.
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

    reason = "fewer results came back than asked for"
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
