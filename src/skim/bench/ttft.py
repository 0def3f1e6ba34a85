"""Time to first token over contexts and modes, split into its parts, cold and warm.

Cold: the prefix cache is empty, but kernels have run before. Warm: the same prompt again, right after.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skim.bench.ceiling import Ceiling
from skim.bench.drive import Driver, FirstToken, drivers_of
from skim.bench.inputs import Prompts
from skim.bench.peers import Peer
from skim.bench.turns import Turn, alone, take_turns
from skim.bench.work import Work
from skim.config import PrefillConfig
from skim.measure.modes import DENSE, Mode
from skim.measure.report import Better, Figure, Key, Row, tail, timing

COLD, WARM = "cold", "warm"
WARM_UP_DENSE = 24576  # tokens read in full to warm up a GPU: one chunk, and two after a prefix
WARM_UP = 512  # prompt tokens that each mode reads to warm up on the CPU


@dataclass(frozen=True)
class Task:
    """The grid of a run: one row for each context, mode and cache state, and each context and peer."""

    contexts: Sequence[int]
    modes: Sequence[Mode]
    peers: Sequence[Peer]
    repeats: int
    warm: bool = False


def measure_ttft(
    driver: Driver,
    task: Task,
    prompts: Prompts,
    work: Work,
    ceiling: Ceiling,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure one row for each context, mode and cache state. A peer has one for each context, cold."""
    drivers = drivers_of(driver, task.modes)
    warm_up(drivers, task, prompts, tell)
    outcomes = take_turns(list(_turns(drivers, task, prompts)), task.repeats, tell)
    exact = [mode.name for mode in task.modes if mode.prefill.prefill_attention == DENSE]
    ours = {*exact, "transformers"}  # `Work` counts the operations of these
    rows = []
    for outcome in outcomes:
        counted = outcome.key["mode"] in ours and outcome.key["state"] == COLD
        rows.append(
            outcome.row(task.repeats, partial(figures_of, limit=(work, ceiling) if counted else None))
        )
    return rows


def warm_up(drivers: Mapping[str, Driver], task: Task, prompts: Prompts, tell: Callable[[str], None]) -> None:
    """Run every contender once, untimed: kernels are compiled and scorers are built on first use.

    On a GPU kernels are chosen by shape, so every context is read, dense ones for a few chunks only. On the
    CPU a short prompt is enough. Failures are ignored here; they recur in the timed runs.
    """
    tell("warming up")
    on_gpu = any(driver.model.device.type == "cuda" for driver in drivers.values())
    for tokens in task.contexts if on_gpu else [min(*task.contexts, WARM_UP)]:
        prompt, start = prompts(tokens, -1), prompts(min(tokens, WARM_UP_DENSE), -1)
        runs = [
            partial(
                drivers[mode.name].first_token,
                prompt if mode.prefill.skims(tokens) else start,
                mode.prefill,
            )
            if on_gpu
            else partial(drivers[mode.name].first_token, prompt, _for_short(mode, max(task.contexts)))
            for mode in task.modes
        ]
        for run in (*runs, *(partial(peer.first_token, prompt) for peer in task.peers)):
            with contextlib.suppress(Exception):
                alone(run)
            for driver in drivers.values():
                driver.forget()


def _for_short(mode: Mode, longest: int) -> PrefillConfig:
    """A mode's settings for the short warm-up prompt: with its scorer, if the longest context uses it."""
    if mode.prefill.skims(longest):
        return replace(mode.prefill, sparse_prefill="always")
    return mode.prefill


def _turns(drivers: Mapping[str, Driver], task: Task, prompts: Prompts) -> Iterator[Turn[FirstToken]]:
    states = [COLD, WARM] if task.warm else [COLD]
    for context in task.contexts:
        for mode in task.modes:
            keys: list[Mapping[str, Key]] = [
                {"context": context, "mode": mode.name, "state": state} for state in states
            ]
            yield Turn(keys, _mode_turn(drivers[mode.name], mode, prompts, context, states))
        for peer in task.peers:
            key: Mapping[str, Key] = {"context": context, "mode": peer.name, "state": COLD}
            yield Turn([key], _peer_turn(peer, prompts, context))


def _mode_turn(
    driver: Driver, mode: Mode, prompts: Prompts, context: int, states: Sequence[str]
) -> Callable[[int], Iterator[FirstToken]]:
    def measure(repeat: int) -> Iterator[FirstToken]:
        driver.check_room(context, mode.prefill)
        prompt = prompts(context, repeat)
        driver.forget()
        try:
            for state in states:
                yield driver.first_token(prompt, mode.prefill, warm=state == WARM)
        finally:
            driver.forget()

    return measure


def _peer_turn(peer: Peer, prompts: Prompts, context: int) -> Callable[[int], Iterator[FirstToken]]:
    def measure(repeat: int) -> Iterator[FirstToken]:
        yield peer.first_token(prompts(context, repeat))

    return measure


def figures_of(samples: Sequence[FirstToken], limit: tuple[Work, Ceiling] | None = None) -> dict[str, Figure]:
    """A row's figures. The parts are those of the run with the median time to first token, so they add up.

    With an even number of runs, the middle two are averaged. Ranges span all runs.
    """
    ordered = sorted(samples, key=lambda one: one.ttft)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]

    def part(pick: Callable[[FirstToken], float], unit: str = "s", better: Better = "lower") -> Figure:
        spread = timing([pick(one) for one in samples], unit, better=better)
        return replace(spread, value=statistics.fmean(pick(one) for one in middle))

    found = {"ttft": timing([one.ttft for one in samples]), "ttft_p99": tail([[one.ttft] for one in samples])}
    if all(one.phases is not None for one in samples):
        found["queue"] = part(lambda one: one.phases.queue if one.phases else 0.0)
        found["scoring"] = part(lambda one: one.phases.scoring if one.phases else 0.0)
        found["prefill"] = part(lambda one: one.phases.prefill if one.phases else 0.0)
    if all(one.first_decode is not None for one in samples):
        found["first_decode"] = part(lambda one: one.first_decode or 0.0)
    if all(one.phases is not None for one in samples):
        found["kept"] = part(
            lambda one: one.phases.kept / one.prompt_tokens if one.phases else 0.0, "share", "neither"
        )
    if all(one.phases is not None and one.phases.read is not None for one in samples):
        found["blocks"] = part(lambda one: (one.phases and one.phases.read) or 0.0, "share", "neither")
    if limit is not None:
        work, ceiling = limit
        found["gflops"] = part(lambda one: rate(one, work) / 1e9, "GFLOP/s", "higher")
        found["of_peak"] = part(lambda one: rate(one, work) / ceiling.flops, "share", "higher")
    return found


def rate(sample: FirstToken, work: Work) -> float:
    """FLOP/s of the tokens that prefill computed. Scoring counts neither as work nor as time."""
    phases = sample.phases
    if phases is None:
        return work.prefill_flops(sample.prompt_tokens) / sample.ttft
    return work.prefill_flops(phases.kept - phases.cached, phases.cached) / phases.prefill


def crossovers(rows: Sequence[Row], modes: Sequence[Mode], least: int = 3) -> dict[str, int | None]:
    """For each sparse mode, the shortest context at and above which it is faster than dense, cold.

    Faster means beyond the noise: its slowest run is faster than dense's fastest, at that context and at all
    longer ones. None if it is not faster at the longest. A mode is left out if fewer than `least` contexts
    have both it and dense with several runs each; the noise of a single run is unknown.
    """
    times = {
        (row.key["mode"], row.key["context"]): row.figures["ttft"]
        for row in rows
        if row.failed is None and row.key["state"] == COLD and row.figures["ttft"].n > 1
    }
    dense = next((mode.name for mode in modes if mode.is_dense), None)
    found: dict[str, int | None] = {}
    for mode in modes:
        both = sorted(
            int(context)
            for name, context in times
            if name == mode.name and (dense, context) in times and not mode.is_dense
        )
        if len(both) < least:
            continue
        found[mode.name] = None
        for context in reversed(both):
            if times[mode.name, context].high >= times[dense, context].low:  # type: ignore[index]
                break
            found[mode.name] = context
    return found
