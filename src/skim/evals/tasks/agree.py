"""Agreement with dense over real text: the text goes on as it does, and at every token the modes are asked
what they would have said.

All modes are led along the same tokens, so that one early difference does not make all that follows differ.
Dense is the reference and is always run, which is why contexts must fit the model's window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skim.errors import RequestError
from skim.evals.ask import check_read
from skim.evals.haystack import Haystack
from skim.evals.run import Cell, Progress, figures, forget
from skim.evals.task import Evaluation
from skim.measure.modes import DENSE, Mode, parse_mode
from skim.measure.report import MeasurementError, Row, reason_of

if TYPE_CHECKING:
    from skim.evals.teacher import Led
    from skim.llm import LLM

TOKENS = 64  # that modes are compared over


class Agree(Evaluation):
    """Score: the share of tokens at which a mode's likeliest token is dense's. `kl`: the mean divergence of
    the mode's distribution from dense's, over the whole vocabulary; `nll`: of the text itself; in nats."""

    name = "agree"
    help = "tokens and distributions against dense, over real text"
    kinds = ("text",)
    default_kinds = kinds

    def __init__(self, source: str) -> None:
        self._haystack = Haystack(source)

    def run(
        self,
        llm: LLM,
        cells: Sequence[Cell],
        modes: Sequence[Mode],
        *,
        n: int,
        seed: int,
        tokens: int = TOKENS,
        progress: Progress = lambda done, total: None,
    ) -> list[Row]:
        """A row for every cell and mode."""
        drawn = [
            [
                self._draw(llm, random.Random(f"{seed}/agree/{cell}/{i}"), cell.context, tokens)
                for i in range(n)
            ]
            for cell in cells
        ]
        rows: list[Row] = []
        for cell, texts in zip(cells, drawn, strict=True):
            results: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in modes}
            failed: dict[str, str] = {}
            for number, text in enumerate(texts):
                self._compare(llm, text, tokens, modes, number, results, failed)
                progress(len(rows) * n + (number + 1) * len(modes), len(cells) * len(modes) * n)
            for mode in modes:
                rows.append(_row(cell.key(self.name, mode), results[mode.name], failed.get(mode.name), n))
        return rows

    def _draw(self, llm: LLM, rng: random.Random, context: int, tokens: int) -> tuple[int, ...]:
        """`context` tokens of the text, from the beginning of a random sentence on."""
        if context <= tokens:
            raise RequestError(f"a context of {context} has no prompt before the {tokens} tokens compared")
        text, wanted = "", 0
        for sentence in self._haystack.read_from(rng):
            text += sentence + " "
            if len(text) > wanted:
                ids = llm.encode(text)
                if len(ids) >= context:
                    return ids[:context]
                wanted = len(text) + (context - len(ids))  # a token has at least a character, most have more
        raise RequestError(f"the text has fewer than {context} tokens; give a longer --text")

    def _compare(
        self,
        llm: LLM,
        text: tuple[int, ...],
        tokens: int,
        modes: Sequence[Mode],
        number: int,
        results: dict[str, list[dict[str, Any]]],
        failed: dict[str, str],
    ) -> None:
        """One text in every mode that has not failed yet. The reference is held no longer than that."""
        from skim.evals.teacher import compare

        try:
            reference = _lead(llm, text, tokens, parse_mode(DENSE))
        except Exception as error:
            for mode in modes:
                failed.setdefault(mode.name, f"sample {number}: dense, the reference: {reason_of(error)}")
            return
        for mode in modes:
            if mode.name in failed:
                continue
            try:
                led = reference if mode.is_dense else _lead(llm, text, tokens, mode)
                results[mode.name].append({**compare(reference, led), **_reading(led)})
            except Exception as error:
                failed[mode.name] = f"sample {number}: {reason_of(error)}"


def _lead(llm: LLM, text: tuple[int, ...], tokens: int, mode: Mode) -> Led:
    from skim.evals.teacher import lead

    try:
        led = lead(llm, text[:-tokens], text[-tokens:], mode)
        check_read(mode, led.metrics, led.plan)
        return led
    finally:
        forget(llm)


def _reading(led: Led) -> dict[str, Any]:
    metrics = led.metrics
    return {
        "read": metrics.kept_tokens / metrics.prompt_tokens,
        "ttft": metrics.ttft_ms / 1e3,
        "prompt_tokens": metrics.prompt_tokens,
    }


def _row(key: Any, results: list[dict[str, Any]], failed: str | None, n: int) -> Row:
    if failed is None and len(results) != n:
        failed = f"{len(results)} samples came back of {n}"
    try:
        return Row(key, failed=failed) if failed else Row(key, figures(results), notes={"samples": results})
    except MeasurementError as error:
        return Row(key, failed=str(error))
