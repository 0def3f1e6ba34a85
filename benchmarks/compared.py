"""Evidence kept by two calibrations of a model on the same held-out samples (`learn.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from skim.evals.ask import evidence_tokens
from skim.evals.look import _planned, encode
from skim.evals.run import Cell, Drawer
from skim.evals.tasks.evidence import Evidence
from skim.llm import LLM
from skim.measure.book import packaged_text
from skim.measure.modes import parse_mode

SHORT = 10_000  # tokens of a context in which a tenth is kept; 1,000 tokens of longer ones


@dataclass(frozen=True)
class Comparison:
    """Kept evidence and read tokens of one sample with one calibration, by mode."""

    cell: Cell
    number: int
    calibration: str
    kept: dict[str, float]
    read: dict[str, float]


@dataclass
class Comparer:
    """The state of a process: an engine for each calibration, opened when it is needed."""

    models: dict[str, str]
    settings: dict[str, Any]
    task: Evidence
    open: dict[str, tuple[LLM, Drawer]] = field(default_factory=dict)

    def of(self, calibration: str) -> tuple[LLM, Drawer]:
        if calibration not in self.open:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            llm = LLM(self.models[calibration], progress=False, enforce_eager=True, **self.settings)
            self.open[calibration] = llm, Drawer(llm, self.task, seed=0)
        return self.open[calibration]


comparer: Comparer


def begin(models: dict[str, str], settings: dict[str, Any]) -> None:
    """Prepare a process. `models` are names or directories, by calibration."""
    global comparer
    comparer = Comparer(models, settings, Evidence(packaged_text()))


def compare(cell: Cell, number: int, calibration: str) -> Comparison:
    llm, drawer = comparer.of(calibration)
    sample = drawer.draw(cell, number)
    prompt = encode(llm, sample)
    places = evidence_tokens(llm, prompt, sample.evidence)
    kept, read = {}, {}
    for name in modes_of(cell.context):
        found = _planned(llm, sample, parse_mode(name), prompt, places)
        kept[name], read[name] = found["kept"], found["read"]
    return Comparison(cell, number, calibration, kept, read)


def modes_of(context: int) -> tuple[str, ...]:
    # on a CPU, words would choose the part of a long prompt that the model reads
    whole = ",scoring_budget=1"
    return ("blend:0.1" + whole, "blend:auto" + whole) if context <= SHORT else ("blend:1000t" + whole,)


def table(found: Iterable[Comparison]) -> str:
    """Evidence kept in %, and the number of samples, by context, mode and calibration."""
    cells: dict[tuple[int, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    read: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    kinds: dict[str, None] = {}
    for one in sorted(found, key=lambda one: (one.cell.context, one.number)):
        for mode, kept in one.kept.items():
            row = one.cell.context, mode.partition(",")[0], one.calibration
            cells[row][one.cell.kind].append(kept)
            read[row].append(one.read[mode])
            kinds[one.cell.kind] = None
    lines = [f"{'kept % (samples)':32}" + "".join(f"{kind:>10}" for kind in kinds) + "      read"]
    for row in sorted(cells):
        own = cells[row]
        shown = (
            f"{100 * sum(own[kind]) / len(own[kind]):6.1f} ({len(own[kind])})" if own[kind] else "-"
            for kind in kinds
        )
        name = f"{row[0]} {row[1]} {row[2]}"
        mean = 100 * sum(read[row]) / len(read[row])
        lines.append(f"{name:32}" + "".join(f"{one:>12}" for one in shown) + f"  {mean:6.2f}")
    return "\n".join(lines) + "\n"
