"""The question is found wherever it stands, and material is not taken for instructions."""

from __future__ import annotations

import random
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.prefill.phrases import Saying, saying_of, sentences
from skim.prefill.question import Question, Survey, choose, survey

QUESTION = "What is the access code for the Oslo office?"
FORM = 'Answer in one short sentence.\nUse only the text above.\nReply as JSON: {"answer": "..."}'
NOTHING = Survey()


def paragraphs(count: int, seed: int = 0) -> list[str]:
    """Paragraphs of 300 to 2,500 characters that neither ask nor instruct."""
    draw = random.Random(seed)
    words = (
        "ship",
        "sea",
        "mast",
        "wind",
        "crew",
        "sailed",
        "carried",
        "over",
        "cold",
        "grey",
        "port",
        "salt",
    )
    made = []
    for _ in range(count):
        lines = [" ".join(draw.choices(words, k=draw.randint(5, 14))) for _ in range(draw.randint(6, 30))]
        made.append(" ".join(f"The {line}." for line in lines))
    return made


DOCUMENT = "\n\n".join(paragraphs(20))
LINE = DOCUMENT.replace("\n\n", " ")


def parts_of(*texts: str) -> tuple[str, list[range]]:
    """Parts joined by newlines, and their places."""
    places, end = [], 0
    for text in texts:
        places.append(range(end, end + len(text)))
        end += len(text) + 1
    return "\n".join(texts), places


def found(text: str, parts: list[range] | None = None, *, system: str = "", earlier: str = "") -> list[str]:
    """The sentences of the question."""
    chosen = choose(
        survey(text, parts or ()),
        survey(system) if system else NOTHING,
        survey(earlier) if earlier else NOTHING,
    )
    groups = ((text, chosen.own), (system, chosen.system), (earlier, chosen.earlier))
    return [whole[one.chars.start : one.chars.stop] for whole, said in groups for one in said]


def tagged(text: str, tag: str = "document") -> str:
    return f"<{tag}>\n{text}\n</{tag}>"


LAYOUTS = {
    "last": f"{DOCUMENT}\n\n{QUESTION}",
    "first": f"{QUESTION}\n\n{DOCUMENT}",
    "on the last line": f"{DOCUMENT}\n{QUESTION}",
    "on the first line": f"{QUESTION}\n{DOCUMENT}",
    "the last sentence": f"{LINE} {QUESTION}",
    "the first sentence": f"{QUESTION} {LINE}",
    "first, with a tagged document": f"{QUESTION}\n\n{tagged(DOCUMENT)}",
    "last, with a tagged document": f"{tagged(DOCUMENT, 'contract')}\n{QUESTION}",
    "between tagged documents": f"{tagged(DOCUMENT)}\n\n{QUESTION}\n\n{tagged(DOCUMENT)}",
    "between nested tags": f"{tagged(tagged(DOCUMENT), 'documents')}\n\n{QUESTION}\n\n{tagged(DOCUMENT)}",
    "in a tag": f"{DOCUMENT}\n\n<question>{QUESTION}</question>\n\nBe brief.",
    "around a fence": f"{QUESTION}\n\n```\n{DOCUMENT}\n```\n\nBe brief.",
    "before its form": f"{DOCUMENT}\n\n{QUESTION}\n{FORM}",
    "before paragraphs of form": f"{DOCUMENT}\n\n{QUESTION}\n\nThink step by step.\n\nAnswer with one word.",
    "before its form, on one line": f"{LINE} {QUESTION} Answer in one short sentence. Use only the text.",
    "after its form": f"You are a helpful assistant. Be brief.\n\n{QUESTION}\n\n{DOCUMENT}",
    "between form and a tag": f"Use the text.\n\n{QUESTION}\n\n{tagged(DOCUMENT)}\n\nBe brief.",
    "after a remark": f"I wrote to you last week.\n\n{QUESTION}\n\n{DOCUMENT}",
    "before a signature": f"{DOCUMENT}\n\n{QUESTION}\n\nThanks,\nBob",
    "in a chat template": f"<|im_start|>user\n{DOCUMENT}\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_question_is_found_in_every_layout(layout: str) -> None:
    assert [one.removesuffix("<|im_end|>") for one in found(LAYOUTS[layout])] == [QUESTION]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_most_of_the_document_is_not_kept(layout: str) -> None:
    text = LAYOUTS[layout]
    chosen = choose(survey(text), NOTHING, NOTHING)
    assert 0 < kept(chosen) < len(text) / 10


@pytest.mark.parametrize(
    "form", ["Be brief.", "Answer in JSON.", "You are a helpful assistant. Use the text."]
)
def test_instructions_on_the_other_side_of_the_document_are_kept(form: str) -> None:
    for text in (f"{QUESTION}\n\n{DOCUMENT}\n\n{form}", f"{form}\n\n{DOCUMENT}\n\n{QUESTION}"):
        chosen = choose(survey(text), NOTHING, NOTHING)
        assert any(form in text[one.start : one.stop] for one in chosen.kept)


@pytest.mark.parametrize("place", range(3))
def test_a_short_part_is_the_question(place: int) -> None:
    texts = [DOCUMENT, DOCUMENT]
    texts.insert(place, QUESTION)
    assert found(*parts_of(*texts)) == [QUESTION]


def test_a_part_that_only_tells_how_to_answer_is_not_the_question() -> None:
    assert found(*parts_of(f"{DOCUMENT}\n\n{QUESTION}", "Answer in JSON.")) == [QUESTION]
    assert found(*parts_of(DOCUMENT, "Answer in JSON."), system=QUESTION) == [QUESTION]
    assert found(*parts_of(DOCUMENT, "Answer in JSON.")) == ["Answer in JSON."]


def test_many_short_parts_are_material() -> None:
    """Passages of a search: only the first, the last and labelled ones may ask."""
    passages = [f"Passage {i}. Is it cold? It is {i} below zero." for i in range(30)]
    passages = ["On cold.", *passages, "On heat."]
    assert found(*parts_of(*passages, QUESTION)) == [QUESTION]
    assert found(*parts_of(*passages[:20], f"Question: {QUESTION}", *passages[20:])) == [
        f"Question: {QUESTION}"
    ]
    text, places = parts_of(*passages, QUESTION)
    assert kept(choose(survey(text, places), NOTHING, NOTHING)) < 300


def test_the_system_message_may_ask() -> None:
    system = f"You are a helpful assistant. {QUESTION} Be brief."
    assert found(DOCUMENT, system=system) == [QUESTION]
    assert found("Where is the key of the old tower?", system=system) == [
        "Where is the key of the old tower?"
    ]


def test_speech_at_the_edge_of_a_document_does_not_displace_the_question() -> None:
    speech = '"Where is he?" cried the mate.'
    told = f"{speech}\n\n{DOCUMENT}\n\n{speech}"
    assert found(f"{told}\n\n{QUESTION}") == [QUESTION]
    assert found(f"{QUESTION}\n\n{told}") == [QUESTION]
    assert found(*parts_of(f"Where is he?\n\n{DOCUMENT}", QUESTION)) == [QUESTION]
    assert found(f"{tagged('Where is he?' + DOCUMENT)}\n\nthe code for Oslo") == ["the code for Oslo"]
    assert found(f"Where is he?\n\n{DOCUMENT}\n\nQuestion: the code for Oslo") == [
        "Question: the code for Oslo"
    ]


@pytest.mark.parametrize("verb", ["name", "list", "find", "answer", "what"])
@pytest.mark.parametrize("paragraph", [350, 2500])
def test_a_line_of_wrapped_text_that_begins_with_a_verb_does_not_ask(verb: str, paragraph: int) -> None:
    told = " ".join(["the grey ship sailed on"] * (paragraph // 24))
    wrapped = "\n".join(textwrap.wrap(told, 80)[:-1])
    wrapped += f"\n{verb}, and that was all we saw of her."
    story = f"{DOCUMENT}\n\n{wrapped}"
    assert found(story) == []
    assert found(f"{story}\n\n{QUESTION}") == [QUESTION]
    assert found(f"{story}\n\nlist the ports") == ["list the ports"]
    assert found(f"{story}\nlist the ports")[-1] == "list the ports"


def test_a_request_below_lines_of_data_asks() -> None:
    lines = "\n".join(f"step {i} failed at {'x' * (7 * i % 40)} because of a timeout" for i in range(300))
    assert found(f"{lines}\nlist the steps that failed") == ["list the steps that failed"]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (f"{QUESTION}\n\n{DOCUMENT}\n\n{QUESTION}", [QUESTION, QUESTION]),
        (f"{DOCUMENT}\n\n1. Who is it?\n2. List the ports.", ["1. Who is it?", "2. List the ports."]),
        (f"{DOCUMENT}\n\nWho is it?\n\nWhere is it?", ["Who is it?", "Where is it?"]),
        (f"{DOCUMENT}\n\nQuestions:\n- the ports\n- the name", ["Questions:", "- the ports", "- the name"]),
        (f"# Text\n\n{DOCUMENT}\n\n## Question\n\nthe name", ["## Question", "the name"]),
        (f"{DOCUMENT}\n\nFrage: Hafen von Oslo", ["Frage: Hafen von Oslo"]),
        (f"{DOCUMENT}\n\nthe name of the port", ["the name of the port"]),
        ("I lost it. Where is it? Be brief.", ["I lost it.", "Where is it?"]),
        ("Be brief.", ["Be brief."]),
        (DOCUMENT, []),
        (LINE, []),
        (tagged(DOCUMENT), []),
        ("", []),
        (" \n ", []),
        ("?" * 5000, []),
        ("\x00\x01\ufffd" * 3000, []),
    ],
)
def test_questions_of_many_forms(text: str, question: list[str]) -> None:
    assert found(text) == question


@pytest.mark.parametrize("last", ["And in Bergen?", "Why?", "What about Bergen?", "When was it sold?"])
def test_a_question_of_few_words_takes_the_earlier_one_too(last: str) -> None:
    assert found(last, earlier=f"{DOCUMENT}\n\n{QUESTION}") == [last, QUESTION]


def test_a_document_may_follow_its_question_in_another_message() -> None:
    story = f"What a day.\n\n{DOCUMENT}\n\nWho knows?"
    assert found(story, earlier=QUESTION) == ["What a day.", "Who knows?", QUESTION]
    assert found(f"{DOCUMENT}\n\nWho is it?", earlier=f"{DOCUMENT}\n\n{QUESTION}") == ["Who is it?"]


def test_a_message_that_does_not_ask_leaves_it_to_the_earlier_one() -> None:
    assert found(DOCUMENT, earlier=QUESTION) == [QUESTION]
    assert found("Who is the captain of the third boat?", earlier=QUESTION) != [QUESTION]


# -- any composition

ASKED = st.sampled_from(
    [
        QUESTION,
        "Which port is the coldest?",
        "Name the captain of the third ship.",
        "¿Dónde está la llave de la torre?",
        "鍵はどこにありますか\uff1f",
        "Task: find the name of the mate",
    ]
)
MANNERS = st.lists(
    st.sampled_from(
        [
            "Be brief.",
            "Answer in one sentence.",
            "If you do not know, say so.",
            "Use only the text.",
            "Thanks!",
        ]
    ),
    max_size=3,
)
STORY = st.integers(0, 10_000).map(lambda seed: paragraphs(4 + seed % 9, seed))
SPEECH = st.sampled_from(
    [[], ['"Where is he?" cried the mate.'], ["\u201cWho?\u201d he said.", "The mast fell."]]
)
TIGHT = st.sampled_from(["\n\n", "\n", "\n \n\n"])


@given(STORY, SPEECH, ASKED, MANNERS, MANNERS, TIGHT, st.data())
def test_a_question_at_any_structural_place_is_found(
    story: list[str],
    speech: list[str],
    question: str,
    before: list[str],
    after: list[str],
    gap: str,
    data: st.DataObject,
) -> None:
    material = "\n\n".join([*speech, *story, *speech])
    asked = gap.join([*before, question, *after])
    system, parts = "", None
    how = data.draw(
        st.sampled_from(["first", "last", "tag", "two tags", "fence", "part", "two parts", "system"])
    )
    if how == "first":
        text = gap.join([asked, material])
    elif how == "last":
        text = gap.join([material, asked])
    elif how == "tag":
        text = gap.join(data.draw(st.permutations([asked, tagged(material)])))
    elif how == "two tags":
        text = gap.join([tagged(material), asked, tagged("\n\n".join(story))])
    elif how == "fence":
        text = gap.join([asked, f"```\n{material}\n```"])
    elif how == "part":
        text, parts = parts_of(*data.draw(st.permutations([asked, material])))
    elif how == "two parts":
        text, parts = parts_of(material, asked, material)
    else:
        text, system = material, asked
    chosen = choose(survey(text, parts or ()), survey(system) if system else NOTHING, NOTHING)
    sentences_found = [text[one.chars.start : one.chars.stop] for one in chosen.own]
    sentences_found += [system[one.chars.start : one.chars.stop] for one in chosen.system]
    assert question in sentences_found
    own = [one for one in chosen.kept if one.stop <= len(text)]
    assert sum(map(len, own)) < len(text) / 2
    told = " ".join(text[one.start : one.stop] for one in chosen.kept) + system
    assert all(manner in told for manner in (*before, *after))


@given(st.text(st.sampled_from("a.?!:\n <>/`\"'Q-1#\u3002") | st.characters(), max_size=3000))
def test_any_text_has_a_question_within_it(text: str) -> None:
    chosen = choose(survey(text, chars_per_token=1.0), NOTHING, NOTHING)
    for one in chosen.own:
        assert text[one.chars.start : one.chars.stop].strip() == text[one.chars.start : one.chars.stop] != ""
    assert all(0 <= one.start <= one.stop <= len(text) for one in chosen.kept)


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "a",
            "?",
            "\n",
            " ",
            "\x00",
            "é",
            "\u3002",
            "? ",
            ". ",
            "<document>",
            "<document></document>",
            "</a>",
        ),
        *(
            "<a>\n",
            "<a b\n</a",
            "```",
            "\n```",
            "```\nx\n```\n",
            "Q: a?\n\n",
            "a?\n",
            '"',
            "# ",
            "1. ",
            "please ",
        ),
        *("for a, ", "<p>x</p>\n", "{", "question: ", "<question>a</question>\n"),
    ],
)
def test_ten_megabytes_of_anything_take_less_than_a_second(unit: str) -> None:
    text = unit * (10_000_000 // len(unit))
    began = time.process_time()
    chosen = choose(survey(text), NOTHING, NOTHING)
    assert time.process_time() - began < 1
    assert kept(chosen) < 50_000


def test_a_million_different_tags_take_less_than_a_second() -> None:
    text = "".join(f"<a{index}>\n" for index in range(1_000_000)) + "</a>"
    began = time.process_time()
    survey(text)
    assert time.process_time() - began < 1


def kept(chosen: Question) -> int:
    return sum(map(len, chosen.kept)) + sum(len(one.chars) for one in chosen.own)


# -- sentences


SAYINGS = {
    Saying.MARK: """
        Where is it?
        Where is it\uff1f
        أين المفتاح؟
        Πού είναι το κλειδί;
        **Why?**
        鍵はどこですか。
        Q: the name
        Answer the following question: What is it?""",
    Saying.LABEL: """
        Question: the name
        **Task:** find it
        ## Question
        Frage: wer""",
    Saying.WORDS: """
        Name the captain.
        what is the name
        Please list the ports.
        I need to know the name.
        Read the text and tell me the name.
        Based on the text, who is he
        - Find the port.""",
    Saying.MANNER: """
        Answer briefly.
        Use only the text.
        You are a poet.
        If you do not know, say so.
        {"answer": 1}
        Answer:
        Task: answer the question below.
        Give a short answer.""",
    Saying.PLAIN: """
        Call me Ishmael.
        see http://a.b/?q=1 now
        access code oslo
        Now, when I say it.
        ***""",
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [(kind, line.strip()) for kind, lines in SAYINGS.items() for line in lines.strip().splitlines()],
)
def test_kinds_of_sentences(kind: Saying, said: str) -> None:
    assert saying_of(said) is kind


def test_sentences_end_at_punctuation_and_newlines() -> None:
    text = ' One. Two? "Three!" Four.five\n1. Six; seven 八。九\uff1f  '
    split = ["One.", "Two?", '"Three!"', "Four.five", "1. Six; seven 八。", "九\uff1f"]
    assert [text[one.start : one.stop] for one in sentences(text, range(len(text)))] == split
