"""Scoring without a model: shared words, the rescue of rare tokens, random scores."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped]
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skim.models.shapes import word_tokenizer
from skim.prefill.rescue import rescue as rescue_in_slices
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scorers.random import RandomScorer
from skim.prefill.scoring.decoding import Decode, decoder_of, starts_of
from skim.prefill.scoring.scorer import Scorer, ScoringTask, run_to_completion
from skim.prefill.scoring.words import WordStarts, stem, words_of
from tests import tiny

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


class Words:
    """A tokenizer with one token per word."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.known += [word for word in text.split() if word not in self.known]
        return [self.known.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.known[i] for i in ids)


def each(decode: Callable[[list[int]], str]) -> Decode:
    """Decode many runs of tokens with a tokenizer's `decode`."""
    return lambda runs: [decode(run.tolist()) for run in runs]


def score(
    tokens: list[int],
    question: range,
    block_size: int,
    decode: Callable[[list[int]], str],
    starts: WordStarts | None = None,
) -> list[float]:
    scorer = LexicalScorer(each(decode), lambda: starts, least=0)
    return run(scorer.score(ScoringTask(tuple(tokens), (question,), block_size)))[0]


def scores_of(body: str, question: str, block_size: int = 8) -> list[float]:
    """Scores of the body's blocks. The question follows the body."""
    words = Words()
    tokens, asked = words.encode(body), words.encode(question)
    found = score([*tokens, *asked], range(len(tokens), len(tokens) + len(asked)), block_size, words.decode)
    return found[: -(-len(tokens) // block_size)]


def run(work: Generator[None, None, list[float]]) -> tuple[list[float], int]:
    """The scores, and the number of yields."""
    yields = 0
    while True:
        try:
            next(work)
            yields += 1
        except StopIteration as done:
            return done.value, yields


def ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda block: (-scores[block], block))


# -- words


def test_words_are_lower_case_runs_of_letters_and_digits() -> None:
    found = words_of("The Oslo_office's Zürich-16979, ÉTÉ")
    assert found == ["the", "oslo", "office", "s", "zürich", "16979", "été"]
    assert words_of("鍵はX7箱") == ["鍵", "は", "x7", "箱"]


@pytest.mark.parametrize(
    "forms",
    [
        ("office", "offices"),
        ("open", "opens", "opened", "opening"),
        ("code", "codes", "coded", "coding"),
        ("story", "stories"),
        ("run", "runs", "running"),
        ("quick", "quickly"),
        ("branch", "branches"),
    ],
)
def test_forms_of_a_word_have_one_stem(forms: tuple[str, ...]) -> None:
    assert len({stem(form) for form in forms}) == 1


@pytest.mark.parametrize("word", ["access", "bus", "basis", "ring", "red", "16979", "v2s", "x86es"])
def test_other_words_are_their_own_stem(word: str) -> None:
    assert stem(word) == word


def test_function_words_have_no_stem() -> None:
    stems = [stem(word) for word in words_of("What is the code of your office?")]
    assert stems == ["", "", "", "cod", "", "", "offic"]


# -- scores


def test_the_block_that_shares_the_questions_words_ranks_first() -> None:
    body = "a b c d e f g h the tide is low in the harbour now i j k l m n o p"
    scores = scores_of(body, "When is low tide in the harbour?")
    assert ranking(scores)[0] == 1
    assert scores[1] > 0


def test_a_rare_name_outweighs_several_common_words() -> None:
    filler = "x1 x2 x3 x4 x5 x6 x7 x8 "
    blocks = [filler] * 60
    blocks[3:50:6] = ["number y1 doors y2 open y3 y4 y5 "] * 8
    blocks[56] = "y1 y2 oslo y3 y4 y5 y6 y7 "
    scores = scores_of("".join(blocks), "Which number opens the door at the Oslo branch?")
    assert ranking(scores)[0] == 56


def test_adjacent_words_count_more_than_the_same_words_apart() -> None:
    filler = "x1 x2 x3 x4 x5 x6 x7 x8 "
    body = f"{filler}access y code {filler[9:]}{filler * 3}access code z {filler[9:]}{filler}"
    scores = scores_of(body, "the access code")
    assert scores[5] > 1.5 * scores[1] > 0


def test_common_words_weigh_little() -> None:
    body = "said a1 a2 a3 a4 a5 a6 a7 " * 10 + "said whale a2 a3 a4 a5 a6 a7"
    scores = scores_of(body, "said whale")
    assert scores[10] > 20 * scores[3] > 0


def test_both_halves_of_a_sentence_cut_by_an_edge_score() -> None:
    """The answer is in the second half, all words of the question are in the first."""
    filler = "x1 x2 x3 x4 x5 x6 x7 x8 "
    body = f"{filler * 4}y y y y the access code of Oslo is 16979 . y y y y {filler * 4}"
    scores = scores_of(body, "Which access code has Oslo?")
    assert ranking(scores)[:2] == [4, 5]
    assert scores[5] > 0.2 * scores[4]
    assert scores[7] == 0


@pytest.mark.parametrize("shift", range(9))
def test_a_word_cut_by_an_edge_is_found_on_both_sides(shift: int) -> None:
    tokenizer = tiny.tokenizer()
    body = "." * (64 - shift) + "lighthouse" + "." * 118
    tokens = tokenizer.encode(body + "lighthouses?", add_special_tokens=False)
    scores = score(tokens, range(len(body), len(tokens)), 32, tokenizer.decode)
    assert scores[1] > 0
    assert scores[2] > 0
    assert scores[4] == 0
    if shift:
        assert scores[1] == scores[2]


def test_words_of_two_blocks_are_joined_only_into_a_word_of_the_question() -> None:
    """A decoder that drops leading spaces joins the words at every block edge."""
    body = "a b c d e f g low tide i j k l m n o"
    assert scores_of(body, "low")[0] > scores_of(body, "low")[1] > 0
    assert scores_of(body, "lowtide")[0] == scores_of(body, "lowtide")[1] > 0
    assert scores_of(body, "owtid") == [0.0, 0.0]


def test_words_of_the_question_itself_do_not_score() -> None:
    words = Words()
    before, asked, after = words.encode("a b c d e f"), words.encode("low tide ?"), words.encode("g h i")
    tokens = [*before, *asked, *after]
    assert score(tokens, range(6, 9), 4, words.decode) == [0.0, 0.0, 0.0]
    tokens = [*before[:4], *words.encode("tide z"), *asked, *after]
    found = score(tokens, range(6, 9), 4, words.decode)
    assert found[1] == max(found) > 0


def test_a_question_of_function_words_gives_zero_scores() -> None:
    assert scores_of("the tide is what it was", "What is it?") == [0.0]


@given(IDS, st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_scores_are_finite_and_one_per_block(
    ids: list[int], start: int, length: int, block_size: int
) -> None:
    names = ["tide", "tides", "the", "16979", "?", "鍵", "は", "low", " ", "🎉"]
    question = range(min(start, len(ids)), min(start + length, len(ids)))
    found = score(ids, question, block_size, lambda part: " ".join(names[i] for i in part))
    assert len(found) == -(-len(ids) // block_size)
    assert all(math.isfinite(value) and value >= 0 for value in found)


def test_the_scorer_yields_between_slices_and_scores_only_candidates() -> None:
    words = Words()
    body, asked = words.encode("low tide x y " * 600), words.encode("low tide")
    task = ScoringTask((*body, *asked), (range(2400, 2402),), 4)
    scorer: Scorer = LexicalScorer(each(words.decode))
    scores, yields = run(scorer.score(task))
    assert scores == score(task.tokens, range(2400, 2402), 4, words.decode)
    assert yields >= 2
    some, _ = run(scorer.score(ScoringTask(task.tokens, task.question, 4, candidates=(0, 7))))
    assert {block for block, value in enumerate(some) if value} == {0, 7}
    assert some[7] == scores[7]


def plain_scores(
    tokens: list[int], question: range, block_size: int, decode: Callable[[list[int]], str]
) -> list[float]:
    """Reference for the lexical scorer: split every text into words and look at every word."""
    asked = [
        root for word in words_of(decode(tokens[question.start : question.stop])) if (root := stem(word))
    ]
    query = {*asked, *pairwise(asked)}
    texts = []
    for start in range(0, len(tokens), block_size):
        places = range(start, min(start + block_size, len(tokens)))
        parts = [
            [tokens[p] for p in places if p < question.start],
            [tokens[p] for p in places if p >= question.stop],
        ]
        if not question:
            parts = [[tokens[p] for p in places]]
        texts.append("\n".join(decode(part) for part in parts if part))
    words = [words_of(text) for text in texts]
    for (left, first), (right, second) in pairwise(zip(texts, words, strict=True)):
        if first and second and left[-1].isalnum() and right[0].isalnum():
            whole = first[-1] + second[0]
            if stem(whole) in query:
                first[-1] = second[0] = whole
    weights: list[dict[Any, float]] = [defaultdict(float) for _ in texts]
    spread: Counter[Any] = Counter()
    before = ""
    for block, raw in enumerate(words):
        content = [root for word in raw if (root := stem(word))]
        own = set()
        for place, word in enumerate(content):
            for term in (word, (before, word)):
                if term in query:
                    own.add(term)
                    weights[block][term] += 1
                    if place < 8 and block > 0:
                        weights[block - 1][term] += 0.5
                    if place >= len(content) - 8 and block + 1 < len(weights):
                        weights[block + 1][term] += 0.5
            before = word
        spread.update(own)
    count = len(texts)
    value = {term: math.log(1 + (count - n + 0.5) / (n + 0.5)) ** 2 for term, n in spread.items()}
    return [math.fsum(value[t] * w * 2.2 / (w + 1.2) for t, w in own.items()) for own in weights]


PIECES = [
    *("tide", "tides", " tide", "low", " lows", "er", "ing", "ed", "the", " the", " story", "stor", "ies"),
    *(
        "y",
        " y",
        "s",
        "e",
        " x7",
        "16",
        "979",
        ".",
        "\n",
        "_",
        "\u9375",
        "\u306f",
        "\u0130",
        "ab\u0130",
        " ab",
        "\u03a3",
        "\U0001f389",
    ),
    *(" lighthouse", "light", "house", "l", " l", "TIDE", " St", "\u00c9t\u00e9"),
]


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=80),
    st.integers(0, 80),
    st.integers(0, 30),
    st.integers(1, 9),
    st.booleans(),
)
def test_skipping_texts_does_not_change_the_scores(
    ids: list[int], start: int, length: int, block_size: int, spaced: bool
) -> None:
    """Exactly the reference scores, for words cut by edges, in several pieces, in other forms and scripts."""

    def decode(run: list[int]) -> str:
        return (" " if spaced else "").join(PIECES[token] for token in run)

    question = range(min(start, len(ids)), min(start + length, len(ids)))
    expected = plain_scores(ids, question, block_size, decode)
    assert score(ids, question, block_size, decode) == expected
    assert score(ids, question, block_size, decode, WordStarts(PIECES)) == expected


BYTES = tiny.tokenizer()


@given(
    st.text("ab c1_.\u00e9\u0130\u03a3\u9375\U0001f389", max_size=120),
    st.integers(0, 120),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_tokens_that_are_parts_of_characters_may_begin_any_word(
    text: str, start: int, length: int, block_size: int
) -> None:
    ids = BYTES(text, add_special_tokens=False)["input_ids"] or [97]
    question = range(min(start, len(ids)), min(start + length, len(ids)))
    starts = starts_of(BYTES)
    assert starts is not None
    expected = plain_scores(ids, question, block_size, BYTES.decode)
    assert score(ids, question, block_size, BYTES.decode, starts) == expected


def test_word_starts_finds_only_places_that_may_begin_a_wanted_word() -> None:
    def places(work: Generator[None, None, np.ndarray]) -> list[int]:
        return run_to_completion(work).tolist()  # type: ignore[no-any-return]

    starts = WordStarts([" tide", "ti", "de", " time", "de.", ".x.tides", None, "\u03a3", "", "TI"])
    wanted = ["tide"]
    assert places(starts.find(np.array([3, 2, 0, 3, 1, 2, 1, 3, 5, 6, 7, 8]), wanted)) == [2, 4, 8, 9, 10]
    assert places(starts.find(np.array([9, 4, 9, 8, 4, 9, 6, 9]), wanted)) == [0, 2, 5, 6]
    assert places(starts.find(np.array([3, 3, 10]), wanted)) == [0, 1, 2]  # beyond the vocabulary
    assert places(starts.find(np.array([], dtype=np.int64), wanted)) == []
    assert places(starts.find(np.array([0, 3]), [])) == []


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 4000])
def test_words_may_have_any_length(cut: int) -> None:
    name = "".join(random.Random(0).choices("abcdefgh0123456789", k=5000))
    pieces = [name[:cut], name[cut:], " x", f" {name}"]
    tokens = [2, 2, 2, 0, 1, 2, 2, 2, 3]

    def decode(run: list[int]) -> str:
        return "".join(pieces[token] for token in run)

    found = score(tokens, range(8, 9), 1, decode)
    assert found == plain_scores(tokens, range(8, 9), 1, decode)
    assert min(found[3], found[4]) > 0


def test_a_word_in_three_blocks_is_joined() -> None:
    pieces = ["light", "house", "s", " x", " lighthouse"]
    tokens = [3, 3, 3, 0, 1, 2, 3, 3, 3, 4]

    def decode(run: list[int]) -> str:
        return "".join(pieces[token] for token in run)

    found = score(tokens, range(9, 10), 1, decode)
    assert found == plain_scores(tokens, range(9, 10), 1, decode)
    assert min(found[3:6]) > max(found[0], found[8])


# -- rescue


def rescue(*args: Any, **kwargs: Any) -> list[int]:
    return run_to_completion(rescue_in_slices(*args, **kwargs))


def test_two_rare_tokens_of_the_question_rescue_a_block() -> None:
    body = [*[1] * 8, 50, 1, 1, 51, *[1] * 4, 50, *[1] * 7]
    assert rescue([*body, 50, 51, 1], [range(24, 27)], 8) == [1]


def test_tokens_that_are_not_rare_rescue_nothing() -> None:
    body = [*[50, 51, 1, 1] * 5, *[1] * 12]
    assert rescue([*body, 50, 2, 51], [range(32, 35)], 8) == []
    assert rescue([*body[:16], *[1] * 16, 50, 2, 51], [range(32, 35)], 8) == [0, 1]


def test_a_run_of_the_question_rescues_the_blocks_it_touches() -> None:
    common = [1, 2, 3, 4, 9] * 3 + [4, 3, 2, 1, 9] * 3
    body = [*common, *[9] * 8, 4, 1, 3, 2, *[9] * 20]
    question = [7, 4, 1, 3, 2, 7]
    assert rescue([*body, *question], [range(len(body), len(body) + 6)], 8) == [4, 5]


def test_a_run_that_is_found_too_often_rescues_nothing() -> None:
    run_of_four, filler = [4, 1, 3, 2], [9, 9, 9, 9]
    for times, found in ((8, [0, 1, 2, 3, 4, 5, 6, 7]), (9, [])):
        body = (run_of_four + filler) * times
        assert rescue([*body, *run_of_four], [range(len(body), len(body) + 4)], 8) == found


def test_the_block_with_the_rarest_tokens_comes_first() -> None:
    body = [*[1] * 8, 60, 61, *[1] * 6, 50, 51, *[1] * 6, 60, 61, *[1] * 6]
    assert rescue([*body, 50, 0, 51, 60, 0, 61], [range(32, 38)], 8) == [2, 1, 3]


def test_two_different_rare_tokens_rank_above_one_that_occurs_twice() -> None:
    body = [50, 50, *[1] * 6, 60, 61, *[1] * 6, 60, *[1] * 7, 60, *[1] * 7, 61, *[1] * 7, 61, *[1] * 7]
    assert rescue([*body, 50, 0, 60, 0, 61], [range(48, 53)], 8) == [1, 0]


def test_rare_tokens_near_an_edge_also_rescue_the_neighbour_block() -> None:
    body = [*[1] * 12, 50, 1, 1, 51, *[1] * 16]
    for edge, found in ((0, [1]), (1, [1, 2]), (4, [1, 2])):
        assert rescue([*body, 50, 51, 1], [range(32, 35)], 8, edge=edge) == found


@given(IDS, st.integers(0, 60), st.integers(0, 12), st.integers(1, 9), st.integers(0, 2))
def test_rescue_agrees_with_its_definition(
    ids: list[int], start: int, length: int, block_size: int, edge: int
) -> None:
    question = range(min(start, len(ids)), min(start + length, len(ids)))
    asked = ids[question.start : question.stop]
    body = [i for i in range(len(ids)) if i not in question]
    times = {token: sum(ids[i] == token for i in body) for token in set(asked)}
    rare = [i for i in body if ids[i] in times and times[ids[i]] <= 2]
    hits = [i // block_size for i in rare]
    near = [i for i in rare if hits.count(i // block_size) >= 2]
    expected = {j // block_size for i in near for j in (i - edge, i, i + edge) if j >= 0}
    expected &= set(range(-(-len(ids) // block_size)))
    for gram in {tuple(asked[i : i + 3]) for i in range(len(asked) - 2)}:
        starts = [
            i for i in body if tuple(ids[i : i + 3]) == gram and not set(range(i, i + 3)) & set(question)
        ]
        if len(starts) <= 2:
            expected |= {(i + j) // block_size for i in starts for j in range(3)}
    found = rescue(ids, [question], block_size, rare=2, hits=2, gram=3, common=2, edge=edge)
    assert len(found) == len(set(found))
    if block_size > 1:  # a run then touches only the blocks of its ends
        assert set(found) == expected
    else:
        assert set(found) <= expected


# -- random scores


def test_random_scores_depend_only_on_seed_and_prompt() -> None:
    task, other = (
        ScoringTask(tuple(range(100)), (range(90, 100),), 8),
        ScoringTask((7,) * 100, (range(90, 100),), 8),
    )
    scorer: Scorer = RandomScorer(seed=1)
    scores, _ = run(scorer.score(task))
    assert len(scores) == 13
    assert all(0 <= value < 1 for value in scores)
    assert run(RandomScorer(seed=1).score(task))[0] == scores
    assert run(RandomScorer(seed=2).score(task))[0] != scores
    assert run(scorer.score(other))[0] != scores
    some, _ = run(scorer.score(ScoringTask(task.tokens, task.question, 8, candidates=(3, 5))))
    assert some == [value if block in (3, 5) else 0.0 for block, value in enumerate(scores)]


# -- natural text

NEEDLES = {
    "asked plainly": (
        "The access code for the {} office is {}.",
        "What is the access code for the {} office?",
    ),
    "asked in other words": (
        "The access code for the {} office is {}.",
        "Which number opens the door at the {} branch?",
    ),
    "hidden in a sentence": (
        "Marta left the tide chart of the {} office in locker {}.",
        "Where can I find the tide charts from {}?",
    ),
}
CITIES = ["Oslo", "Lima", "Cairo", "Dublin", "Hanoi", "Quito", "Riga", "Seoul", "Tunis"]


@pytest.fixture(scope="module")
def real(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def manual(real: Any) -> list[int]:
    """Tokens of Python's language reference."""
    return real("\n".join(topics.values()), add_special_tokens=False, verbose=False)["input_ids"]


def haystack(real: Any, text: list[int], kind: str, size: int, seed: int) -> tuple[list[int], range, range]:
    """A prompt with one needle per city, the span of the needle asked for, and the question's span."""
    draw = random.Random(f"{kind} {seed}")
    needle, question = NEEDLES[kind]
    cities, wanted = draw.sample(CITIES, 4), draw.randrange(4)
    offset = draw.randrange(len(text) - size)
    body, answer = text[offset : offset + size], range(0)
    for index, place in reversed(list(enumerate(sorted(draw.sample(range(200, size - 200), 4))))):
        told = " " + needle.format(cities[index], draw.randrange(10000, 99999))
        ids = real(told, add_special_tokens=False)["input_ids"]
        body[place:place] = ids
        answer = range(answer.start + len(ids), answer.stop + len(ids))
        if index == wanted:
            answer = range(place, place + len(ids))
    ask = real("\n\n" + question.format(cities[wanted]), add_special_tokens=False)["input_ids"]
    return [*body, *ask], answer, range(len(body), len(body) + len(ask))


@pytest.mark.parametrize("kind", NEEDLES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_every_part_of_the_needle_ranks_high_in_natural_text(
    real: Any, manual: list[int], kind: str, block_size: int
) -> None:
    for seed in range(8):
        tokens, answer, question = haystack(real, manual, kind, 32_000, seed)
        order = ranking(score(tokens, question, block_size, real.decode))
        blocks = {token // block_size for token in answer}
        assert max(order.index(block) for block in blocks) < 0.05 * len(order)


@pytest.mark.parametrize("kind", NEEDLES)
def test_natural_text_has_the_reference_scores(real: Any, manual: list[int], kind: str) -> None:
    for seed in range(3):
        tokens, _, question = haystack(real, manual, kind, 8000, seed)
        expected = plain_scores(tokens, question, 64, real.decode)
        task = ScoringTask(tuple(tokens), (question,), 64)
        assert run(LexicalScorer(decoder_of(real)).score(task))[0] == expected
        assert (
            run(LexicalScorer(decoder_of(real), lambda: starts_of(real), least=0).score(task))[0] == expected
        )
        assert max(expected) > 0


# -- tokens to texts


def word_level(real: Any) -> Any:
    return word_tokenizer(1000)


def metaspace(real: Any) -> Any:
    """Writes spaces like SentencePiece and drops the first space of a text."""
    vocabulary = {
        "<unk>": 0,
        **{text: i + 1 for i, text in enumerate(["\u2581a", "b", "\u2581", "c\u2581d"])},
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def cleaning(real: Any) -> Any:
    """Removes the space before a punctuation mark."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, ".": 2, "b": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


@pytest.mark.parametrize(
    "make",
    [lambda real: real, lambda real: tiny.tokenizer(), word_level, metaspace, cleaning],
    ids=["smollm2", "bytes", "words", "metaspace", "cleaning"],
)
def test_decoding_many_runs_equals_decoding_each(real: Any, make: Callable[[Any], Any]) -> None:
    """Includes split characters, special tokens, and ids beyond the vocabulary."""
    tokenizer = make(real)
    decode = decoder_of(tokenizer)
    draw = random.Random(1)
    for beyond in (0, 3):
        runs = [
            np.array(
                [draw.randrange(len(tokenizer) + beyond) for _ in range(draw.randrange(40))], dtype=np.int64
            )
            for _ in range(300)
        ]
        assert decode(runs) == [tokenizer.decode(run.tolist(), skip_special_tokens=False) for run in runs]
    assert decode([]) == []


def test_a_text_cut_anywhere_is_decoded_like_the_tokenizer(real: Any) -> None:
    ids = np.array(
        real("na\u00efve caf\u00e9, \u65e5\u672c\u8a9e \U0001f642\U0001f642, <|im_start|>user\n\n\tx = 1")[
            "input_ids"
        ]
    )
    runs = [ids[a:b] for a in range(len(ids)) for b in range(a, len(ids) + 1)]
    assert decoder_of(real)(runs) == [real.decode(run.tolist()) for run in runs]


def test_a_long_prompt_is_scored_within_half_a_second(real: Any, manual: list[int]) -> None:
    tokens = [*(manual * 2)[:131_000], *real("Which number opens the door in Oslo?")["input_ids"]]
    task = ScoringTask(tuple(tokens), (range(131_000, len(tokens)),), 64)
    scorer = LexicalScorer(decoder_of(real), lambda: starts_of(real))
    start = time.process_time()
    run(scorer.score(task))
    rescue(task.ids, task.question, 64)
    assert time.process_time() - start < 0.5
