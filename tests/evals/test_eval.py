"""`skim eval` on a small random model, with working and deliberately broken engines."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import torch

from skim import LLM
from skim.cli.eval import SHARED
from skim.cli.main import main
from skim.config import EngineConfig
from skim.engine.runner import Forward
from skim.errors import EngineError
from skim.evals.ask import Read, ask, check_read, evidence_tokens, kept_share
from skim.evals.engines import Engines
from skim.evals.run import OF_CACHE, Cell, Drawer, measure, parse_modes, plan_cell, run, salts_of
from skim.evals.task import Sample
from skim.evals.tasks.agree import Agree
from skim.evals.tasks.evidence import Evidence
from skim.evals.tasks.needle import Needle
from skim.evals.teacher import TeacherForced, compare, teacher_force
from skim.measure.book import packaged_text
from skim.measure.modes import parse_mode
from skim.measure.report import MeasurementError, Report, Row
from skim.prefill.plan import Plan, Reason
from skim.prefill.request import Request
from skim.sampling.logprobs import Sampled
from tests import tiny

DATA = str(Path(__file__).parent / "questions.json")
SCHEMA = json.loads(resources.files("skim").joinpath("data", "report.schema.json").read_text())
DENSE, SPARSE = parse_mode("dense"), parse_mode("lexical:0.5")
SMALL = "min_scored_tokens=64"
TASKS = ["needle", "evidence", "turns", "trace", "count", "quote", "qa", "agree"]


def talkative() -> Any:
    """A random model that never outputs white space or end tokens, so no reply is empty by chance."""
    model = tiny.build("llama")
    silent = [*tiny.tokenizer().encode(" \t\n\r\v\f", add_special_tokens=False), 256, 257]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0  # some other logit is positive
    return model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("tiny")
    talkative().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


@pytest.fixture
def evaluate(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Report]]:
    """Run the command on the loaded model; return its exit code and its validated report."""

    @contextlib.contextmanager
    def opened(config: EngineConfig) -> Iterator[LLM]:
        yield llm

    monkeypatch.setattr("skim.cli.eval.opened", opened)

    def go(*words: str) -> tuple[int, Report]:
        target = tmp_path / "report.json"
        code = main(["eval", *words, "--json", str(target)])
        text = target.read_text()
        jsonschema_rs.validate(SCHEMA, json.loads(text))
        return code, Report.from_json(text)

    return go


def words(task: str, *more: str) -> list[str]:
    options = {
        "qa": ["--data", DATA],
        "agree": ["--tokens", "8"],
        "quote": ["--kinds", "code"],
        "evidence": ["--kinds", "far"],
    }
    return [task, *options.get(task, []), "--contexts", "1000", "--n", "2", *more]


# -- successful runs


@pytest.mark.parametrize("task", TASKS)
def test_every_task_runs_with_its_controls(
    task: str, evaluate: Callable[..., tuple[int, Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(task, "--modes", "dense", f"blend:0.3,{SMALL}")
    code, report = evaluate(*command)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert report.kind == f"eval {task}"
    assert list(report.command[: len(command) + 2]) == ["skim", "eval", *command]
    assert report.settings["seed"] == 0
    modes = ["dense", f"blend:0.3,{SMALL}", f"lexical:0.3,{SMALL}", f"random:0.3,{SMALL}"]
    assert [row.key["mode"] for row in report.rows] == modes
    for row in report.rows:
        assert {"score", "read", "ttft"} <= row.figures.keys()
        assert row.figures["score"].n == 2
        assert (row.figures["read"].value == 1) == (row.key["mode"] == "dense")
        assert ("computed" in row.figures) == (task == "turns")
        # A first reply of invalid bytes grows when it is encoded again; quote reserves a long reply.
        least, most = (500 if task == "quote" else 850), (1024 if task == "turns" else 1000)
        for sample in row.notes["samples"]:
            assert least <= sample["prompt_tokens"] <= most
        if row.key["mode"] == "dense" and task not in ("count", "agree"):
            assert row.figures["kept"].value == 1
    assert "blend:0.3" in shown.out
    assert "FAILED" not in shown.out
    assert f"eval {task}: 8 of 8 samples" in shown.err.splitlines()
    [model] = report.settings["models"]
    assert f"; {model} in float32" in shown.out.splitlines()[1]


def test_each_depth_has_its_own_row(evaluate: Callable[..., tuple[int, Report]], tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    code, report = evaluate(
        *words("needle", "--modes", "dense", "--depths", "0", "1", "--html", str(target), "--kinds", "single")
    )
    assert code == 0
    assert [row.key["depth"] for row in report.rows] == [0.0, 1.0]
    assert "<svg" in target.read_text()


def test_the_same_seed_gives_the_same_replies(llm: LLM) -> None:
    task = Needle(packaged_text())
    cells = [Cell("single", 900)]
    first, again, other = (run(llm, task, cells, [SPARSE], n=2, seed=seed)[0] for seed in (0, 0, 1))

    def replies(row: Any) -> list[str]:
        return [sample["reply"] for sample in row.notes["samples"]]

    assert replies(first) == replies(again) != replies(other)


def test_modes_do_not_share_cached_prefixes(llm: LLM) -> None:
    """A conversation computes the same tokens and gives the same reply, whatever ran before it."""
    from skim.evals.tasks.turns import TwoTurns

    modes = [
        parse_mode(f"{name},{SMALL}")
        for name in ("lexical:0.3", "random:0.3", "lexical:0.3,follow_up=replan")
    ]
    seen: dict[str, list[Any]] = {}
    for order in (modes, modes[::-1]):
        for row in run(llm, TwoTurns(packaged_text()), [Cell("other", 1000)], order, n=2, seed=0):
            seen.setdefault(str(row.key["mode"]), []).append(
                [(s["computed"], s["follow_up"], s["reply"]) for s in row.notes["samples"]]
            )
    for both in seen.values():
        assert both[0] == both[1]
    assert all("backfill" in follow_up for _, follow_up, _ in seen[modes[0].name][0])
    assert llm.stats().pool.live == 0


def test_the_default_model_answers_from_what_it_read(default_model_dir: Path) -> None:
    with LLM(default_model_dir, progress=False, kv_memory="128M") as llm:
        task = Needle(packaged_text())
        sample = Drawer(llm, task, seed=0).draw(Cell("single", 400), 0)
        modes = [
            parse_mode(f"{name},min_scored_tokens=64,tail_tokens=16")
            for name in ("lexical:0.3", "random:0.3")
        ]
        for mode in [DENSE, *modes]:
            outcome = ask(llm, sample, mode, "")
            count = outcome.metrics.prompt_tokens
            assert 400 - 64 <= count + sample.max_tokens <= 400
            if outcome.kept:
                assert task.grade(sample, outcome.reply)["score"] == 1
            assert outcome.kept or mode.name.startswith("random")


# -- evidence


def test_evidence_counts_if_it_was_read_in_full(llm: LLM) -> None:
    content = "a" * 20 + "needle" + "b" * 20 + "thread" + "c" * 20 + "thread" + "d" * 20
    prompt = llm.encode_chat([{"role": "user", "content": content}], skimmed=False)

    def blocks(passage: str, at: int = 0) -> set[int]:
        """The prompt blocks, of four tokens, of the passage's occurrence number `at`."""
        wanted = tuple(llm.encode(passage, add_special_tokens=False))
        count = len(wanted)
        starts = [i for i in range(len(prompt.tokens)) if tuple(prompt.tokens[i : i + count]) == wanted]
        return {index // 4 for index in range(starts[at], starts[at] + count)}

    def share(kept: set[int], evidence: tuple[str, ...] = ("needle", "thread")) -> float:
        reasons = [Reason.SCORED if block in kept else None for block in range(-(-len(prompt.tokens) // 4))]
        plan = Plan(4, len(prompt.tokens), tuple(reasons), "original", "lexical")
        return kept_share(plan, evidence_tokens(llm, prompt, evidence))

    needle, first, second = blocks("needle"), blocks("thread"), blocks("thread", at=1)
    assert share(needle | first | second) == 1
    assert share(needle) == 0.5
    assert share(needle | first) == share(needle | second) == 1, "either occurrence counts"
    for block in needle:
        assert share(needle - {block} | first) == 0.5
    for one in first:
        for other in second:
            assert share(needle | first - {one} | second - {other}) == 0.5, (
                "half of each occurrence does not count"
            )
    assert share(set()) == 0
    assert kept_share(None, evidence_tokens(llm, prompt, ["needle"])) == 1
    with pytest.raises(MeasurementError, match="'haystack' is not in the prompt"):
        share(needle, ("haystack",))


# -- evidence without replies


@pytest.mark.parametrize("task", ["needle", "evidence", "turns"])
def test_planning_alone_keeps_what_a_full_run_keeps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., tuple[int, Report]], task: str
) -> None:
    command = words(task, "--modes", "dense", f"lexical:0.3,{SMALL},follow_up=replan")
    _, asked = evaluate(*command)

    def submit(*_: object) -> None:
        raise AssertionError("a reply was to be generated")

    monkeypatch.setattr(llm.engine, "submit", submit)
    code, planned = evaluate(*command, "--kept-only")
    assert code == 0
    assert [row.key for row in planned.rows] == [row.key for row in asked.rows if row.key["mode"] != "dense"]
    for row, full in zip(planned.rows, asked.rows[1:], strict=True):
        assert row.figures.keys() == {"kept", "read", "scoring"}
        if task != "turns":  # its second prompt contains the first reply
            assert row.figures["kept"] == full.figures["kept"]
            assert row.figures["read"] == full.figures["read"]


def test_planning_alone_reaches_beyond_the_context_window(
    evaluate: Callable[..., tuple[int, Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evidence", "--kinds", "shared", "next", "--contexts", "900", "4000", "--n", "2"]
    code, report = evaluate(*command, "--modes", "lexical:600t", "--kept-only", "--no-controls")
    assert code == 0
    assert [(row.key["kind"], row.key["context"]) for row in report.rows] == [
        *(("shared", 900), ("shared", 4000), ("next", 900), ("next", 4000))
    ]
    shown = capsys.readouterr().out
    assert (
        "evidence kept, n = 2 in each cell\n\nlexical:600t\n  kind     900  4,000\n  shared  100%   100%\n"
        in shown
    )


def test_a_request_for_the_whole_text_must_not_be_skimmed_silently(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, cell = Evidence(packaged_text()), Cell("summary", 900)
    samples = [Drawer(llm, task, seed=0).draw(cell, number) for number in range(2)]

    def measured(fallback: str | None, reason: str) -> Row:
        def plan(request: Request) -> Any:
            count = len(request.prompt_token_ids)
            reasons = (reason, *[None] * (count - 1))
            found = SimpleNamespace(kept=[*map(bool, reasons)], reasons=reasons, ratio=0.1, timings_ms={})
            planned = SimpleNamespace(plan=None if fallback else found, fallback=fallback)
            return SimpleNamespace(result=lambda: planned)

        monkeypatch.setattr(llm.engine, "plan", plan)
        [row] = plan_cell(llm, task, cell, samples, [SPARSE])
        return row

    assert measured(None, "scored").figures["told"].value == 0
    assert measured(None, "even").figures["told"].value == 1
    assert measured("whole", "").figures["told"].value == 1
    assert measured("no_question", "").figures["told"].value == 1
    assert "planning failed: scorer_failed" in str(measured("scorer_failed", "").failed)
    monkeypatch.setattr(llm.engine.core, "max_model_len", 500)
    assert "the context window has 500" in str(measured("whole", "").failed)


def test_only_requests_for_the_whole_text_may_be_read_in_full_by_a_sparse_mode() -> None:
    for reason in ("whole", "no_question"):
        read = Read(5000, plan=None, fallback=reason)
        check_read(SPARSE, read, whole=True)
        with pytest.raises(MeasurementError, match=f"planning failed: {reason}"):
            check_read(SPARSE, read)


def test_auto_may_read_a_prompt_in_full_that_is_mostly_cached() -> None:
    auto = parse_mode("auto")
    check_read(auto, Read(5000, plan=None, fallback="mostly_cached"))
    with pytest.raises(MeasurementError, match="read in full"):
        check_read(auto, Read(5000, plan=None))


# -- agreement


def forced(probabilities: list[list[float]], text: list[int]) -> TeacherForced:
    return TeacherForced(torch.tensor(text), torch.tensor(probabilities).log(), None, None)  # type: ignore[arg-type]


def test_agreement_by_hand() -> None:
    dense = forced([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]], [0, 2])
    other = forced([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], [0, 2])
    found = compare(dense, other)
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.75 * math.log(1.5)
    assert found["score"] == 0.5
    assert found["kl"] == pytest.approx((first + second) / 2, rel=1e-5)
    assert found["nll"] == pytest.approx((math.log(4) + math.log(2)) / 2, rel=1e-5)
    assert compare(dense, dense)["kl"] == 0


def test_teacher_forcing_records_the_models_own_distributions(llm: LLM) -> None:
    tokens = llm.encode(
        "Call me Ishmael. Some years ago - never mind how long precisely - having little money"
    )
    found = teacher_force(llm, tokens[:-12], tokens[-12:], DENSE)
    with torch.inference_mode():
        logits = talkative()(torch.tensor([tokens])).logits[0, -13:-1]
    assert torch.allclose(found.logprobs, logits.log_softmax(-1), atol=1e-4)
    assert type(llm.engine.core.lifecycle.sampler).__name__ == "Sampler"
    llm.engine.reset_prefix_cache()


def test_kv_formats_are_compared_with_full_precision(llm: LLM) -> None:
    names = ["dense", *(f"dense,kv_cache_dtype={name}" for name in ("auto", "int8", "int4"))]
    modes = [parse_mode(name) for name in names]
    rows = Agree(packaged_text()).run(llm, [Cell("text", 300)], modes, n=2, seed=0, tokens=8)
    dense, plain, int8, int4 = (row.figures["kl"].value for row in rows)
    assert dense == plain == 0
    assert 0 < int8 < int4
    stats = llm.stats()
    rows = run(llm, Needle(packaged_text()), [Cell("single", 800)], modes[2:], n=1, seed=0)
    assert [row.failed for row in rows] == [None, None]
    assert llm.stats().tokens_computed == stats.tokens_computed, "another engine has the format"


def test_exact_decode_agrees_with_dense_where_slow_fast_decode_does_not(llm: LLM) -> None:
    modes = [parse_mode(f"{name},decode_budget=64") for name in ("exact", "fast-only")]
    rows = Agree(packaged_text()).run(llm, [Cell("text", 800)], [DENSE, *modes], n=2, seed=0, tokens=24)
    _, exact, fast = (row.figures for row in rows)
    assert exact["score"].value == 1
    assert exact["kl"].value == pytest.approx(0, abs=1e-6)
    assert fast["kl"].value > 1e-4
    [row] = run(llm, Needle(packaged_text()), [Cell("single", 800)], modes[:1], n=2, seed=0)
    assert row.failed is None
    assert 0 <= row.figures["accepted"].value <= 1


def test_reading_everything_agrees_with_dense(llm: LLM) -> None:
    modes = [DENSE, parse_mode("lexical:1.0"), parse_mode(f"random:0.2,{SMALL}")]
    rows = Agree(packaged_text()).run(llm, [Cell("text", 800)], modes, n=2, seed=0, tokens=8)
    dense, everything, some = (row.figures for row in rows)
    assert dense["score"].value == everything["score"].value == 1
    assert dense["kl"].value == dense["kl"].high == 0
    assert everything["kl"].value == pytest.approx(0, abs=1e-6)
    assert some["kl"].value > 1e-4


def test_auto_is_dense_below_its_threshold_and_brings_no_controls(
    evaluate: Callable[..., tuple[int, Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    below, above = (f"auto:0.3,{SMALL},min_prompt_tokens={least}" for least in (1001, 500))
    for task in ("needle", "agree"):
        code, report = evaluate(*words(task, "--modes", below, above))
        assert code == 0, capsys.readouterr().err
        assert [row.key["mode"] for row in report.rows] == [below, above]
        assert report.rows[0].figures["read"].value == 1
        assert report.rows[1].figures["read"].value < 1


# -- broken engines


def broken_submit(llm: LLM, patch: pytest.MonkeyPatch) -> str:
    def submit(*_: object, **__: object) -> None:
        raise EngineError("the engine is out of order")

    patch.setattr(llm.engine, "submit", submit)
    return "the engine is out of order"


def broken_forward(llm: LLM, patch: pytest.MonkeyPatch) -> str:
    def forward(*_: object) -> torch.Tensor:
        raise RuntimeError("no more memory bus")

    patch.setattr(llm.engine.core.runner, "forward", forward)
    return "no more memory bus"


def nan_logits(llm: LLM, patch: pytest.MonkeyPatch) -> str:
    forward = llm.engine.core.runner.forward
    patch.setattr(
        llm.engine.core.runner, "forward", lambda *args: Forward(forward(*args).logits * math.nan, None)
    )
    return "not finite"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("breaks", [broken_submit, broken_forward, nan_logits])
def test_a_broken_engine_fails_the_command(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: Callable[..., tuple[int, Report]],
    capsys: pytest.CaptureFixture[str],
    task: str,
    breaks: Callable[[LLM, pytest.MonkeyPatch], str],
) -> None:
    message = breaks(llm, monkeypatch)
    code, report = evaluate(*words(task, "--modes", "dense", "lexical:0.5", "--no-controls"))
    shown = capsys.readouterr()
    assert code == 1
    for row in report.rows:
        assert row.failed is not None
        assert message in row.failed
        assert "sample 0" in row.failed
        assert not row.figures
    assert shown.out.count("FAILED: ") == 2
    assert f"skim eval {task}: 2 of 2 rows failed" in shown.err
    assert "FAILED" not in shown.err


def test_an_empty_reply_fails_its_row(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., tuple[int, Report]]
) -> None:
    read = llm.engine.core.lifecycle.sampler.read

    def ends(draw: Any) -> list[Sampled]:
        return [replace(one, token_id=257) for one in read(draw)]

    monkeypatch.setattr(llm.engine.core.lifecycle.sampler, "read", ends)
    code, report = evaluate(*words("needle", "--modes", "dense"))
    assert code == 1
    assert report.rows[0].failed == "sample 0: the reply is empty"


@pytest.mark.parametrize("task", ["needle", "agree"])
def test_a_sparse_mode_that_keeps_everything_fails_its_row(
    evaluate: Callable[..., tuple[int, Report]], task: str
) -> None:
    modes = ["lexical:0.5,min_scored_tokens=2000", "lexical:1.0"]
    code, report = evaluate(*words(task, "--modes", *modes, "--no-controls"))
    cut, whole = report.rows
    assert code == 1
    assert "so nothing was skimmed; use longer contexts, keep less, or" in (cut.failed or "")
    assert whole.failed is None


@pytest.mark.parametrize("task", ["needle", "agree"])
def test_a_fallback_to_dense_fails_a_sparse_row(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., tuple[int, Report]], task: str
) -> None:
    def scorers(name: str) -> Any:
        raise RuntimeError("this scorer is broken")

    monkeypatch.setattr(llm.engine.core.planner, "_scorers", scorers)
    code, report = evaluate(*words(task, "--modes", "dense", "lexical:0.5", "--no-controls"))
    dense, sparse = report.rows
    assert code == 1
    assert dense.failed is None
    assert dense.figures["score"].n == 2
    assert sparse.failed is not None
    assert "planning failed: scorer_failed" in sparse.failed


def test_replies_do_not_depend_on_concurrency(evaluate: Callable[..., tuple[int, Report]]) -> None:
    """A small float32 model: rounding in larger batches moves no greedy choice here."""
    command = ("needle", "--contexts", "700", "--n", "5", "--modes", "dense", "lexical:0.5")
    alone, together = (evaluate(*command, "--concurrency", count) for count in ("1", "4"))
    assert alone[0] == together[0] == 0
    for one, other in zip(alone[1].rows, together[1].rows, strict=True):
        replies = [[sample["reply"] for sample in row.notes["samples"]] for row in (one, other)]
        assert replies[0] == replies[1]
        assert len(replies[0]) == 5


def without_costs(row: Row) -> list[dict[str, Any]]:
    """The samples of a row, without the figures that depend on what is cached."""
    samples = row.notes["samples"]
    return [{name: value for name, value in one.items() if name not in OF_CACHE} for one in samples]


@pytest.mark.parametrize(
    ("task", "modes"),
    [
        (
            "needle",
            ("dense", "slow-fast,decode_budget=128", "lexical:0.5", "lexical:0.5,kv_cache_dtype=int8"),
        ),
        ("turns", ("fast-only,decode_budget=128", "dense", "lexical:0.5,slow_fast=on", "lexical:0.5")),
    ],
)
def test_modes_that_share_prompts_measure_as_alone_but_for_costs(
    task: str,
    modes: tuple[str, ...],
    evaluate: Callable[..., tuple[int, Report]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second prompt of `turns` begins with the reply that the mode gave to the first."""
    command = (task, "--contexts", "1000", "--n", "4", "--no-controls", "--modes", *modes)
    alone, alone_shown = evaluate(*command), capsys.readouterr().out
    shared, shared_shown = evaluate(*command, "--share-prompts"), capsys.readouterr().out
    assert alone[0] == shared[0] == 0
    assert (SHARED in alone_shown, SHARED in shared_shown) == (False, True)
    assert [one[1].settings["share_prompts"] for one in (alone, shared)] == [False, True]
    for one, other in zip(alone[1].rows, shared[1].rows, strict=True):
        assert one.key == other.key
        assert without_costs(one) == without_costs(other) == other.notes["samples"]
        assert one.figures.keys() - other.figures.keys() == set(OF_CACHE) & one.figures.keys()
        assert "ttft" in one.figures
    assert ("computed" in alone[1].rows[0].figures) == (task == "turns")


def test_modes_that_share_nothing_keep_their_costs(
    evaluate: Callable[..., tuple[int, Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = evaluate(*words("needle", "--modes", "dense", "--share-prompts"))
    assert "ttft" in report.rows[0].figures
    assert SHARED not in capsys.readouterr().out
    assert report.settings["share_prompts"] is False


def test_modes_that_compute_the_same_prompt_share_a_salt() -> None:
    same = [["dense", "slow-fast", "dense,kv_cache_dtype=int8"], ["blend:0.1", "blend:0.1,slow_fast=on"]]
    own = ["blend:0.2", "auto", "auto,slow_fast=on", "blocksparse", "blocksparse,slow_fast=on"]
    salts = salts_of(parse_modes([*itertools.chain(*same), *own], controls=False))
    groups = [{salts[name] for name in names} for names in same]
    assert [len(group) for group in groups] == [1, 1]
    assert len(set(salts.values())) == len(same) + len(own)
    assert {name: salts[name] for name in own} == {name: name for name in own}


def test_modes_that_share_prompts_compute_them_once(llm: LLM) -> None:
    task, cell = Needle(packaged_text()), Cell("single", 700)
    modes = parse_modes(["dense", "slow-fast,decode_budget=128"])
    with Engines(llm, shared_by=modes) as engines:
        samples = [Drawer(llm, task, seed=0).draw(cell, number) for number in range(2)]
        assert engines.of(modes[0]) is engines.of(modes[1])
        rows = measure(engines, task, cell, samples, modes, n=2)
        computed = engines.of(modes[0]).engine.stats().tokens_computed
    assert [row.failed for row in rows] == [None, None]
    dense, slow_fast = (row.notes["samples"] for row in rows)
    prompts = sum(sample["prompt_tokens"] for sample in dense)
    assert prompts < computed < 1.5 * prompts
    assert [one["expected"] for one in dense] == [one["expected"] for one in slow_fast]


def test_a_mode_that_fails_leaves_the_modes_that_share_its_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, cell = Needle(packaged_text()), Cell("single", 700)
    modes = parse_modes(["dense", "slow-fast,decode_budget=128"])
    samples = [Drawer(llm, task, seed=0).draw(cell, number) for number in range(3)]
    asked: list[str] = []

    def grade(sample: Sample, reply: str) -> dict[str, float]:
        asked.append(reply)
        if len(asked) == 4:  # the second sample in the second mode
            raise ValueError("no grade")
        return {"score": 1.0}

    monkeypatch.setattr(task, "grade", grade)
    with Engines(llm, shared_by=modes) as engines:
        dense, slow_fast = measure(engines, task, cell, samples, modes, n=3)
    assert dense.failed is None
    assert slow_fast.failed == "sample 1: ValueError: no grade"
    assert len(asked) == 5


def test_a_failing_sample_ends_a_concurrent_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    task, cell = Needle(packaged_text()), Cell("single", 700)
    samples = [Drawer(llm, task, seed=0).draw(cell, number) for number in range(6)]

    def grade(sample: Sample, reply: str) -> dict[str, float]:
        if sample is samples[3]:
            raise ValueError("no grade")
        return {"score": 1.0}

    monkeypatch.setattr(task, "grade", grade)
    (row,) = measure(Engines(llm), task, cell, samples, [DENSE], n=6, concurrency=3)
    assert row.failed == "sample 3: ValueError: no grade"
    assert main(["eval", "needle", "--concurrency", "0"]) == 2


def test_missing_samples_and_nan_grades_fail_their_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    task, cell = Needle(packaged_text()), Cell("single", 800)
    samples = [Drawer(llm, task, seed=0).draw(cell, number) for number in range(2)]
    (short,) = measure(Engines(llm), task, cell, samples[:1], [DENSE], n=2)
    assert short.failed == "1 of 2 samples completed"
    monkeypatch.setattr(task, "grade", lambda sample, reply: {"score": math.nan})
    (bad,) = measure(Engines(llm), task, cell, samples, [DENSE], n=2)
    assert "nan" in str(bad.failed)


def test_dense_beyond_the_context_window_fails_only_its_own_row(
    evaluate: Callable[..., tuple[int, Report]],
) -> None:
    code, report = evaluate(
        *("needle", "--contexts", "1500", "--n", "2", "--no-controls", "--modes", "dense", "lexical:600t")
    )
    dense, sparse = report.rows
    assert code == 1
    assert "1024" in str(dense.failed)
    assert sparse.failed is None
    assert 0 < sparse.figures["read"].value < 0.5


# -- wrong usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["needle", "--n", "0"], "--n must be at least 1"),
        (["needle", "--contexts", "0"], "--contexts must be"),
        (["needle", "--contexts", "50"], "a context of 50 tokens is too short"),
        (["needle", "--depths", "2"], "--depths must be from 0 to 1"),
        (["needle", "--depths", "0.5", "--kinds", "four"], "--depths has no meaning for four"),
        (["needle", "--modes", "clever"], "unknown mode 'clever'; write"),
        (["needle", "--modes", "dnese"], "unknown mode 'dnese'; did you mean 'dense'?"),
        (["needle", "--modes", "blend:0.1,folow_up=a"], "not a setting of modes; did you mean 'follow_up'?"),
        (
            ["needle", "--modes", "blend:0.1,zzz=1"],
            "not a setting of modes; its settings: min_prompt_tokens,",
        ),
        (["needle", "--modes", "dense,decode_budget=9"], "decode_budget needs slow_fast=on, auto or exact"),
        (["needle", "--modes", "blend:abc"], "'abc' is neither a fraction, as in `blend:0.05`, nor a number"),
        (["needles"], "(did you mean needle?)"),
        (["needle", "--kinds", "haystack"], "invalid choice"),
        (["needle", "--text", "nowhere.txt"], "nowhere.txt"),
        (["needle", "--contxts", "50"], "did you mean --contexts?"),
        (["agree", "--contexts", "50"], "no prompt before the 64 tokens"),
        (["agree", "--tokens", "0"], "--tokens must be at least 1"),
        (["needle", "--kept-only", "--modes", "dense"], "--kept-only has nothing to plan: dense"),
        (["count", "--kept-only"], "unknown option --kept-only"),
        (["evidence", "--depths", "0.5", "--kinds", "two"], "--depths has no meaning for two"),
        (["qa"], "--data"),
        (["dance"], "invalid choice"),
    ],
)
def test_wrong_usage_is_reported_before_anything_runs(
    evaluate: Callable[..., tuple[int, Report]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    try:
        code = main(["eval", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_sample_is_plain_data() -> None:
    assert Sample((("a", "b"),), ("c",), 8) == Sample((("a", "b"),), ("c",), 8)
