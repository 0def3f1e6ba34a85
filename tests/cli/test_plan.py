"""`skim plan` and `skim calibrate`: output, files and exit codes."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from skim import LLM
from skim.cli import heatmap
from skim.cli.ask import messages_about
from skim.cli.documents import Source, read_sources
from skim.cli.files import check_target, write_whole
from skim.cli.main import main
from skim.cli.places import FileMap, Lines
from skim.cli.plan import excerpt, lines, report
from skim.cli.plan_page import block_title, is_code, page
from skim.cli.shown import Shown
from skim.cli.terminal import may_colour
from skim.config import EngineConfig, ModelConfig
from skim.errors import RequestError, SkimError
from skim.models.load import load
from skim.prefill.pairs import Kind
from skim.prefill.plan import Plan, Reason
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, calibration_of
from tests import tiny
from tests.prefill.test_plan import plans
from tests.terminal import Terminal

NEEDLE = "The access code for the <Oslo> office & its attic is 16979."
QUESTION = "What is the access code for the Oslo office?"
LEXICAL = ["--scorer", "lexical", "--prefill-block-size", "64", "--keep-tokens", "400"]

P, S, R, N = Reason.PINNED, Reason.SCORED, Reason.RESCUED, Reason.NEIGHBOUR


@pytest.fixture(scope="module")
def document() -> str:
    """About 1,500 tokens of a novel, with a needle in the middle."""
    book = (resources.files("skim") / "data" / "moby-dick.txt").read_text(encoding="utf-8")
    start = book.index("Call me Ishmael")
    return f"{book[start : start + 3200]}\n{NEEDLE}\n{book[start + 3200 : start + 6200]}".strip()


@pytest.fixture
def file(document: str, tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text(document, encoding="utf-8")
    return str(tmp_path / "book.txt")


def plan_of(*reasons: Reason | None, scores: tuple[float, ...] | None = None, block_size: int = 4) -> Plan:
    return Plan(block_size, block_size * len(reasons), reasons, "original", "lexical", scores)


# the heat map


@given(plans(), st.integers(1, 40))
def test_cells_cover_every_block_once_and_no_kept_block_is_lost(plan: Plan, most: int) -> None:
    found = heatmap.cells(plan, most)
    assert 1 <= len(found) <= most
    assert [block for cell in found for block in cell.blocks] == list(range(len(plan.reasons)))
    assert len({len(cell.blocks) for cell in found[:-1]}) <= 1
    for cell in found:
        reasons = {plan.reasons[block] for block in cell.blocks}
        assert cell.reason in reasons
        assert (cell.reason is None) is (reasons == {None})
        assert 0 <= cell.heat <= 1


def test_every_reason_has_a_mark_of_its_own() -> None:
    assert heatmap.MARKS.keys() == set(Reason)
    assert len(set(heatmap.MARKS.values())) == len(Reason)


def offset(plan: Plan) -> Callable[[int], str]:
    """Labels of one width: the first token of a block."""
    return lambda block: f"{block * plan.block_size:{len(str(plan.prompt_tokens))}}"


@given(plans(), st.integers(8, 60))
def test_the_plain_map_has_a_shade_for_each_cell_and_a_mark_below_each_kept_one(
    plan: Plan, width: int
) -> None:
    *shown, _ = heatmap.heat_map(plan, width=width, colour=False, label=offset(plan))
    assert all(len(line) <= width for line in shown)
    assert "\x1b" not in "".join(shown)
    found = heatmap.cells(plan, (width - len(str(plan.prompt_tokens)) - 3) * heatmap.MOST_ROWS)
    shades = [line.partition("|")[2][:-1] for line in shown if line[0:5].partition("|")[0].strip()]
    assert len("".join(shades)) == len(found)
    assert set("".join(shades)) <= set(heatmap.SHADES)
    marks = [line.partition("|")[2][:-1] for line in shown if not line.partition("|")[0].strip()]
    assert "".join(marks).replace(" ", "") == "".join(heatmap.mark_of(c.reason) for c in found).replace(
        " ", ""
    )


@given(plans(), st.integers(8, 60))
def test_the_coloured_map_shows_the_same_cells_with_the_marks_in_them(plan: Plan, width: int) -> None:
    *shown, _ = heatmap.heat_map(plan, width=width, colour=True, label=offset(plan))
    bare = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown]
    label = len(str(plan.prompt_tokens)) + 1
    found = heatmap.cells(plan, (width - label - 2) * heatmap.MOST_ROWS)
    assert "".join(line[label:] for line in bare) == "".join(heatmap.mark_of(cell.reason) for cell in found)
    assert all(len(line) <= width for line in bare)
    assert all(line.endswith("\x1b[0m") for line in shown)


@given(plans())
def test_a_higher_score_is_never_cooler(plan: Plan) -> None:
    heat = heatmap.heats(plan)
    if plan.scores is not None:
        ordered = [heat[block] for block in sorted(range(len(heat)), key=plan.scores.__getitem__)]
        assert ordered == sorted(ordered)


def test_a_pinned_question_does_not_darken_other_blocks() -> None:
    plan = plan_of(P, None, S, None, P, scores=(0.0, 0.25, 1.0, 0.0, 99.0))
    assert heatmap.heats(plan) == [0.0, 0.5, 1.0, 0.0, 1.0]
    assert heatmap.heat_map(plan, width=80, colour=False, label=str) == [
        "0 | =# #|",
        "  |p s p|",
        "each cell is a block of 4 tokens; kept: p pinned, s scored",
    ]


def test_a_cell_shows_its_most_telling_reason() -> None:
    plan = plan_of(*[None] * 100, P, S, P, *[None] * 97)
    *_, legend = heatmap.heat_map(plan, width=13, colour=False, label=str)
    assert legend == "each cell is 2 blocks of 4 tokens, as hot as its hottest; kept: p pinned, s scored"
    assert heatmap.cells(plan, 2)[1].reason == S


# lines, JSON, and the page, from plans


@pytest.mark.parametrize(
    ("terminal", "environ", "colour"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    terminal: bool, environ: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if terminal:
        monkeypatch.setattr(sys, "stdout", Terminal())
    assert may_colour() is colour


@given(st.text(), st.integers(20, 60))
def test_an_excerpt_is_short_and_harmless(text: str, width: int) -> None:
    found = excerpt(text, width)
    assert len(found) <= 2
    assert all(len(line) <= width and line.isprintable() for line in found)


def test_an_excerpt_has_the_beginning_and_the_end() -> None:
    assert excerpt(" a\n\x1b[31mb ", 20) == ["  a [31mb"]
    assert excerpt("one two three four five six", 20) == ["  one two three", "  four five six"]
    long = excerpt("one two three " * 9, 20)
    assert long == ["  one two three ...", "  ... one two three"]


def test_the_best_block_of_a_span_is_shown_too() -> None:
    shown = Shown(plan_of(P, S, S, None, scores=(0, 1, 2, 0)), ("aa ", "bb ", "cc ", "dd"))
    told = ["tokens 0-3 pinned", "  aa", "", "tokens 4-11 scored", "  bb cc", "  best tokens 8-11:", "  cc"]
    assert lines(shown, width=40, colour=False)[-7:] == told
    assert [span["text"] for span in report(shown)["spans"]] == ["aa ", "bb cc "]


@given(st.lists(st.text(st.sampled_from("ab \n")).filter(str.strip), min_size=1, max_size=3), st.data())
def test_characters_of_a_prompt_are_mapped_to_lines_of_its_files(
    texts: list[str], data: st.DataObject
) -> None:
    files = [data.draw(st.sampled_from(["", "\n", " \n\n "]), label="before") + text for text in texts]
    sources = [
        Source(str(i), file.strip(), 1 + file[: file.index(file.strip())].count("\n"))
        for i, file in enumerate(files)
    ]
    prompt = "user:\n" + "\n===\n".join(source.text for source in sources) + "\nWhy?"
    known = FileMap(prompt, sources)
    at = len("user:\n")
    for source, file in zip(sources, files, strict=True):
        for offset, line in enumerate(line_numbers(file), start=-file.index(source.text)):
            if 0 <= offset < len(source.text):
                assert known.lines(at + offset, at + offset + 1) == [Lines(source.name, line, line)]
        at += len(source.text) + len("\n===\n")
    assert known.lines(0, len("user:\n")) == []
    assert [one.file for one in known.lines(0, len(prompt))] == [source.name for source in sources]


def line_numbers(text: str) -> list[int]:
    """The number of the line of each character; a newline belongs to the line that it ends."""
    return [1 + text[:index].count("\n") for index in range(len(text))]


def test_lines_are_written_like_a_compiler_does() -> None:
    assert [str(Lines("a.txt", 3, last)) for last in (3, 7)] == ["a.txt:3", "a.txt:3-7"]
    assert FileMap("changed by the template", [Source("a.txt", "text", 1)]).lines(0, 9) == []


TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "p",
    "nav",
    "a",
    "ol",
    "li",
    "main",
    "mark",
}
TAGS |= {"span", "section", "header", "details", "summary", "div"}


class Page(HTMLParser):
    """The elements of a page, as a browser parses them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.main = ""
        self.marked = ""
        self.feed(text)
        assert not self.inside

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if "main" in self.inside and "span" in self.inside:
            self.main += data
        if "mark" in self.inside:
            self.marked += data


@given(plans(), st.data())
def test_the_page_has_every_text_and_escapes_it(plan: Plan, data: st.DataObject) -> None:
    nasty = st.text(st.sampled_from("<>&\"'/ab \n")) | st.just("</main><script>alert(1)</script>")
    texts = data.draw(st.lists(nasty, min_size=len(plan.reasons), max_size=len(plan.reasons)), label="texts")
    seen = Page(page(Shown(plan, tuple(texts)), title="<b>", question='"><script>'))
    assert seen.main == "".join(texts)
    kept = "".join(text for text, kept in zip(texts, plan.kept, strict=True) if kept)
    assert seen.marked == kept
    spans = [attrs for tag, attrs in seen.tags if tag == "span" and "title" in attrs]
    assert [one["title"] for one in spans] == [block_title(plan, block) for block in range(len(texts))]
    assert {tag for tag, _ in seen.tags} <= TAGS
    ids = [attrs["id"] for _, attrs in seen.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert {attrs["href"] for tag, attrs in seen.tags if tag == "a"} <= {f"#{one}" for one in ids}
    runs = [kept for kept, _ in itertools.groupby(plan.kept)]
    sections = [tag for tag, _ in seen.tags if tag in ("section", "details")]
    assert sections == ["section" if kept else "details" for kept in runs]


def test_the_page_lists_passages_by_line_and_code_has_a_fixed_width() -> None:
    code = "def f(x):\n    return {x: [1, 2]}\n" * 3
    prose = "It was a quiet day, and nothing moved.\n" * 3
    sources = [Source("a.py", code.strip(), 1, "a.py"), Source("b.txt", prose.strip(), 1, "b.txt")]
    texts = ("system\n", code[:30], code[30:], "\n", prose[:40], prose[40:])
    shown = Shown(plan_of(P, None, S, None, None, S), texts, "Why?", FileMap("".join(texts), sources))
    text = page(shown, title="t", question="Why?")
    listed = re.findall(r'<li><a href="#p(\d)">([^<]*)</a> <span class="faint">(\w+)', text)
    assert listed == [
        ("0", "template and question", "pinned"),
        ("1", "a.py:2-6", "scored"),
        ("2", "b.txt:2-3", "scored"),
    ]
    folded = re.findall(r"<summary>([^<]*)</summary>", text)
    assert folded == ["a.py:1-2: 2 lines, 4 tokens skipped", "b.txt:1-2: 2 lines, 8 tokens skipped"]
    fonts = re.findall(r'<(?:mark|div) class="(text[ a-z]*)">', text)
    assert fonts == ["text", "text code", "text code", "text", "text"]
    assert '<a href="#p0">previous</a> <a href="#p2">next</a> <a href="#list">list</a>' in text
    assert [shown.label(block) for block in range(6)] == [
        "",
        "a.py:1",
        "a.py:2",
        "",
        "b.txt:1",
        "b.txt:2",
    ]


PROSE = (
    "It was a quiet day, and nothing moved in the harbour. The boats lay still and nobody spoke for hours. "
    * 2
)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.txt", f"{PROSE} We left in 1851.\n", False),
        ("a.txt", "2026-11-16T19:59:30 ERROR disk=3 free=0%\n", True),
        ("a.c", "int main(void) { return a[0] + 1; }\n", True),
        ("a.csv", "1;2;3\n4;5;6\n", True),
        ("a.md", "| a | b |\n|---|---|\n| 1 | 2 |\n", False),
    ],
)
def test_code_tables_and_logs_are_recognised(name: str, text: str, code: bool) -> None:
    assert is_code(Source(name, text, 1, name)) is code


def test_the_tooltip_of_a_block_has_its_place_and_reason() -> None:
    plan = Plan(4, 6, (None, R), "compact", "lexical", (0.5, 1234567.0))
    assert block_title(plan, 0) == "block 0, tokens 0-3, score 0.5, skipped"
    assert block_title(plan, 1) == "block 1, tokens 4-5, score 1.235e+06, kept: rescued"
    assert "no score" in block_title(plan_of(S), 0)


# the command, with the default model


def test_plan_as_json_and_as_a_page(
    loaded: list[EngineConfig],
    llm: LLM,
    file: str,
    document: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", file, "-q", QUESTION, "--json", "--html", str(out), *LEXICAL]) == 0
    shown = capsys.readouterr()
    found: dict[str, Any] = json.loads(shown.out)
    assert loaded[0].prefill.sparse_prefill == "always"
    assert f"the page is in {out}" in shown.err

    assert any("16979" in span["text"] for span in found["spans"])
    assert (found["files"], found["question"], found["scorer"]) == (
        [file],
        f"Question: {QUESTION}",
        "lexical",
    )
    written = Path(file).read_text(encoding="utf-8").splitlines()
    at = 1 + next(i for i, line in enumerate(written) if "16979" in line)
    [lines] = [span["lines"] for span in found["spans"] if "16979" in span["text"]]
    assert any(one["file"] == file and one["first"] <= at <= one["last"] for one in lines)
    plan = Plan.from_json(json.dumps({name: found[name] for name in Plan.__dataclass_fields__}))
    assert found["kept_tokens"] == plan.kept_tokens < plan.prompt_tokens // 2
    assert (found["ratio"], found["coverage"]) == (plan.ratio, plan.coverage)
    assert found["first_gap"] == plan.first_gap >= 64
    assert found["timings_ms"]["scoring"] > 0
    rendered = llm.encode_chat(messages_about(read_sources([file]), QUESTION)).text or ""
    assert all(span["text"] in rendered for span in found["spans"])

    text = out.read_text(encoding="utf-8")
    assert html.escape(NEEDLE) in re.sub("<[^>]*>", "", text)
    seen = Page(text)
    assert document in seen.main
    assert "16979" in seen.marked
    assert QUESTION in seen.marked
    assert not re.search(r"https?:|\bsrc=|@import|url\(|<script|<link", text)
    assert "default-src 'none'" in text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_plan_at_a_terminal(
    loaded: list[EngineConfig], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", file, "-q", QUESTION, *LEXICAL]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"\d+/\d+ blocks kept \(\d+\.\d%, \d+ spans\) lexical \d+\.\d\ds\n", shown)
    assert " original positions, " in shown.splitlines()[1]
    assert "kept: p pinned, s scored" in shown
    assert re.search(rf"\n{re.escape(file)}:\d+(-\d+)? scored\n(?:  .*\n)*  .*16979", shown)
    assert not re.search(r"\n\d+-\d+ ", shown)
    assert f"\nfor:\n  Question: {QUESTION}\n" in shown
    assert "\x1b" not in shown


def test_a_prompt_that_does_not_fit_is_not_reported_as_read(
    loaded: list[EngineConfig], document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "long.txt"
    book.write_text(8 * document, encoding="utf-8")
    assert main(["plan", str(book), "-q", QUESTION, "--scorer", "full"]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"no plan, and the prompt of \d+ tokens does not fit .* \(scorer_window\): ", shown)
    assert "use the scorer blend or attention" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--sparse-prefill", "auto", "--min-prompt-tokens", "2048"],
            "it has \\d+ tokens, and `auto` skims prompts of at least 2048",
        ),
        (["--prefill-block-size", "4096"], r"all of the prompt would be read \(short\): "),
    ],
)
def test_a_prompt_that_would_be_read_in_full_has_no_plan(
    arguments: list[str],
    message: str,
    loaded: list[EngineConfig],
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.html"
    run = ["plan", file, "-q", QUESTION, "--json", "--html", str(out), "--scorer", "lexical", *arguments]
    assert main(run) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(f"skim plan: all of the prompt would be read.*{message}|skim plan: {message}", shown.err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparse-prefill", "off"], "--sparse-prefill is off, so there is no plan to show"),
        (["--html", "."], "--html: . is a directory"),
        (["--html", os.devnull], f"--html: {os.devnull} is not a regular file"),
        (["--html", "nowhere/plan.html"], "--html: there is no directory "),
        (["--html", __file__], f"--html: {__file__} is one of the files to read"),
        (["--keep-ratio", "1.7"], "--keep-ratio must be in (0, 1], got 1.7"),
        (["-q", " "], "--question is empty"),
    ],
)
def test_plan_reports_errors_before_it_loads_a_model(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(config: EngineConfig) -> None:
        raise AssertionError("a model was asked for")

    monkeypatch.setattr("skim.cli.plan.opened", unexpected)
    assert main(["plan", __file__, "-q", "Why?", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"skim plan: {message}")


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    path = check_target("--html", tmp_path / "link.html")
    write_whole(path, "new \udc80")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new ?"
    (tmp_path / "taken").mkdir()
    with pytest.raises(SkimError, match="cannot write"):
        write_whole(tmp_path / "taken", "x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.html", "real.html", "taken"]
    with pytest.raises(RequestError, match="is one of the files to read"):
        check_target("--html", path, ["-", str(tmp_path / "link.html")])


# calibrate


@pytest.fixture
def model(document: str, tmp_path: Path) -> Path:
    """A random model with a syllable tokenizer: with byte tokens, questions would be too long to score."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([document], trainer)
    config = tiny.CONFIGS["llama"]()
    config.vocab_size = 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_calibrate_writes_the_file_that_the_attention_scorer_uses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(model), "--trials", "7", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    found = Calibration.load(model / FILE_NAME)
    assert (found.model, found.trials) == ("tiny", 7)
    assert found.features
    used = calibration_of(load(model, ModelConfig(model=str(model))))
    assert used == found
    assert shown.out.startswith(f"layers {', '.join(map(str, found.layers))} of tiny")
    assert shown.out.endswith(f"written to {model / FILE_NAME}\n")
    assert all(f"\n{kind} " in shown.out for kind in Kind)
    best = max(found.features, key=lambda feature: abs(feature.weight))
    assert f"features {best.statistic} {best.layer}.{best.head} x {best.weight:g}" in shown.out
    assert shown.err.splitlines()[-1] == "calibrating: 14 of 14 tasks"

    other = tmp_path / "other.json"
    assert main(["calibrate", str(model), "--trials", "7", "--seed", "1", "-o", str(other)]) == 0
    assert Calibration.load(other).trials == 7
    assert Calibration.load(model / FILE_NAME) == found


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 3, "unknown model 'nowhere'"),
        (["nowhere", "-o", "."], 2, "--output: . is a directory"),
        (["nowhere", "--text", "nowhere.txt"], 2, "cannot read nowhere.txt"),
        (["nowhere", "--dtype", "int1"], 2, "--dtype must be one of "),
    ],
)
def test_calibrate_reports_errors(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == code
    assert capsys.readouterr().err.startswith(f"skim calibrate: {message}")


def test_too_few_trials_leave_no_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(model), "--trials", "1"]) == 2
    assert "--trials must be at least 7, one of each kind, got 1" in capsys.readouterr().err
    assert not (model / FILE_NAME).exists()
