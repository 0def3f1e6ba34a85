"""Agreement with dense prefill over real text: each mode's next-token distributions against dense.

Dense has the engine's KV format, which is full precision unless `kv_cache_dtype` is set.

All modes run over the same tokens by teacher forcing, so an early difference does not change everything after
it. Dense is the reference and always runs, so contexts must fit the model's context window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skim.errors import RequestError
from skim.evals.ask import Read, check_read
from skim.evals.engines import Engines
from skim.evals.haystack import Haystack
from skim.evals.run import Cell, Progress, forget, row_of
from skim.evals.task import Evaluation
from skim.measure.modes import DENSE, Mode, parse_mode
from skim.measure.report import Row, reason_of

if TYPE_CHECKING:
    from skim.evals.teacher import TeacherForced
    from skim.llm import LLM

TOKENS = 64  # compared per text


class Agree(Evaluation):
    """Score: the fraction of tokens at which a mode's most likely token is also dense's. `kl`: the mean
    divergence KL(dense || mode) over the whole vocabulary, in nats. `nll`: the mean negative log-likelihood
    of the text, in nats."""

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
        """A report row for every cell and mode."""
        drawn = [
            [
                self._draw(llm, random.Random(f"{seed}/agree/{cell}/{i}"), cell.context, tokens)
                for i in range(n)
            ]
            for cell in cells
        ]
        rows: list[Row] = []
        with Engines(llm) as engines:
            for cell, texts in zip(cells, drawn, strict=True):
                results: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in modes}
                failed: dict[str, str] = {}
                for number, text in enumerate(texts):
                    self._compare(engines, text, tokens, modes, number, results, failed)
                    progress(len(rows) * n + (number + 1) * len(modes), len(cells) * len(modes) * n)
                for mode in modes:
                    rows.append(
                        row_of(cell.key(self.name, mode), results[mode.name], failed.get(mode.name), n)
                    )
        return rows

    def _draw(self, llm: LLM, rng: random.Random, context: int, tokens: int) -> tuple[int, ...]:
        """`context` tokens of the text, starting at a random sentence."""
        if context <= tokens:
            raise RequestError(
                f"a context of {context} has no prompt before the {tokens} tokens compared; raise --contexts"
            )
        text, wanted = "", 0
        for sentence in self._haystack.sentences_from(rng):
            text += sentence + " "
            if len(text) > wanted:
                ids = llm.encode(text)
                if len(ids) >= context:
                    return ids[:context]
                wanted = len(text) + (context - len(ids))  # a token has at least one character
        raise RequestError(f"the text has fewer than {context} tokens; give a longer --text")

    def _compare(
        self,
        engines: Engines,
        text: tuple[int, ...],
        tokens: int,
        modes: Sequence[Mode],
        number: int,
        results: dict[str, list[dict[str, Any]]],
        failed: dict[str, str],
    ) -> None:
        """Run one text in every mode that has not failed yet. Only one reference is in memory at a time."""
        from skim.evals.teacher import compare

        try:
            dense = parse_mode(DENSE)
            reference = _teacher_force(engines.of(dense), text, tokens, dense)
        except Exception as error:
            for mode in modes:
                failed.setdefault(mode.name, f"sample {number}: dense, the reference: {reason_of(error)}")
            return
        for mode in modes:
            if mode.name in failed:
                continue
            try:
                forced = reference if mode.is_dense else _teacher_force(engines.of(mode), text, tokens, mode)
                results[mode.name].append({**compare(reference, forced), **_reading(forced)})
            except Exception as error:
                failed[mode.name] = f"sample {number}: {reason_of(error)}"


def _teacher_force(llm: LLM, text: tuple[int, ...], tokens: int, mode: Mode) -> TeacherForced:
    from skim.evals.teacher import teacher_force

    try:
        forced = teacher_force(llm, text[:-tokens], text[-tokens:], mode)
        check_read(mode, Read.of(forced.metrics, forced.plan))
        return forced
    finally:
        forget(llm)


def _reading(forced: TeacherForced) -> dict[str, Any]:
    metrics = forced.metrics
    return {
        "read": metrics.kept_tokens / metrics.prompt_tokens,
        "ttft": metrics.ttft_ms / 1e3,
        "prompt_tokens": metrics.prompt_tokens,
    }
