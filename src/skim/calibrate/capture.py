"""Reads prompts and captures every feature of every head, and the scores of words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skim.calibrate.trials import Prompt
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.combine import outstanding
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.features import Feature, Statistic, names_of
from skim.prefill.scoring.scorer import ScoringModel, ScoringTask, run_to_completion
from skim.prefill.scoring.statistics import stacked

BLOCK = 32


@dataclass(frozen=True)
class Trial:
    """One prompt with known evidence, as all features of its blocks."""

    kind: str
    pair: str  # name of the fact: prompts with the same one are never fitted and validated together
    features: np.ndarray  # [features, blocks] float32
    words: np.ndarray  # [2, blocks]: how far shared and similar words stand out
    evidence: tuple[tuple[int, ...], ...]  # the blocks of each passage


class Reader:
    """Reads prompts with the first `layers` layers of a model."""

    def __init__(self, model: ScoringModel, layers: int) -> None:
        heads = int(model.module.config.get_text_config().num_attention_heads)
        every = tuple(
            Feature(statistic, layer, head, 1.0)
            for layer in range(layers)
            for head in range(heads)
            for statistic in Statistic
        )
        known = Calibration(tuple(range(layers)), every, (0.0, 0.0))
        self._attention = AttentionScorer(model.module, known)
        self._captures = known.captures()
        self._words = LexicalScorer(decoder_of(model.tokenizer)), EmbeddingScorer(model.module)
        self.names = names_of(self._captures)

    def read(self, prompt: Prompt) -> Trial:
        task = ScoringTask(tuple(prompt.tokens.tolist()), (prompt.question,), BLOCK)
        read = task.context_blocks
        features = run_to_completion(
            self._attention.reduced(task, lambda rows: stacked(rows, self._captures))
        )
        words = np.stack(
            [outstanding(np.array(run_to_completion(one.score(task))))[read] for one in self._words]
        )
        column = {int(block): index for index, block in enumerate(read)}
        evidence = tuple(
            tuple(sorted({column[place // BLOCK] for place in own if place // BLOCK in column}))
            for own in prompt.evidence
        )
        kind, question = prompt.order.kind, prompt.order.pair.question
        return Trial(kind, question, features.astype(np.float32), words.astype(np.float32), evidence)
