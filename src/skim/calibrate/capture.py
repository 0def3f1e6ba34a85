"""Reads prompts and captures every feature of every head, and the scores of words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from skim.calibrate.trials import Prompt
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.combine import outstanding
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.features import Feature, Statistic, names_of
from skim.prefill.scoring.likelihood import LikelihoodScorer
from skim.prefill.scoring.scorer import ScoringModel, ScoringTask, run_to_completion
from skim.prefill.scoring.second_look import choose, count_of
from skim.prefill.scoring.statistics import stacked
from skim.prefill.scoring.windows import WINDOW_TOKENS

BLOCK = 32


@dataclass(frozen=True)
class Trial:
    """One prompt with known evidence, as all features of its blocks."""

    kind: str
    pair: str  # name of the fact: prompts with the same one are never fitted and validated together
    features: np.ndarray  # [features, columns] float32; a column is a block
    given: np.ndarray  # [given, columns] float32: scores beside the features
    evidence: tuple[tuple[int, ...], ...]  # the columns of each passage
    blocks: np.ndarray  # [columns]: their numbers in the prompt, ascending
    stands_for: np.ndarray | None = None  # blocks that a column stands for; None: each for itself alone

    @property
    def columns(self) -> int:
        return int(self.given.shape[1])

    @property
    def total(self) -> int:
        """Number of blocks that were read."""
        return self.columns if self.stands_for is None else round(float(self.stands_for.sum()))

    def thinned(self, logits: np.ndarray, best: int, others: int, seed: int) -> Trial:
        """The same trial with its evidence, the `best` columns by these logits and some of the others.

        Of the others, each stands for as many as were left out, so that the evidence's share is unbiased.
        """
        if self.columns <= best + others:
            return self
        certain = {column for own in self.evidence for column in own}
        certain |= set(np.argsort(-logits, kind="stable")[:best].tolist())
        rest = np.setdiff1d(np.arange(self.columns), list(certain))
        drawn = np.random.default_rng(seed).choice(rest, others, replace=False)
        columns = np.sort(np.concatenate([np.array(sorted(certain)), drawn]))
        return self._only(columns, np.where(np.isin(columns, drawn), len(rest) / others, 1.0))

    def _only(self, columns: np.ndarray, stands_for: np.ndarray) -> Trial:
        place = {int(column): index for index, column in enumerate(columns)}
        return replace(
            self,
            features=self.features[:, columns],
            given=self.given[:, columns],
            evidence=tuple(tuple(place[one] for one in own if one in place) for own in self.evidence),
            blocks=self.blocks[columns],
            stands_for=stands_for,
        )


class Reader:
    """Reads prompts with the first `layers` layers of a model, `window` prompt tokens at a time."""

    def __init__(self, model: ScoringModel, layers: int, window: int = WINDOW_TOKENS) -> None:
        heads = int(model.module.config.get_text_config().num_attention_heads)
        every = tuple(
            Feature(statistic, layer, head, 1.0)
            for layer in range(layers)
            for head in range(heads)
            for statistic in Statistic
        )
        known = Calibration(tuple(range(layers)), every, (0.0, 0.0))
        self._attention = AttentionScorer(model.module, known, window=window)
        self._captures = known.captures()
        self._words = LexicalScorer(decoder_of(model.tokenizer)), EmbeddingScorer(model.module)
        self._likelihood = LikelihoodScorer(model.module, model.tokenizer)
        self.names = names_of(self._captures)

    def read(self, prompt: Prompt) -> Trial:
        """The first look: all blocks. Scores of shared and of similar words are given."""
        task = task_of(prompt)
        words = [np.array(run_to_completion(one.score(task))) for one in self._words]
        return self._trial(prompt, task, np.stack([outstanding(one) for one in words]))

    def read_again(self, prompt: Prompt, trial: Trial, logits: np.ndarray) -> Trial | None:
        """The second look at the best blocks by the first look's logits; None if the prompt is too short.

        The logits, the scores of words and the question's likelihood after each block are given.
        """
        task = task_of(prompt)
        count = count_of(trial.total)
        if not count:
            return None
        given = np.zeros((2 + len(trial.given), task.blocks))
        given[0] = logits.min() - 1  # blocks that the trial lacks come last
        given[:-1, trial.blocks] = np.concatenate([logits[None], trial.given])
        some = task.only(choose(given[0], count).tolist())
        given[-1, some.context_blocks] = run_to_completion(self._likelihood.gains(some))
        return self._trial(prompt, some, given)

    def _trial(self, prompt: Prompt, task: ScoringTask, given: np.ndarray) -> Trial:
        read = task.context_blocks
        features = run_to_completion(
            self._attention.reduced(task, lambda rows: stacked(rows, self._captures))
        )
        column = {int(block): index for index, block in enumerate(read)}
        evidence = tuple(
            tuple(sorted({column[place // BLOCK] for place in own if place // BLOCK in column}))
            for own in prompt.evidence
        )
        kind, question = prompt.order.kind, prompt.order.pair.question
        own = given[:, read].astype(np.float32)
        return Trial(kind, question, features.astype(np.float32), own, evidence, read)


def task_of(prompt: Prompt) -> ScoringTask:
    return ScoringTask(tuple(prompt.tokens.tolist()), (prompt.question,), BLOCK)
