"""Runs a task over contexts, kinds, depths and modes, with the same samples in every mode.

A report row is valid only if all its samples are. The first error in a sample fails its row; other rows are
not affected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skim.errors import ConfigError, SkimError
from skim.evals.ask import Outcome, ask
from skim.evals.counting import Counter
from skim.evals.engines import Engines
from skim.evals.look import look
from skim.evals.messages import text_of
from skim.evals.room import Room, Turns
from skim.evals.task import Draw, Sample, Task
from skim.measure.modes import ARMS, AUTO, BLOCKSPARSE, DENSE, Mode, parse_mode
from skim.measure.report import Figure, Key, MeasurementError, Row, reason_of, score, timing

if TYPE_CHECKING:
    from skim.llm import LLM

CONTROLS = {  # each with the settings it does not inherit: `random` must not be rescued by words
    "lexical": ("follow_up",),
    "random": ("follow_up", "rescue_cap"),
}

OF_CACHE = ("ttft", "computed")  # figures that depend on what is cached

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cell:
    """The settings that the samples of a report row share, besides the mode."""

    kind: str
    context: int
    depth: float | None = None

    def key(self, task: str, mode: Mode) -> dict[str, Key]:
        depth: dict[str, Key] = {} if self.depth is None else {"depth": self.depth}
        return {"task": task, "kind": self.kind, "context": self.context, **depth, "mode": mode.name}


def with_controls(names: Sequence[str]) -> list[str]:
    """The modes, plus controls with the same KEEP for each sparse mode. No duplicates.

    `auto` has no controls: it decides when to skim, not what to read. Nor has `blocksparse`, which reads
    everything.
    """
    found = list(names)
    for name in names:
        first, *extra = name.split(",")
        scorer, colon, keep = first.partition(":")
        if scorer not in (DENSE, AUTO, BLOCKSPARSE, *ARMS):
            for control, own in CONTROLS.items():
                settings = [one for one in extra if one.partition("=")[0] not in own]
                found.append(",".join([control + colon + keep, *settings]))
    return list(dict.fromkeys(found))


def parse_modes(names: Sequence[str], *, controls: bool = True, drafter: str | None = None) -> list[Mode]:
    if len(set(names)) < len(names):
        raise ConfigError(f"--modes lists a mode twice: {' '.join(names)}")
    return [parse_mode(name, drafter=drafter) for name in (with_controls(names) if controls else names)]


def run(
    llm: LLM,
    task: Task,
    cells: Sequence[Cell],
    modes: Sequence[Mode],
    *,
    n: int,
    seed: int,
    kept_only: bool = False,
    concurrency: int = 1,
    share_prompts: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Row]:
    """A report row for every cell and mode. The last sample of every cell is drawn first, so bad arguments
    fail at once.

    With `kept_only`, prompts are planned and no reply is generated. With a `concurrency` above 1, samples
    of a row share engine steps; their times to first token are then those of a busy engine. With
    `share_prompts`, modes that read a prompt alike compute it once; figures `OF_CACHE` are then left out.
    """
    drawer = Drawer(llm, task, seed)
    for cell in cells:
        drawer.draw(cell, n - 1)
    total = len(cells) * len(modes) * n
    rows: list[Row] = []

    def tell(through: int) -> None:
        progress(len(rows) * n + through, total)

    groups = [modes] if share_prompts else [[mode] for mode in modes]
    with Engines(llm, shared_by=modes if share_prompts else ()) as engines:
        for cell in cells:
            samples = [drawer.draw(cell, number) for number in range(n)]
            if kept_only:
                rows.extend(plan_cell(llm, task, cell, samples, modes, tell=tell))
                continue
            for group in groups:
                rows.extend(
                    measure(engines, task, cell, samples, group, n=n, concurrency=concurrency, tell=tell)
                )
    return rows


class Drawer:
    """Draws samples. Each depends only on the seed, the cell and its number."""

    def __init__(self, llm: LLM, task: Task, seed: int) -> None:
        self._llm, self._task, self._seed = llm, task, seed
        self._counter = Counter(lambda text: len(llm.encode(text, add_special_tokens=False)))

    def draw(self, cell: Cell, number: int) -> Sample:
        room = Room(cell.context, self._counter.piece, self._count_prompt)
        rng = random.Random(f"{self._seed}/{self._task.name}/{cell}/{number}")
        return self._task.draw(Draw(rng, number, self._seed, cell.kind, cell.depth, room))

    def _count_prompt(self, turns: Turns) -> int:
        return self._counter.text(text_of(self._llm, turns))


def plan_cell(
    llm: LLM,
    task: Task,
    cell: Cell,
    samples: Sequence[Sample],
    modes: Sequence[Mode],
    *,
    tell: Callable[[int], None] = lambda through: None,
) -> list[Row]:
    """One report row for each mode: every sample planned, without replies."""
    rows: list[Row] = []
    for mode, results in zip(modes, look(llm, samples, modes, tell), strict=True):
        key = cell.key(task.name, mode)
        try:
            if isinstance(results, MeasurementError):
                raise results
            rows.append(Row(key, figures(results), notes={"samples": results}))
        except MeasurementError as error:
            rows.append(Row(key, failed=str(error)))
    return rows


def measure(
    engines: Engines,
    task: Task,
    cell: Cell,
    samples: Sequence[Sample],
    modes: Sequence[Mode],
    *,
    n: int,
    concurrency: int = 1,
    tell: Callable[[int], None] = lambda through: None,
) -> list[Row]:
    """One report row for each mode, sample by sample.

    With several modes, those with the same `salts_of` share the cached prompts of a sample, so figures
    `OF_CACHE` are left out. A mode gets no further sample after its first error.
    """
    failed: dict[str, str] = {}
    llms = {mode.name: engines.of(mode) for mode in modes}
    salts = salts_of(modes)

    def results(number: int) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for mode in modes:
            if mode.name in failed:
                continue
            salt = f"{salts[mode.name]}/{number}"
            try:
                outcome = ask(llms[mode.name], samples[number], engines.asked(mode), salt)
                found[mode.name] = _result(task, samples[number], outcome)
            except Exception as error:
                failed.setdefault(mode.name, f"sample {number}: {reason_of(error)}")
        if concurrency == 1:
            forget_all()
        return found

    def forget_all() -> None:
        for llm in llms.values():
            forget(llm)

    try:
        answered = _in_threads(results, len(samples), concurrency, lambda done: tell(done * len(modes)))
    finally:
        forget_all()
    rows = []
    for mode in modes:
        own = [found[mode.name] for found in answered if mode.name in found]
        if len(modes) > 1:
            own = [{name: value for name, value in one.items() if name not in OF_CACHE} for one in own]
        rows.append(row_of(cell.key(task.name, mode), own, failed.get(mode.name), n))
    return rows


def salts_of(modes: Sequence[Mode]) -> dict[str, str]:
    """A cache salt for each mode, by name: the same for modes that compute the same keys and values.

    `auto` and `blocksparse` have their own: what they read depends on what is cached.
    """
    readers = {mode.prefill: mode.name for mode in modes}
    return {
        mode.name: mode.name
        if mode.prefill.sparse_prefill == AUTO or mode.prefill.prefill_attention == BLOCKSPARSE
        else readers[mode.prefill]
        for mode in modes
    }


def row_of(key: Mapping[str, Key], results: Sequence[Mapping[str, Any]], failed: str | None, n: int) -> Row:
    """The row of `n` results, or of the reason that there are fewer."""
    if failed is None and len(results) != n:
        failed = f"{len(results)} of {n} samples completed"
    try:
        return Row(key, failed=failed) if failed else Row(key, figures(results), notes={"samples": results})
    except MeasurementError as error:
        return Row(key, failed=str(error))


def _in_threads(
    work: Callable[[int], dict[str, Any]], count: int, threads: int, tell: Callable[[int], None]
) -> list[dict[str, Any]]:
    """The results of `work` for each number below `count`, in order. The first error ends it."""
    with ThreadPoolExecutor(threads) as pool:
        started = [pool.submit(work, number) for number in range(count)]
        try:
            for done, future in enumerate(as_completed(started), 1):
                future.result()
                tell(done)
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in started]


def forget(llm: LLM) -> None:
    """Empty the prefix cache. An engine that died has reported its error already."""
    try:
        llm.engine.reset_prefix_cache()
    except SkimError:
        return


def _result(task: Task, sample: Sample, outcome: Outcome) -> dict[str, Any]:
    """The result of one sample, as stored in the report's notes."""
    metrics = outcome.metrics
    found: dict[str, Any] = {**task.grade(sample, outcome.reply)}
    for name in ("kept", "told"):
        if (share := getattr(outcome, name)) is not None:
            found[name] = share
    found["read"] = metrics.kept_tokens / metrics.prompt_tokens
    if len(sample.turns) > 1:
        found["computed"] = metrics.kept_tokens - metrics.cached_tokens
        found["follow_up"] = metrics.follow_up
    if metrics.decode is not None and metrics.decode.drafted:
        found["accepted"] = metrics.decode.accepted / metrics.decode.drafted
    return {
        **found,
        "ttft": metrics.ttft_ms / 1e3,
        "prompt_tokens": metrics.prompt_tokens,
        "expected": list(sample.expected),
        "reply": outcome.reply,
    }


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Aggregate the samples: mean scores with confidence intervals, median costs."""
    found: dict[str, Figure] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]  # a short reply has no drafts
        match name:
            case "ttft" | "scoring":
                found[name] = timing(values)
            case "computed":
                found[name] = timing(values, "tok")
            case "kl" | "nll":
                found[name] = score(values, unit="nats", better="lower")
            case "read":
                found[name] = timing(values, "share")
            case "follow_up" | "prompt_tokens" | "expected" | "reply":
                continue
            case _:
                found[name] = score(values)
    return found
