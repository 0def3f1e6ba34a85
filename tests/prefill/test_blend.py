"""The blend: attention over the whole prompt or a part chosen by words, plus words, plus links."""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from skim.prefill.scorers.blend import FARTHER, SPREAD, BlendScorer, narrow
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring.cost import Cost
from skim.prefill.scoring.scorer import ScoringError, ScoringTask, together
from tests import paths
from tests.prefill.small import Fixed, decode, drive, finish, ordered

BLOCK = 16
NO_LIMIT = Cost(1e-9, on_gpu=False)
HALF = Cost(1.0, on_gpu=False)  # with a budget of 0.5


@pytest.fixture(autouse=True)
def prompts_of_a_few_blocks_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skim.prefill.scoring.cost.CPU_LEAST", 1)


def prompt(blocks: int, *, asking: str = "the whale of Tranque", **options: Any) -> ScoringTask:
    """Blocks of natural text, then a question of less than a block."""
    text = paths.BOOK[20_000 : 20_000 + BLOCK * blocks].encode("latin-1", "replace").decode("latin-1")
    tokens = tuple((text + asking[:BLOCK]).encode("latin-1"))
    return ScoringTask(tokens, (range(BLOCK * blocks, len(tokens)),), BLOCK, **options)


def blend(found: Fixed, similar: Fixed | None = None, cost: Cost = NO_LIMIT) -> BlendScorer:
    alike = similar or Fixed([0.0] * len(found.scores))
    return BlendScorer(LexicalScorer(decode), alike, found, cost)


def test_a_prompt_that_can_be_paid_for_is_read_whole() -> None:
    attention = Fixed([1.0] * 11)
    drive(blend(attention), prompt(10, scoring_budget=0.5))
    assert attention.asked[0].candidates is None


@pytest.mark.parametrize(("budget", "blocks"), [(0.5, 5), (0.31, 3), (0.001, 1)])
def test_otherwise_words_choose_the_part_that_is_read(budget: float, blocks: int) -> None:
    similar, attention = Fixed([0.0, 5.0, 1.0, 9.0, 2.0, 3.0, 0.5, 0.1, 0.2, 0.0, 0.0]), Fixed([1.0] * 11)
    task = prompt(10, asking="zzzzzzzz", scoring_budget=budget)
    drive(blend(attention, similar, HALF), task)
    read = attention.asked[0].candidates or ()
    assert len(read) == blocks
    assert read == tuple(narrow(task, np.array(similar.scores) / 20.8, int(budget * len(task.tokens))))


def test_blocks_that_were_read_are_ranked_by_attention_and_the_others_by_words() -> None:
    similar = Fixed([0.0, 5.0, 1.0, 9.0, 5.0, 3.0, 0.5, 0.1, 0.2, 0.0, 0.0])
    attention = Fixed([9.0, 0.1, 8.0, 0.2, 0.8, 0.01, 6.0, 5.0, 4.0, 3.0, 0.0])
    task = prompt(10, asking="zzzzzzzz", scoring_budget=0.31)  # three blocks
    scores = drive(blend(attention, similar, HALF), task)
    read = attention.asked[0].candidates or ()
    assert read == (2, 3, 4)  # the best, and its neighbours before farther blocks with lower scores
    assert ordered(scores)[:3] == [2, 4, 3]
    assert ordered(scores)[3:5] == [1, 5]
    assert min(scores[block] for block in read) > max(s for b, s in enumerate(scores) if b not in read)


@pytest.mark.parametrize("seed", range(20))
def test_any_scores_make_a_blend(seed: int) -> None:
    """Finite, not negative, the same twice; blocks that were read come before the others."""
    rng = random.Random(seed)
    blocks = rng.randrange(1, 60)
    some = tuple(rng.sample(range(blocks), k=rng.randrange(1, blocks + 1)))
    task = prompt(
        blocks,
        scoring_budget=rng.choice([0.1, 0.5, 1.0]),
        hops=rng.choice([1, 2, 6]),
        candidates=rng.choice([None, some]),
    )

    def numbers(*choices: float) -> Fixed:
        return Fixed([rng.choice([*choices, rng.random()]) for _ in range(task.blocks)])

    attention, similar = numbers(1e-26, 1.0), numbers(0.0, 1e6)
    scorer = blend(attention, similar, Cost(rng.choice([0.5, 1.0, 3.0]), on_gpu=rng.random() < 0.2))
    scores = drive(scorer, task)
    assert len(scores) == task.blocks
    assert all(math.isfinite(score) and score >= 0 for score in scores)
    assert drive(scorer, task) == scores
    wanted = set(task.wanted.tolist())
    assert all(score == 0.0 for block, score in enumerate(scores) if block not in wanted)
    if task.hops == 1 and attention.asked[0].candidates is not None:
        read = set(attention.asked[0].candidates)
        unread = [scores[block] for block in wanted - read]
        assert min(scores[block] for block in read) > max(unread, default=0.0)


def test_words_and_similar_words_raise_a_block_and_lower_none() -> None:
    flat = [0.5] * 41
    alone = drive(blend(Fixed(flat)), prompt(40, asking="zzzzzzzz"))
    similar = [0.0] * 41
    similar[7] = 9.0
    both = drive(blend(Fixed(flat), Fixed(similar)), prompt(40, asking="zzzzzzzz"))
    assert ordered(both)[0] == 7
    shares = [score / sum(both) for score in both]
    assert shares[7] > alone[7] / sum(alone)
    assert np.allclose([one / both[0] for one in both[:7]], 1.0)


def test_calibrated_weights_of_words_apply_where_most_blocks_are_read() -> None:
    """A negative weight lowers a block with shared words. In a small part, words count for it."""
    flat = Fixed([0.5] * 41)
    task = prompt(40)
    shared = drive(LexicalScorer(decode), task)
    first = ordered(shared)[0]
    for cost, budget, is_last in ((NO_LIMIT, 1.0, True), (HALF, 0.2, False)):
        scorer = BlendScorer(LexicalScorer(decode), Fixed([0.0] * 41), flat, cost, words_of_most=(-1.0, 0.0))
        scores = drive(scorer, prompt(40, scoring_budget=budget))
        read = flat.asked[-1].candidates or range(40)
        assert (scores[first] == min(scores[block] for block in read)) == is_last
        assert (ordered(scores)[0] == first) != is_last


def test_without_any_attention_words_decide() -> None:
    similar = [float(block % 7) for block in range(21)]
    scores = drive(blend(Fixed([0.0] * 21), Fixed(similar)), prompt(20, asking="zzzzzzzz"))
    assert all(math.isfinite(score) and score > 0 for score in scores)
    best = {block for block in range(21) if block % 7 == 6}
    assert set(ordered(scores)[: len(best)]) == best


# Narrowing


@pytest.mark.parametrize("seed", range(10))
def test_narrowing_equals_a_reference_that_adds_one_block_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    task = prompt(rng.randrange(5, 60), asking="the whale of the sea"[: rng.randrange(1, 20)])
    scores = [rng.choice([0.0, 0.5, rng.random()]) for _ in range(task.blocks)]
    near = [
        max([scores[block], *(SPREAD * scores[b] for b in (block - 1, block + 1) if 0 <= b < task.blocks)])
        for block in range(task.blocks)
    ]
    golden = (math.sqrt(5) - 1) / 2
    left, expected = 200, []
    for block in sorted(range(task.blocks), key=lambda block: (-near[block], block * golden % 1.0)):
        places = range(block * BLOCK, min((block + 1) * BLOCK, len(task.tokens)))
        size = sum(not task.is_question[place] for place in places)
        left -= size
        if left < 0 and expected:
            break
        if size:
            expected.append(block)
    assert narrow(task, np.array(scores), 200).tolist() == sorted(expected)


def test_equal_scores_are_spread_over_the_prompt() -> None:
    chosen = narrow(prompt(100), np.zeros(101), 20 * BLOCK).tolist()
    assert len(chosen) == 20
    assert max(b - a for a, b in zip([0, *chosen], [*chosen, 99], strict=False)) <= 10


# Links


CHAIN = (
    "the medal of quorvale went to the smith called Zanthor",
    "in the spring that Zanthor moved to the hills of Brillsby",
    "some years ago the hall in Brillsby was painted by Ottomund",
)
PLACES = (40, 170, 95)
AGAIN = 120
SIZE = 64


def chain(hops: int, *, beside: float = 0.01, twice: bool = False) -> tuple[list[float], Counting]:
    """Scores of a long text with the chain in three places. Attention finds the first, and perhaps the block
    beside it, and nothing else. `twice`: the second place is repeated in another block."""
    rng = random.Random(1)
    words = ["sea", "wind", "mast", "rope", "sail", "deck", "crew", "salt", "wave", "tide", "gull", "hull"]
    blocks = [" ".join(rng.choice(words) for _ in range(20))[: SIZE - 2] + ". " for _ in range(220)]
    for place, fact in zip(PLACES, CHAIN, strict=True):
        blocks[place] = f"{fact}. {blocks[place]}"[: SIZE - 2] + ". "
    if twice:
        blocks[AGAIN] = blocks[PLACES[1]]
    text = "".join(blocks)
    assert all(fact in text for fact in CHAIN)
    question = "who got the medal of quorvale?"
    tokens = tuple((text + question).encode())
    task = ScoringTask(tokens, (range(len(text), len(tokens)),), SIZE, hops=hops)
    attention = [0.01] * task.blocks
    attention[PLACES[0]] = 1.0
    attention[PLACES[0] - 1] = beside
    scorer = Counting(decode)
    return drive(BlendScorer(scorer, Fixed([0.0] * task.blocks), Fixed(attention), NO_LIMIT), task), scorer


class Counting(LexicalScorer):
    """Records the words that it searched for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.searched: list[list[str]] = []

    def score_words(self, task: ScoringTask, words: Any) -> Generator[None, None, list[float]]:
        self.searched.append(sorted(words))
        return (yield from super().score_words(task, words))


def test_one_look_follows_no_link() -> None:
    scores, words = chain(hops=1)
    assert words.searched == []
    assert ordered(scores)[0] == PLACES[0]
    assert scores[PLACES[1]] == scores[PLACES[2]] == scores[200]


def test_a_second_look_follows_the_names_of_the_best_passage() -> None:
    scores, words = chain(hops=2)
    assert words.searched == [["zanthor"]]
    assert ordered(scores)[:2] == list(PLACES[:2])
    assert scores[PLACES[2]] == scores[200]


def test_further_looks_follow_a_chain_to_its_end() -> None:
    scores, words = chain(hops=6)
    assert words.searched == [["zanthor"], ["brillsby"], ["ottomund"]]
    assert ordered(scores)[:3] == list(PLACES)
    assert scores[PLACES[0]] > scores[PLACES[1]] > scores[PLACES[2]] > scores[200]


def test_a_passage_across_an_edge_leads_on_by_the_chance_of_both_blocks() -> None:
    scores, words = chain(hops=2, beside=20.0)
    assert scores[PLACES[0]] < 0.25 * sum(scores)
    assert words.searched == [["zanthor"]]
    assert PLACES[1] in ordered(scores)[:3]


def test_linked_blocks_rank_one_after_the_other() -> None:
    """Links that lead to many blocks leave room for others."""
    scores, _ = chain(hops=2, twice=True)
    assert ordered(scores)[0] == PLACES[0]
    assert set(ordered(scores)[1:3]) == {PLACES[1], AGAIN}
    assert scores[PLACES[1]] != scores[AGAIN]
    assert min(scores[PLACES[1]], scores[AGAIN]) == pytest.approx(
        max(scores[PLACES[1]], scores[AGAIN]) * math.exp(-FARTHER)
    )


def test_a_passage_that_is_not_certain_leads_nowhere() -> None:
    """Attention is spread over all blocks, or the best block shares no rare word with the question."""
    for peak, asking in ((0.01, "quorvale medal"), (1.0, "zzzzzzzz")):
        text = ("sea wind mast. " * 300)[: 40 * SIZE] + "medal of quorvale to Zanthor. ".ljust(SIZE)
        text += ("gull fish moon. " * 300)[: 60 * SIZE] + "then Zanthor slept. ".ljust(SIZE)
        tokens = tuple((text + asking).encode())
        task = ScoringTask(tokens, (range(len(text), len(tokens)),), SIZE, hops=6)
        attention = [0.01] * task.blocks
        attention[40] = peak
        words = Counting(decode)
        drive(BlendScorer(words, Fixed([0.0] * task.blocks), Fixed(attention), NO_LIMIT), task)
        assert words.searched == []


# Taking turns


class Slow:
    """Sliced work that records its slices and its end. Raises at the end if `fails`."""

    def __init__(self, name: str, slices: int, turns: list[str], fails: bool = False) -> None:
        self.name = name
        self._slices = slices
        self._turns = turns
        self._fails = fails

    def work(self) -> Generator[None, None, list[float]]:
        try:
            for _ in range(self._slices):
                self._turns.append(self.name)
                yield
            if self._fails:
                raise ScoringError("not today")
            return [float(self._slices)]
        finally:
            self._turns.append(f"{self.name} ends")


def both(*works: Slow) -> Generator[None, None, list[float]]:
    found = yield from together([one.work() for one in works])
    return [number for one in found for number in one]


def test_scorers_take_turns_until_each_is_done() -> None:
    turns: list[str] = []
    assert finish(both(Slow("a", 3, turns), Slow("b", 1, turns))) == ([3.0, 1.0], 4)
    assert turns == ["a", "b", "a", "b ends", "a", "a ends"]


def test_if_one_scorer_fails_the_others_are_closed() -> None:
    turns: list[str] = []
    with pytest.raises(ScoringError, match="not today"):
        finish(both(Slow("a", 5, turns), Slow("b", 1, turns, fails=True)))
    assert turns == ["a", "b", "a", "b ends", "a ends"]
