"""Rank documents for a question: a scorer ranks their blocks, and a document is as good as its best block.

The documents are laid out as one prompt, so any scorer can rank them. Their order makes no difference:

- Equal documents are laid out once, and the others are sorted by their tokens.
- A document begins at a prompt block and is padded to the end of its last one, so no block has two documents.
- The block after a document is a gap that no scorer reads: nothing spreads from one document to the next.

Of scores, only the order and the shares of the sum have a meaning (see `Scorer`). So a relevance is the share
of a document's best block in the sum of all best blocks, and the relevances of one ranking add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skim.errors import ConfigError, EngineError, RequestError
from skim.prefill.anatomy import QUESTION_TOKENS
from skim.prefill.plan import DenseReason
from skim.prefill.scoring.scorer import SLICE_SECONDS, Scorer, ScoringError, ScoringTask
from skim.prefill.select import block_size_of

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ranking:
    """Documents to rank: one prompt, and the blocks of each document that has any tokens."""

    documents: Sequence[Tokens]  # in the caller's order
    scorer: str
    task: ScoringTask
    blocks: Mapping[Tokens, range]

    @property
    def tokens(self) -> int:
        """Tokens of the question and all documents."""
        return len(self.task.question[0]) + sum(map(len, self.documents))

    def relevances(self, scores: Sequence[float]) -> list[float]:
        """One number per document, in the caller's order, from the scores of all blocks."""
        best = {document: max(scores[run.start : run.stop]) for document, run in self.blocks.items()}
        total = sum(best.get(document, 0.0) for document in sorted(self.documents))
        return [best.get(document, 0.0) / total if total > 0 else 0.0 for document in self.documents]


def lay_out(
    question: Tokens,
    documents: Sequence[Tokens],
    *,
    scorer: str,
    block_size: int,
    first: int,  # the token that models rest their attention on, such as the beginning of a text
    filler: int,  # a token that says nothing, such as a newline
    scoring_budget: float = 1.0,
) -> Ranking:
    """Lay documents out as one prompt. Raises RequestError for a question that no scorer reads."""
    if not 0 < len(question) <= QUESTION_TOKENS:
        raise RequestError(
            f"the query has {len(question)} tokens, and scorers read queries of 1 to {QUESTION_TOKENS}; "
            "shorten it",
            fields="query",
        )
    size = block_size_of(2 * sum(map(len, documents)), block_size)
    tokens = [first, *(size - 1) * [filler]]
    blocks: dict[Tokens, range] = {}
    for document in sorted(set(documents) - {()}):
        count = -(-len(document) // size)
        begin = len(tokens) // size
        blocks[document] = range(begin, begin + count)
        tokens += document
        tokens += ((count + 1) * size - len(document)) * [filler]
    asked = range(len(tokens), len(tokens) + len(question))
    tokens += question
    wanted = tuple(block for run in blocks.values() for block in run)
    task = ScoringTask(tuple(tokens), (asked,), size, candidates=wanted, scoring_budget=scoring_budget)
    return Ranking(documents, scorer, task.with_ids(np.array(tokens, dtype=np.int64)), blocks)


def ranking_of(
    encode: Callable[[str], Tokens],  # without special tokens
    first: int | None,
    query: str,
    documents: Sequence[str],
    *,
    scorer: str,
    block_size: int,
    scoring_budget: float = 1.0,
    most_per_document: int | None = None,  # tokens; the rest of a document is not read
) -> Ranking:
    """Encode a query and documents, and lay them out. `first` is the token that begins texts, if any."""
    filler = encode("\n")[-1]
    return lay_out(
        encode(query),
        [encode(text)[:most_per_document] for text in documents],
        scorer=scorer,
        block_size=block_size,
        first=filler if first is None else first,
        filler=filler,
        scoring_budget=scoring_budget,
    )


def rank(
    ranking: Ranking,
    scorers: Callable[[str], Scorer],
    hand_over: Callable[[], None],
    slice_seconds: float = SLICE_SECONDS,
) -> Generator[None, None, list[float]]:
    """The documents' relevances, in slices. Raises EngineError if the scorer fails."""
    if not ranking.blocks:
        return ranking.relevances(())
    task = ranking.task.scheduled(slice_seconds, hand_over)
    try:
        scores = yield from scorers(ranking.scorer).score(task)
    except ConfigError as error:
        raise RequestError(f"the scorer {ranking.scorer!r} cannot be used: {error}") from error
    except Exception as error:
        if isinstance(error, ScoringError) and error.reason is DenseReason.SCORER_WINDOW:
            raise RequestError(str(error), fields="documents") from error
        raise EngineError(f"the scorer {ranking.scorer!r} failed: {error}") from error
    if len(scores) != task.blocks or not np.isfinite(np.array(scores, dtype=np.float64)).all():
        raise EngineError(f"{ranking.scorer} gave scores that are not finite, or not one per block")
    return ranking.relevances(scores)
