"""`skim bench ttft`, `decode` and `kv`: their reports, and that no broken run passes for a result."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.bench.drive import Driver, FirstToken
from skim.cli import main as main_parser
from skim.cli.bench.models import choices_of
from skim.cli.main import main
from skim.config import EngineConfig
from skim.engine.core import EngineCore
from skim.engine.lifecycle import Lifecycle
from skim.engine.runner import Forward, Runner
from skim.engine.sequence import Delta, RequestState
from skim.errors import ModelError
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape
from skim.prefill.plan import DenseReason
from skim.prefill.plan_queue import PlanQueue
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.prefill.scorers.lexical import LexicalScorer
from tests import tiny
from tests.live import serving

COMMANDS: dict[str, list[str]] = {
    "ttft": ["--contexts", "300", "--modes", "dense", "lexical:0.1", "--repeats", "2"],
    "decode": ["--contexts", "64", "--batch", "2", "--repeats", "2", "--steps", "3"],
    "kv": ["--contexts", "64", "--repeats", "2", "--steps", "3"],
}

FREEZE, UNFREEZE = gc.freeze, gc.unfreeze

Run = Callable[..., tuple[int, dict[str, Any]]]


def rows_of(report: dict[str, Any], **key: Any) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["key"].items() >= key.items()]


def values(row: dict[str, Any]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in row["figures"].items()}


# -- reports


def test_the_parts_of_the_time_to_first_token_add_up(
    run: Run, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run("ttft", "--contexts", "300", "900", "--modes", "dense", "blend:0.1", "--warm")
    assert code == 0, capsys.readouterr()
    assert report["kind"] == "bench ttft"
    assert report["command"][:3] == ["skim", "bench", "ttft"]
    assert [tuple(row["key"].values()) for row in report["rows"]] == [
        (shape, context, mode, state)
        for context in (300, 900)
        for mode in ("dense", "blend:0.1")
        for state in ("cold", "warm")
    ]
    columns = ["ttft", "ttft_p99", "queue", "scoring", "prefill", "first_decode", "kept"]
    for row in report["rows"]:
        found = values(row)
        cold = row["key"]["state"] == "cold"
        assert list(found) == [*columns, *(["gflops", "of_peak"] if cold else [])]
        assert {figure["n"] for figure in row["figures"].values()} == {3}
        assert found["queue"] + found["scoring"] + found["prefill"] == pytest.approx(found["ttft"])
        assert found["ttft_p99"] >= found["ttft"]
        assert found["first_decode"] > 0
        assert (found["scoring"] > 0) == (row["key"]["mode"] != "dense")
        if cold:
            assert found["of_peak"] == pytest.approx(found["gflops"] / 100) != 0
    [cold] = rows_of(report, context=900, mode="blend:0.1", state="cold")
    assert values(cold)["kept"] < 1
    shown = capsys.readouterr().out
    assert "FAILED" not in shown
    assert "in float32; measured ceiling 100 GFLOP/s, 10.0 GB/s" in shown.splitlines()[1]
    assert shown.splitlines()[3].split()[:3] == ["context", "mode", "state"], "one model is not repeated"


def test_rates_are_flops_divided_by_prefill_time(run: Run, shape: str) -> None:
    _, report = run("ttft", "--contexts", "300", "--modes", "dense", "--repeats", "1")
    found = values(report["rows"][0])
    body = 4 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96)  # q, k and v, o, mlp
    pairs = 300 * 301 // 2
    flops = 2 * body * 300 + 2 * 64 * 258 + 4 * 2 * 4 * (32 + 32) * pairs
    assert found["gflops"] == pytest.approx(flops / found["prefill"] / 1e9)
    assert found["of_peak"] == pytest.approx(found["gflops"] / 100)


def test_three_contexts_give_a_crossover(run: Run, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--contexts", "200", "300", "400", "--modes", "dense", "lexical:0.1", "--repeats", "2"]
    _, report = run("ttft", *options)
    assert set(report["settings"]["crossover"][shape]) == {"lexical:0.1"}
    assert "crossover: lexical:0.1 is" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [["ttft"], ["decode", "--batch", "1"]])
def test_prompts_that_can_never_be_read_are_not_made(run: Run, kind: list[str]) -> None:
    code, report = run(*kind, "--contexts", "300", "10000000000", "--modes", "dense", "--repeats", "1")
    assert code == 1
    assert [row["failed"] is None for row in report["rows"]] == [True, False]
    assert "10000000000 tokens, which leaves no room for output" in report["rows"][1]["failed"]


def test_beyond_the_context_window_only_dense_fails_and_sparse_is_compact(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Lifecycle._planned
    positions: dict[int, set[str]] = {}

    def noting(life: Lifecycle, state: RequestState, planned: Planned, begun_at: float) -> None:
        assert planned.plan is not None
        positions.setdefault(len(state.request.prompt_token_ids), set()).add(planned.plan.positions)
        inner(life, state, planned, begun_at)

    monkeypatch.setattr(Lifecycle, "_planned", noting)
    options = ["--modes", "dense", "lexical:0.1", "--repeats", "1", "--max-model-len", "512"]
    code, report = run("ttft", "--contexts", "300", "700", *options)
    assert code == 1
    [failed] = [row for row in report["rows"] if row["failed"]]
    assert (failed["key"]["context"], failed["key"]["mode"]) == (700, "dense")
    assert "leaves no room for output in the context window of 512" in failed["failed"]
    assert positions == {300: {"original"}, 700: {"compact"}}
    [sparse] = rows_of(report, context=700, mode="lexical:0.1")
    assert 0 < values(sparse)["kept"] < 512 / 700


def test_auto_is_dense_below_its_threshold_and_sparse_above(run: Run) -> None:
    auto = "auto:0.1,min_prompt_tokens=600"
    code, report = run("ttft", "--contexts", "300", "900", "--modes", "dense", auto, "--repeats", "2")
    assert code == 0
    [below], [above] = (rows_of(report, context=context, mode=auto) for context in (300, 900))
    assert (values(below)["kept"], values(below)["scoring"]) == (1, 0)
    assert values(above)["kept"] < 1
    assert values(above)["scoring"] > 0
    code, report = run(
        "decode", "--contexts", "300", "900", "--modes", auto, "--repeats", "1", "--steps", "3"
    )
    assert code == 0
    floors = [values(row)["floor"] for row in rows_of(report, batch=1)]
    assert floors[1] < floors[0] * 900 / 300


def test_auto_fails_if_it_falls_back_above_its_threshold(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanQueue, "add", failing_plan)
    code, report = run("ttft", "--contexts", "300", "900", "--modes", "auto,min_prompt_tokens=600")
    assert code == 1
    below, above = (row["failed"] for row in report["rows"])
    assert below is None
    assert above.startswith("the prompt was not skimmed but read in full: ")


def test_decode_has_a_floor_of_weights_and_keys_and_values(run: Run, shape: str) -> None:
    sparse = "lexical:0.1,min_scored_tokens=64"
    options = ["--contexts", "400", "--batch", "1", "2", "--modes", "dense", sparse]
    code, report = run("decode", *options, "--repeats", "1", "--steps", "4")
    assert code == 0
    assert len(report["rows"]) == 4
    norms = 4 * (2 * 32 + 2 * 64) + 64
    weights = 4 * (4 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96) + norms + 64 * 258)
    assert report["settings"]["models"][shape]["weight_bytes"] == weights
    [row] = rows_of(report, batch=2, mode="dense")
    found = values(row)
    per_token = 4 * 2 * (32 + 32) * 4
    tokens = round((found["floor"] / 1e3 * 1e10 - weights) / 2 / per_token)
    assert 400 < tokens <= 400 + 2 + 4
    assert found["throughput"] == pytest.approx(2 / (found["step"] / 1e3))
    assert found["of_floor"] == pytest.approx(found["floor"] / found["step"])
    [row] = rows_of(report, batch=2, mode=sparse)
    assert values(row)["floor"] < found["floor"]


def test_kv_has_no_drafter(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--drafter", "--drafter-shape", "--drafter-dtype", "--drafter-quantization"):
        with pytest.raises(SystemExit, match="2"):
            run("kv", option, "some")
        assert f"unknown option {option}" in capsys.readouterr().err
    monkeypatch.setenv("SKIM_DRAFTER", "/no/such/model")
    code, report = run("kv", *COMMANDS["kv"])
    assert code == 0, "the variable is a setting of other commands"
    assert report["settings"]["drafter"] is None


def test_kv_reports_bytes_and_capacity(run: Run, shape: str) -> None:
    code, report = run("kv", *COMMANDS["kv"])
    assert code == 0
    head = {"float32": 2 * 4 * 32, "int8": 2 * (32 + 4), "int4": 2 * (16 + 4), "k8v4": (32 + 4) + (16 + 4)}
    assert [row["key"]["format"] for row in report["rows"]] == list(head)  # all that the CPU has
    for row in report["rows"]:
        name = row["key"]["format"]
        assert row["key"] == {"model": shape, "format": name, "context": 64, "batch": 1}
        size = 4 * 2 * head[name]  # layers, KV heads
        assert values(row)["bytes_per_token"] == size
        assert values(row)["capacity"] == 16 * 2**20 // (16 * size) * 16
    code, report = run("kv", *COMMANDS["kv"], "--kv-cache-dtype", "int4")
    assert [row["key"]["format"] for row in report["rows"]] == ["float32", "int4"]


def test_decode_times_the_arms_of_slow_fast_decode(run: Run) -> None:
    arms = [f"{arm},decode_budget=64" for arm in ("slow-fast", "fast-only", "exact")]
    arms.append("slow-fast,decode_budget=64,refresh_margin=0")
    options = ["--contexts", "400", "--batch", "2", "--modes", "dense", *arms, "--repeats", "1"]
    code, report = run("decode", *options, "--steps", "12")
    assert code == 0
    assert len(report["rows"]) == 5
    assert all(values(row)["step_mean"] > 0 for row in report["rows"])
    dense, unsure, _, exact, slow_fast = (values(row)["floor"] for row in report["rows"])
    assert slow_fast < dense
    assert unsure > slow_fast, "random weights are hardly ever sure of a token"
    assert exact > slow_fast, "a token of exact mode takes more than one step, or one that reads everything"


def test_decode_compares_kv_formats(run: Run) -> None:
    modes = ["dense", "dense,kv_cache_dtype=int8", "lexical:0.1,min_scored_tokens=64,kv_cache_dtype=int4"]
    options = ["--contexts", "400", "--batch", "1", "--modes", *modes, "--repeats", "1", "--steps", "2"]
    code, report = run("decode", *options)
    assert code == 0
    floors = [values(row)["floor"] for row in report["rows"]]
    assert floors == sorted(floors, reverse=True)
    assert len(set(floors)) == 3


def test_pages_have_the_rows(run: Run, shape: str, tmp_path: Path) -> None:
    _, report = run("ttft", *COMMANDS["ttft"], "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    head = re.findall(r"<th[^>]*>([^<]*)</th>", text)
    figures = report["rows"][0]["figures"]
    titles = [f"{name} [{one['unit']}]" if one["unit"] != "share" else name for name, one in figures.items()]
    assert head == ["model", "context", "mode", "state", "speedup over dense", *titles]
    rows = [
        re.findall(r"<td[^>]*>([^<]*)</td>", row)
        for row in re.findall(r"<tr>\s*<td.*?</tr>", text, re.DOTALL)
    ]
    assert [row[:4] for row in rows] == [[shape, "300", mode, "cold"] for mode in ("dense", "lexical:0.1")]
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_no_report_shows_a_peers_password(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    with serving(NeverReady) as url:
        host = url.removeprefix("http://")
        peer = f"http://me:s3cret@{host}"
        code, report = run(
            "ttft", *COMMANDS["ttft"], "--html", str(page), "--peer", peer, f"--peer={peer}/v1"
        )
    assert code == 1, "the server answers nothing but its models"
    shown = capsys.readouterr()
    assert f"http://{host}" in report["command"]
    assert f"--peer=http://{host}/v1" in report["command"]
    for text in (json.dumps(report), page.read_text(), shown.out, shown.err):
        assert host in text
        assert "s3cret" not in text


class NeverReady(BaseHTTPRequestHandler):
    """A server that lists a model and fails every request for it."""

    def do_GET(self) -> None:
        self.answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.answer(500, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("command", ["ttft", "decode"])
def test_a_peer_that_cannot_take_part_fails_before_anything_is_measured(
    command: str, shape: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skim.cli.bench.models._prepare", lambda _: pytest.fail("a model was fetched"))
    assert main(["bench", command, "--shape", shape, "--peer", "llama.cpp"]) == 2
    assert "--peer: llama.cpp needs a GGUF file, got a shape" in capsys.readouterr().err
    monkeypatch.setattr("skim.bench.llama.find_spec", lambda _: None)
    assert main(["bench", command, "--peer", "llama.cpp"]) == 2
    assert "--peer: llama.cpp needs xllamacpp, which is not installed: pip install" in capsys.readouterr().err
    if command == "ttft":
        assert main(["bench", command, "--peer", "http://127.0.0.1:9"]) == 2
        assert "--peer: cannot reach http://127.0.0.1:9" in capsys.readouterr().err


# -- broken runs


def raising(*_: Any) -> Any:
    raise RuntimeError("a kernel broke")


def failing_plan(plans: PlanQueue, key: int, request: Request, finish: Any, fail: Any, **_: Any) -> None:
    finish(Planned(Reading(request.prompt_token_ids), fallback=DenseReason.SCORER_FAILED), 0.0)


def not_finite(runner: Runner, inputs: Sequence[Any], *_: Any) -> Forward:
    return Forward(torch.full((sum(one.wants_logits for one in inputs), tiny.VOCAB), float("nan")), None)


def silent(life: Lifecycle, state: RequestState, event: Any) -> None:
    state.emit(Delta(event.index, "", (), (), event.finish_reason) if isinstance(event, Delta) else event)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("owner", "name", "broken", "reason"),
    [
        (Runner, "forward", raising, "a kernel broke"),
        (Runner, "forward", not_finite, "not finite"),
        (Lifecycle, "emit", silent, ""),
        (EngineCore, "_decide", raising, "a kernel broke"),
    ],
    ids=["raises", "NaN", "empty reply", "dies"],
)
def test_a_broken_engine_fails_every_command(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    owner: Any,
    name: str,
    broken: Any,
    reason: str,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    code, report = run(command, *COMMANDS[command])
    assert code == 1
    assert report["rows"]
    for row in report["rows"]:
        assert reason in row["failed"]
        assert not row["figures"]
    shown, failed = capsys.readouterr(), len(report["rows"])
    assert shown.out.count("FAILED: ") == failed, "each reason is printed once"
    assert f"skim bench {command}: {failed} of {failed} rows failed" in shown.err
    assert "FAILED" not in shown.err


def test_a_failed_scorer_fails_the_sparse_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LexicalScorer, "score", raising)
    code, report = run("ttft", *COMMANDS["ttft"])
    assert code == 1
    assert [row["failed"] for row in report["rows"]] == [
        None,
        "the prompt was not skimmed but read in full: scorer_failed",
    ]


def test_a_prompt_too_short_to_skim_fails_the_sparse_row(run: Run) -> None:
    for command in ("ttft", "decode"):
        code, report = run(command, "--contexts", "30", "--modes", "lexical:0.1", "--repeats", "1")
        assert code == 1
        assert all(row["failed"].endswith("read in full: short") for row in report["rows"])


def test_a_figure_that_is_not_finite_fails_its_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "first_token", lambda *_, **__: FirstToken(float("nan"), 0.1, 300))
    code, report = run("ttft", *COMMANDS["ttft"])
    assert code == 1
    assert all("not measured numbers" in row["failed"] for row in report["rows"])


def test_one_failed_repeat_fails_the_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Driver.first_token
    calls = iter(range(100))

    def sometimes(driver: Driver, *args: Any, **options: Any) -> FirstToken:
        if next(calls) == 3:
            raise RuntimeError("once")
        return inner(driver, *args, **options)

    monkeypatch.setattr(Driver, "first_token", sometimes)
    code, report = run("ttft", *COMMANDS["ttft"])
    assert code == 1
    assert sorted(row["failed"] or "" for row in report["rows"]) == ["", "RuntimeError: once"]


def test_a_report_needs_every_row(
    run: Run, monkeypatch: pytest.MonkeyPatch, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from skim.bench import decode

    monkeypatch.setattr(decode, "measure_decode", lambda *_: [])
    assert main(["bench", "decode", "--shape", shape, *COMMANDS["decode"]]) == 1
    assert "0 rows came back of 1" in capsys.readouterr().err


def test_a_cold_row_fails_if_the_prefix_cache_has_its_prompt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "forget", lambda _: None)
    _, report = run("ttft", "--contexts", "300", "--modes", "dense", "lexical:0.5", "--repeats", "1")
    assert ["tokens were found in the prefix cache" in (row["failed"] or "") for row in report["rows"]].count(
        True
    ) == 1


def test_a_warm_row_needs_a_prefix_cache(run: Run) -> None:
    options = ["--modes", "dense", "--repeats", "1", "--warm", "--no-enable-prefix-caching"]
    code, report = run("ttft", "--contexts", "300", *options)
    assert code == 1
    [cold, warm] = report["rows"]
    assert cold["failed"] is None
    assert "nothing was found in the prefix cache" in warm["failed"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["ttft", "--contexts", "0"], "--contexts must be at least 1, got 0"),
        (["ttft", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["ttft", "--modes", "fast"], "mode 'fast'"),
        (["ttft", "--peer", "vllm"], "unknown peer 'vllm'"),
        (["ttft", "smollm2-135m", "--shape", "qwen3-8b"], "--shape replaces models"),
        (["ttft", "smollm2-135m", "--model", "other"], "not allowed with argument MODEL"),
        (["ttft", "--drafter-shape", "qwen3-0.6b"], "--drafter-shape needs --shape"),
        (["ttft", "--shape", "qwen3-32b", "gpt-5"], "unknown shape 'gpt-5'"),
        (["ttft", "--context", "5"], "unknown option --context (did you mean --contexts?)"),
        (["decode", "--peer", "http://127.0.0.1:1"], "use `skim bench serve` for a URL"),
        (["decode", "--peer", "http://me:pw@127.0.0.1:1"], "unknown peer 'http://127.0.0.1:1'"),
        (["ttft", "--peer", "htp://me:pw@127.0.0.1:1"], "unknown peer 'htp://127.0.0.1:1'"),
        (["kv", "--json", "/nowhere/at/all.json"], "--json: there is no directory"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *options])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"skim bench {options[0]}: ")
    assert complaint in error


# -- several models


@pytest.fixture(scope="module")
def other_shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("other")
    tiny.CONFIGS["llama"]().save_pretrained(directory)
    return str(directory / "config.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_models_are_measured_one_after_the_other_and_rows_name_them(
    run: Run, shape: str, other_shape: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [shape, other_shape]
    model = ["--shape", *names, shape]  # a repeated name is the same model
    page = tmp_path / "page.html"
    code, report = run(command, *COMMANDS[command], "--html", str(page), model=model)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert list(report["settings"]["models"]) == names
    alone = [key for row in rows_of(report, model=shape) if (key := dict(row["key"])).pop("model")]
    assert [row["key"] for row in report["rows"]] == [
        {"model": name, **key} for name in names for key in alone
    ]
    [head] = [line for line in shown.out.splitlines() if line.startswith("model ")]
    lines = shown.out.splitlines()[shown.out.splitlines().index(head) + 1 :]
    assert [line.split()[0] for line in lines] == [name for name in names for _ in alone]
    assert [line for line in shown.err.splitlines() if line.startswith("model ")] == [
        f"model 1 of 2: {shape}",
        f"model 2 of 2: {other_shape}",
    ]
    if command != "kv":
        assert all(f"model {name}" in page.read_text() for name in names), "the plot labels its lines"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_cannot_be_measured_does_not_stop_the_others(
    run: Run, shape: str, other_shape: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skim.models import shapes

    inner = shapes.build_shape

    def build(name: str, *args: Any, **options: Any) -> LoadedModel:
        if name == other_shape:
            raise ModelError(f"{name} does not fit")
        return inner(name, *args, **options)

    monkeypatch.setattr(shapes, "build_shape", build)
    code, report = run(command, *COMMANDS[command], model=["--shape", other_shape, shape])
    assert code == 1
    failed, *others = report["rows"]
    assert failed["key"] == {"model": other_shape}
    assert "does not fit" in failed["failed"]
    assert others
    assert all(row["failed"] is None and row["key"]["model"] == shape for row in others)


def test_models_are_positional_arguments_or_a_flag() -> None:
    parsed = [
        main_parser.parse(["bench", "ttft", *words])
        for words in (
            ["a", "b", "--repeats", "1"],
            ["--repeats", "1", "a", "b"],
            ["--model", "a", "b"],
            ["a"],
        )
    ]
    assert [[choice.name for choice in choices_of(args)] for args in parsed] == [["a", "b"]] * 3 + [["a"]]
    [default] = choices_of(main_parser.parse(["bench", "decode"]))
    assert default.name == EngineConfig().model.model


def test_a_model_is_freed_before_the_next_is_loaded(
    run: Run, shape: str, other_shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skim.models import shapes

    inner = shapes.build_shape
    held: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    def noting(*args: Any, **options: Any) -> LoadedModel:
        alive.append([one() is not None for one in held])
        model = inner(*args, **options)
        held.append(weakref.ref(model.module))
        return model

    monkeypatch.setattr(shapes, "build_shape", noting)
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    options = ["--contexts", "300", "2000", "--modes", "dense", "blend:0.1", "--peer", "transformers"]
    code, _ = run("ttft", *options, "--repeats", "1", model=["--shape", shape, other_shape])
    assert code == 1, "dense fails beyond the context window, and its error must not keep the model alive"
    assert alive == [[], [False]]


# -- the driver


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-num-seqs", "2"], "a batch of 3 is more than max_num_seqs, 2; raise it"),
        (
            ["--kv-memory", "256K"],
            "3 rows of 67 tokens take 15 blocks, and the pool has 8; raise kv_memory",
        ),
    ],
)
def test_a_batch_that_cannot_run_together_fails(run: Run, options: list[str], reason: str) -> None:
    code, report = run(
        "decode", "--contexts", "64", "--batch", "3", "--repeats", "1", "--steps", "3", *options
    )
    assert code == 1
    [row] = report["rows"]
    assert re.fullmatch(reason, row["failed"])


@pytest.fixture
def driver(shape: str) -> Driver:
    config = EngineConfig.of(device="cpu", kv_memory="8M")
    model: LoadedModel = build_shape(shape, config.model)
    return Driver(model, config)


def test_filling_leaves_the_memory_consistent_and_empty(driver: Driver) -> None:
    from skim.bench.inputs import random_prompts, several
    from skim.config import PrefillConfig

    prompts = random_prompts(driver.model.vocab_size, 0)
    taken = driver.decode(several(prompts, 100, 0, 3), PrefillConfig(), 5)
    assert len(taken.seconds) == 5
    assert all(100 < context < 110 for context in taken.contexts)
    memory = driver.engine.core.memory
    memory.check()
    assert memory.pool.stats().live == 0
    assert driver.engine.stats().tokens_computed < 3 * 100
