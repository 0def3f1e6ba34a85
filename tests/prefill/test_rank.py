"""Rankings: every document has its blocks, and the order of documents makes no difference."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim import LLM
from skim.errors import ConfigError, EngineError, RequestError
from skim.prefill.plan import DenseReason
from skim.prefill.rank import Ranking, lay_out, rank, ranking_of
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask, run_to_completion
from skim.registry import scorers
from tests import paths, tiny

DOCUMENTS = st.lists(st.lists(st.integers(1, 5), max_size=40).map(tuple), min_size=1, max_size=8)
QUERY = "What is the access code for the Oslo office?"
NEEDLE = "The access code for the Oslo office is 16979."


def laid_out(documents: Sequence[tuple[int, ...]], question: tuple[int, ...] = (7, 7)) -> Ranking:
    return lay_out(question, documents, scorer="given", block_size=8, first=100, filler=0)


class Given:
    """Scores each block by a function of its tokens."""

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        size, wanted = task.block_size, set(task.wanted.tolist())
        yield
        return [
            float(sum(task.tokens[b * size : (b + 1) * size])) if b in wanted else 0.0
            for b in range(task.blocks)
        ]


def ranked(ranking: Ranking, scorer: Scorer | None = None) -> list[float]:
    return run_to_completion(rank(ranking, lambda _: scorer or Given(), lambda: None))


@given(DOCUMENTS)
def test_each_document_has_blocks_of_its_own_and_no_other_block_is_scored(
    documents: list[tuple[int, ...]],
) -> None:
    ranking = laid_out(documents)
    task, size = ranking.task, ranking.task.block_size
    assert task.tokens[0] == 100
    for document, blocks in ranking.blocks.items():
        held = task.tokens[blocks.start * size : blocks.stop * size]
        assert held[: len(document)] == document
        assert set(held[len(document) :]) <= {0}
        assert len(held) - len(document) < size
        assert blocks.stop not in task.wanted  # the gap
    assert sorted(block for blocks in ranking.blocks.values() for block in blocks) == task.wanted.tolist()
    assert ranking.blocks.keys() == set(documents) - {()}
    [asked] = task.question
    assert task.tokens[asked.start :] == (7, 7)
    assert ranking.tokens == 2 + sum(map(len, documents))


@given(DOCUMENTS, st.randoms())
def test_relevances_do_not_depend_on_the_order_and_add_up_to_1(
    documents: list[tuple[int, ...]], rng: random.Random
) -> None:
    found = ranked(laid_out(documents))
    assert sum(found) == pytest.approx(1.0 if any(documents) else 0.0)
    assert all(
        (relevance > 0) == bool(document) for relevance, document in zip(found, documents, strict=True)
    )
    order = list(range(len(documents)))
    rng.shuffle(order)
    assert ranked(laid_out([documents[i] for i in order])) == [found[i] for i in order]


def test_a_document_is_as_good_as_its_best_block() -> None:
    poor, rich = (1,) * 24, (*(0,) * 16, 5, 5)
    assert ranked(laid_out([poor, rich, ()])) == pytest.approx([8 / 18, 10 / 18, 0])


@pytest.mark.parametrize("length", [0, 257])
def test_a_query_that_scorers_cannot_read_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match=f"the query has {length} tokens") as caught:
        laid_out([(1,)], question=(7,) * length)
    assert caught.value.fields == ("query",)


class Failing:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        yield
        if self.error is not None:
            raise self.error
        return [float("nan")] * task.blocks


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("boom"), EngineError, "'given' failed: boom"),
        (ConfigError("no drafter"), RequestError, "cannot be used: no drafter"),
        (ScoringError("1452 tokens", DenseReason.SCORER_WINDOW), RequestError, "1452 tokens"),
        (None, EngineError, "not finite"),
    ],
)
def test_a_scorer_that_fails_is_an_error(error: Exception | None, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ranked(laid_out([(1, 2)]), Failing(error))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Generator[LLM, None, None]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


def passages(seed: int, count: int = 6) -> list[str]:
    rng = random.Random(seed)
    starts = [rng.randrange(len(paths.BOOK) - 300) for _ in range(count)]
    return [NEEDLE, *(paths.BOOK[at : at + rng.randrange(20, 300)] for at in starts), "", NEEDLE]


def relevances(llm: LLM, documents: Sequence[str], scorer: str, budget: float = 1.0) -> list[float]:
    ranking = ranking_of(
        lambda text: llm.encode(text, add_special_tokens=False),
        256,
        QUERY,
        documents,
        scorer=scorer,
        block_size=32,
        scoring_budget=budget,
    )
    return llm.engine.rank(ranking).result(60)


@pytest.mark.parametrize("budget", [1.0, 0.01])
@pytest.mark.parametrize("scorer", scorers())
def test_every_scorer_ranks_documents_the_same_in_any_order(llm: LLM, scorer: str, budget: float) -> None:
    documents = passages(1, count=3)
    found = relevances(llm, documents, scorer, budget)
    order = random.Random(2).sample(range(len(documents)), len(documents))
    assert relevances(llm, [documents[i] for i in order], scorer, budget) == [found[i] for i in order]
    assert found[0] == found[-1]  # equal documents
    assert found[-2] == 0.0  # an empty one
    assert sum(found) == pytest.approx(1.0)


@pytest.mark.parametrize("scorer", ["blend", "lexical"])
@pytest.mark.parametrize("seed", range(3))
def test_the_passage_with_the_query_s_words_is_first(llm: LLM, scorer: str, seed: int) -> None:
    documents = passages(seed)[1:]  # the needle is the last one
    found = relevances(llm, documents, scorer)
    assert max(range(len(found)), key=found.__getitem__) == len(documents) - 1


def test_a_cancelled_ranking_leaves_the_queue(llm: LLM) -> None:
    core = llm.engine.core
    started, plans = core._plan, core.lifecycle.plans
    core._plan = lambda _: False  # type: ignore[method-assign]  # no slice runs meanwhile
    try:
        ranking = laid_out([(1,) * 500])
        future = llm.engine.rank(ranking)
        llm.engine.reset_prefix_cache()  # runs after the command that adds it
        assert len(plans) == 1
        assert future.cancel()
        llm.engine.reset_prefix_cache()
        assert len(plans) == 0
    finally:
        core._plan = started  # type: ignore[method-assign]
