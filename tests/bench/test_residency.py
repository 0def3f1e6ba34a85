"""`skim bench ttft --residency`: a row without sparse prefill and one for each policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from skim.bench import residency
from skim.bench.residency import POLICIES, WITHOUT, listing
from skim.cli.bench import residency as command
from skim.cli.main import main
from skim.engine.engine import Engine
from skim.errors import ConfigError
from skim.measure.report import Row, plain
from skim.models.offload import HostLayers

Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def compare(run: Callable[..., tuple[int, dict[str, Any]]], shape: str) -> Run:
    """Run a comparison of policies; returns its exit code and the report's rows."""

    def go(*options: str, drafter: Sequence[str] = ("--drafter-shape", shape)) -> tuple[int, list[Any]]:
        given = ["--contexts", "300", "--repeats", "2", "--modes", "lexical:0.2"]
        code, report = run("ttft", *drafter, *given, *options)
        return code, report["rows"]

    return go


def times(row: dict[str, Any]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in row["figures"].items()}


def test_there_is_a_row_without_sparse_prefill_and_one_for_each_policy(
    compare: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = compare("--residency", "--contexts", "400", "300", "--modes", "dense", "attention:0.2")
    assert code == 0
    cases = [WITHOUT, *POLICIES]
    assert [(row["key"]["context"], row["key"]["mode"]) for row in rows] == [
        (context, case) for context in (300, 400) for case in cases
    ]
    for row in rows:
        found, moves = times(row), row["key"]["mode"] in ("swap", "keep-target")
        assert row["figures"]["ttft"]["n"] == 2
        assert (found["transfer"] > 0) is moves
        assert (found["scoring"] > 0) is (found["kept"] < 1) is (row["key"]["mode"] != WITHOUT)
        assert found["scoring"] + found["prefill"] <= found["ttft"]
    first = [line for line in capsys.readouterr().out.splitlines() if WITHOUT in line]
    assert len(first) == 2
    assert all(line.endswith("1.00x") for line in first)


def test_policies_can_be_chosen(compare: Run) -> None:
    _, rows = compare("--residency", "both", "swap")
    assert [row["key"]["mode"] for row in rows] == [WITHOUT, "swap", "both"]


def test_engines_share_the_models_and_their_memory_returns(
    compare: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Engine]] = []
    models = set()
    begin = residency.start

    def watch(*given: Any) -> Any:
        assert [ref for ref in seen if ref() is not None] == []  # those before it have gone
        driver = begin(*given)
        seen.append(weakref.ref(driver.engine))
        models.add(id(driver.model))
        assert (driver.engine.drafter is None) is (len(seen) == 1)
        return driver

    monkeypatch.setattr(residency, "start", watch)
    code, _ = compare("--residency")
    assert code == 0
    assert (len(seen), len(models)) == (4, 1)


def test_a_case_that_cannot_run_fails_the_command_with_its_reason(
    compare: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = residency.start

    def refuse(models: Any, config: Any, mode: Any, policy: str | None) -> Any:
        if policy == "keep-target":
            raise ConfigError("the GPU has too little memory")
        return begin(models, config, mode, policy)

    monkeypatch.setattr(residency, "start", refuse)
    code, rows = compare("--residency")
    assert code == 1
    assert [row["failed"] for row in rows] == [None, None, "the GPU has too little memory", None]
    assert "FAILED: the GPU has too little memory" in capsys.readouterr().out


def test_the_row_says_how_many_layers_are_on_the_host(compare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no layer fits: all of them are on the host, and come to the device for the other rows."""
    host = [HostLayers(0)]
    monkeypatch.setattr(HostLayers, "wanted", lambda *_: host.pop() if host else None)
    code, rows = compare("--residency")
    assert code == 0
    assert [row["key"]["mode"] for row in rows] == [f"{WITHOUT}, 4 of 4 layers on the host", *POLICIES]


def test_speed_is_relative_to_the_first_row_of_a_context() -> None:
    def row(context: int, name: str, ttft: float) -> Row:
        names = ("ttft", "transfer", "scoring", "prefill")
        figures = {one: plain(ttft, "s") for one in names} | {"kept": plain(0.1, "share")}
        return Row({"model": "m", "context": context, "mode": name}, figures)

    rows = [row(1, WITHOUT, 4.0), row(1, "swap", 0.5), row(2, WITHOUT, 6.0), row(2, "swap", 2.0)]
    assert [line.split()[-1] for line in listing(rows).splitlines()[2:]] == [
        "1.00x",
        "8.00x",
        "1.00x",
        "3.00x",
    ]
    failed = Row({"model": "m", "context": 1, "mode": WITHOUT}, failed="no")
    lines = listing([failed, rows[1]]).splitlines()[2:]
    assert "FAILED: no" in lines[0]
    assert not lines[1].endswith("x")  # there is nothing to compare with


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--warm"], "--warm cannot be combined with --residency"),
        (["--peer", "transformers"], "--peer cannot be combined"),
        (["--modes", "dense"], "needs one mode that skims"),
        (["--modes", "blocksparse"], "needs one mode that skims"),
        (["--modes", "lexical:0.1", "lexical:0.2"], "got lexical:0.1 lexical:0.2"),
        (["--offload-layers", "2"], "decides about offload_layers itself"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(
    options: list[str], message: str, shape: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "measure_models", lambda *_: pytest.fail("measured"))
    given = ["--shape", shape, "--drafter-shape", shape, "--residency", *options]
    assert main(["bench", "ttft", *given]) != 0
    assert message in capsys.readouterr().err


def test_a_drafter_is_needed(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttft", "--shape", shape, "--residency"]) != 0
    assert "set --drafter or --drafter-shape" in capsys.readouterr().err
