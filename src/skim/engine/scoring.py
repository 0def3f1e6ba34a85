"""The scorers of one engine, made when they are first asked for: over the target's module or a drafter's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from skim.models.load import LoadedModel
from skim.prefill.calibration import FILE_NAME, Calibration, default_calibration, shipped
from skim.prefill.drafter import Drafter
from skim.prefill.scorers import Scorer
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.cascade import CascadeScorer, SumScorer
from skim.prefill.scorers.embedding import EmbeddingScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scorers.random import RandomScorer


def make_scorers(target: LoadedModel, drafter: LoadedModel | None) -> Callable[[str], Scorer]:
    """Scorers by name. Without a drafter the target scores for itself; `self` always does."""
    reader = drafter or target

    @cache
    def draft() -> Drafter:
        return Drafter(reader.module, reader.tokenizer, target.tokenizer)

    def decode(ids: list[int]) -> str:
        return str(target.tokenizer.decode(ids, skip_special_tokens=False))

    makers: dict[str, Callable[[], Scorer]] = {
        "lexical": lambda: LexicalScorer(decode),
        "self": lambda: AttentionScorer(target.module, calibration_of(target), name="self"),
        "attention": lambda: draft().attention(calibration_of(reader)),
        "entropy": lambda: draft().entropy(),
        "random": RandomScorer,
        "cascade": lambda: CascadeScorer(
            SumScorer(LexicalScorer(decode), EmbeddingScorer(target.module)),
            draft().attention(calibration_of(reader)),
        ),
    }
    return cache(lambda name: makers[name]())


def calibration_of(model: LoadedModel) -> Calibration:
    """What was measured for this model here, or what is shipped for it, or the stated default."""
    own = model.path / FILE_NAME
    if own.is_file():
        return Calibration.load(own)
    known = shipped(model.name)
    if known is not None:
        return known
    config: Any = model.module.config
    return default_calibration(config.get_text_config().num_hidden_layers)
