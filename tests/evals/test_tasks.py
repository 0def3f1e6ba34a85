"""Task prompts: the right length, with each piece of evidence once and at the right depth."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.errors import ConfigError, RequestError
from skim.evals.haystack import Haystack, insert
from skim.evals.room import SLACK, Room, Turns
from skim.evals.run import parse_modes, with_controls
from skim.evals.task import Draw, Sample, Task
from skim.evals.tasks import TASKS
from skim.evals.tasks.count import LEAD, Count
from skim.evals.tasks.evidence import Evidence
from skim.evals.tasks.needle import WORDINGS, Needle
from skim.evals.tasks.qa import QA, parse
from skim.evals.tasks.quote import Quote
from skim.evals.tasks.trace import Trace
from skim.evals.tasks.turns import TwoTurns
from skim.measure.book import packaged_text

DATA = (Path(__file__).parent / "questions.json").read_text()
NEEDLE = Needle(packaged_text())
ALL: list[tuple[Task, str]] = [
    (task, kind)
    for task in (
        NEEDLE,
        TwoTurns(packaged_text()),
        Trace(packaged_text()),
        Count(""),
        Quote(packaged_text()),
        QA(DATA),
        Evidence(packaged_text()),
    )
    for kind in task.kinds
    if kind not in ("agent", "summary")  # tests/evals/test_evidence.py
]


def count(text: str) -> int:
    """A token count that does not add up over pieces: four characters per token, rounded up."""
    return -(-len(text) // 4)


def count_prompt(turns: Turns) -> int:
    return 20 + sum(count("\n".join(parts)) + 8 for parts in turns)


def draw(task: Task, kind: str, *, context: int = 1500, seed: int = 0, depth: float | None = None) -> Sample:
    room = Room(context, count, count_prompt)
    return task.draw(Draw(random.Random(seed), number=seed % 4, seed=0, kind=kind, depth=depth, room=room))


@pytest.mark.parametrize(
    ("task", "kind"), ALL, ids=lambda value: value if isinstance(value, str) else value.name
)
@given(seed=st.integers(0, 2**32), context=st.integers(800, 1600))
@settings(max_examples=10)
def test_prompts_fill_the_context_and_contain_their_evidence_once(
    task: Task, kind: str, seed: int, context: int
) -> None:
    context = context // 8 + 250 if isinstance(task, QA) else context  # its file is small
    sample = draw(task, kind, context=context, seed=seed)
    replies = sample.max_tokens * len(sample.turns)
    assert context - SLACK <= count_prompt(sample.turns) + replies <= context
    document = sample.turns[0][0]
    for passage in sample.evidence:
        assert document.count(passage) == 1
    assert draw(task, kind, context=context, seed=seed) == sample
    assert task.grade(sample, " ".join(sample.expected))["score"] == 1
    assert task.grade(sample, "I do not know.")["score"] < 0.2


@given(
    seed=st.integers(0, 2**32),
    depth=st.floats(0, 1),
    kind=st.sampled_from(Needle.deep_kinds + Quote.deep_kinds),
)
@settings(max_examples=40)
def test_the_answer_is_at_the_requested_depth(seed: int, depth: float, kind: str) -> None:
    task = NEEDLE if kind in Needle.kinds else Quote(packaged_text())
    sample = draw(task, kind, seed=seed, depth=depth)
    document = sample.turns[0][0]
    longest = max(len(sentence) for sentence in Haystack(document).sentences)
    place = document.index(sample.evidence[0])
    others = 64 * WORDINGS[kind].others if kind in WORDINGS else 64
    assert abs(place - depth * (len(document) - len(sample.evidence[0]))) <= longest / 2 + others + 64


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(0.0, "F A. B. C."), (0.4, "A. F B. C."), (0.6, "A. B. F C."), (0.8, "A. B. F C."), (1.0, "A. B. C. F")],
)
def test_facts_are_inserted_between_sentences(depth: float, expected: str) -> None:
    assert insert(["A.", "B.", "C."], [(depth, "F")]) == expected


def test_facts_at_one_depth_keep_their_order() -> None:
    assert insert(["A."], [(1.0, "F"), (1.0, "G"), (0.0, "H")]) == "H A. F G"


@pytest.mark.parametrize("kind", WORDINGS)
def test_a_needle_has_as_many_facts_as_its_kind_says(kind: str) -> None:
    sample, wording = draw(NEEDLE, kind, context=2500), WORDINGS[kind]
    assert len(sample.expected) == len(sample.evidence) == wording.asked
    assert len(set(sample.expected)) == wording.asked
    begin = wording.fact.split("{")[0]
    assert sample.turns[0][0].count(begin) == wording.asked + wording.others


def test_the_answers_of_two_turns_are_far_apart() -> None:
    task = TwoTurns(packaged_text())
    for seed in range(20):
        [(document, _), (_,)] = draw(task, "same", context=4000, seed=seed).turns
        first, second = (at for at in range(len(document)) if document.startswith("The access code for", at))
        assert second - first > 0.2 * len(document)


def test_a_chain_is_assigned_in_order() -> None:
    sample = draw(Trace(packaged_text()), "decoy")
    document = sample.turns[0][0]
    places = [document.index(line) for line in sample.evidence]
    assert places == sorted(places)
    assert document.count("VAR ") == 2 * (1 + 4 * 2)  # the first line names one variable, the others two
    assert sample.evidence[1] == f"VAR {sample.expected[1]} = VAR {sample.expected[0]}."


def test_the_three_most_frequent_words_are_counted_in_the_list() -> None:
    sample = draw(Count(""), "words")
    words = sample.turns[0][0].removeprefix(LEAD).split()
    often = sorted(set(words), key=words.count, reverse=True)
    assert set(sample.expected) == set(often[:3])
    assert words.count(often[2]) > words.count(often[3])


def test_questions_are_each_asked_once_and_their_documents_are_whole() -> None:
    task = QA(DATA)
    items = {item.question: item for item in parse(DATA)}
    asked = set()
    for number in range(4):
        sample = draw(task, "distractors", context=400, seed=number)
        document, question = sample.turns[0]
        item = items[question.removesuffix(" Answer with a few words only.")]
        asked.add(item.question)
        assert all(text in document for text in item.needed.values())
    assert len(asked) == 4
    with pytest.raises(RequestError, match="has 4 questions"):
        task.draw(Draw(random.Random(0), 4, 0, "distractors", None, Room(700, count, count_prompt)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "not JSON"),
        ("{}", "must be a list"),
        ("[]", "must be a list"),
        ('[{"question": "Q"}]', "question 0 is not in HotpotQA's format"),
        (
            json.dumps(
                [{"question": "Q", "answer": "A", "context": [["T", ["S."]]], "supporting_facts": []}]
            ),
            "no supporting fact",
        ),
    ],
)
def test_data_in_another_format_is_refused(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        QA(source)


def test_the_novel_is_unchanged() -> None:
    """Recorded tokens, figures and calibrations depend on every word of it."""
    digest = hashlib.sha256(packaged_text().encode()).hexdigest()
    assert digest == "b35a35f4173ae6e697c72b3a88d068dc9c7d0ad4f60625f385065bb6d234637a"


def test_contexts_too_long_or_too_short_for_the_source_are_refused() -> None:
    with pytest.raises(RequestError, match="source is too short to fill a context of 5000"):
        draw(Needle("One sentence. And another one."), "single", context=5000)
    with pytest.raises(RequestError, match="a context of 60 tokens is too short"):
        draw(NEEDLE, "single", context=60)
    with pytest.raises(RequestError, match="fewer than two sentences"):
        Needle("no end")


def test_different_seeds_give_different_samples() -> None:
    assert draw(NEEDLE, "single", seed=1) != draw(NEEDLE, "single", seed=2)


# -- modes


def test_every_sparse_mode_gets_its_controls_once() -> None:
    assert with_controls(["dense"]) == ["dense"]
    assert with_controls(["auto", "auto:0.1"]) == ["auto", "auto:0.1"]
    assert with_controls(["dense", "blend:0.1", "blend:0.1,follow_up=replan", "lexical:0.1"]) == [
        *("dense", "blend:0.1", "blend:0.1,follow_up=replan", "lexical:0.1", "random:0.1")
    ]
    assert with_controls(["self:600t,prefill_block_size=32"])[1:] == [
        *("lexical:600t,prefill_block_size=32", "random:600t,prefill_block_size=32")
    ]
    assert with_controls(["self,rescue_cap=0.5"])[1:] == ["lexical,rescue_cap=0.5", "random"]
    assert len(parse_modes(["blend"])) == 3
    assert len(parse_modes(["blend"], controls=False)) == 1
    with pytest.raises(ConfigError, match="twice"):
        parse_modes(["dense", "dense"])


def test_every_task_describes_itself() -> None:
    for name, task in TASKS.items():
        assert task.name == name
        assert task.help
        assert set(task.default_kinds) <= set(task.kinds)
        assert set(task.deep_kinds) <= set(task.kinds)
