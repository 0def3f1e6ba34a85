"""Comparing two reports: which changes are flagged, in which direction, and which never are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skim.bench import decode, ttft
from skim.bench.ceiling import Ceiling
from skim.bench.drive import FirstToken, Phases, Steps
from skim.bench.work import Work
from skim.cli.bench import compare as bench_compare
from skim.cli.main import main
from skim.cli.settings.parser import Parser
from skim.measure.compare import Verdict, compare, judge, listing
from skim.measure.report import Figure, MeasurementError, Report, Row, plain, score, timing
from skim.memory.store import LayerShape


def report(*rows: Row, kind: str = "bench ttft", **fields: Any) -> Report:
    about: dict[str, Any] = {"settings": {"seed": 0}, "machine": {"cores": 2}, "versions": {"skim": "1"}}
    return Report(kind, ["skim", "bench", "ttft"], rows=rows, **{**about, **fields})


def row(mode: str, **figures: Figure) -> Row:
    return Row({"context": 4096, "mode": mode}, figures)


FEW, MANY = (timing([n, n, n + 1], "tok/s", better="higher") for n in (10, 20))
SLOW, FAST = timing([1.9, 2.0, 2.1]), timing([0.9, 1.0, 1.1])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SLOW, FAST, Verdict.BETTER),
        (FAST, SLOW, Verdict.WORSE),
        (SLOW, timing([2.05, 2.5, 3.0]), Verdict.SAME),  # 2.05 to 2.1 are in both
        (timing([1.0, 2.0]), timing([2.0, 3.0]), Verdict.SAME),  # they touch
        (FEW, MANY, Verdict.BETTER),
        (MANY, FEW, Verdict.WORSE),
        (timing([1.0, 1.1]), timing([9.0, 9.1]), Verdict.FEW),  # one pair in three is disjoint by chance
        (timing([1.0, 1.1, 1.2]), timing([1.3, 1.4, 1.5]), Verdict.FEW),  # a gap no wider than they are
        (timing([1.0, 1.1, 1.2]), timing([1.45, 1.5, 1.6]), Verdict.WORSE),  # a gap of 0.25, and 0.2 wide
        (timing([1.0, 1.0, 1.0]), timing([1.04, 1.04, 1.04]), Verdict.FEW),  # a gap of less than 5%
        (timing([1.0, 1.0, 1.0]), timing([1.06, 1.06, 1.06]), Verdict.WORSE),
        (timing([1.0, 1.0, 1.2] * 2), timing([1.21] * 5), Verdict.WORSE),  # enough repeats
        (timing([1.0, 1.0, 1.2] * 2), timing([1.21] * 4), Verdict.FEW),
        (timing([1.0]), timing([9.0]), Verdict.UNKNOWN),
        (timing([0.5], "share", better="higher"), timing([0.4], "share", better="higher"), Verdict.UNKNOWN),
        (score([0.5], unit="nats"), score([0.6], unit="nats"), Verdict.UNKNOWN),
        (timing([1.0]), SLOW, Verdict.UNKNOWN),
        (plain(2, "bytes", better="lower"), plain(1, "bytes", better="lower"), Verdict.BETTER),
        (plain(2, "tokens"), plain(1, "tokens"), Verdict.CHANGED),
        (plain(2, "tokens"), plain(2, "tokens"), Verdict.SAME),
        (score([1.0] * 20), score([0.0] * 20), Verdict.WORSE),
        (score([1.0] * 2), score([0.0] * 2), Verdict.SAME),  # two samples each prove little
        (plain(1, "s"), plain(1, "ms"), Verdict.INCOMPARABLE),
    ],
)  # fmt: skip
def test_a_figure_changed_if_the_ranges_do_not_overlap(
    before: Figure, after: Figure, expected: Verdict
) -> None:
    assert judge(before, after) is expected


def test_rows_are_matched_by_key_and_ratios_are_after_over_before() -> None:
    before = report(row("dense", ttft=SLOW), row("blend", ttft=SLOW))
    after = report(row("blend", ttft=FAST), Row({"mode": "dense", "context": 4096}, {"ttft": SLOW}))
    found = compare(before, after)
    assert [(one.key, one.ratio, one.verdict) for one in found.changes] == [
        ("context 4096, mode dense", 1.0, Verdict.SAME),
        ("context 4096, mode blend", 0.5, Verdict.BETTER),
    ]
    assert not found.regressions
    assert "+ ttft [s]  2.00 (1.90-2.10) -> 1.00 (0.900-1.10)  x0.500  better" in listing(found)


def test_zero_has_no_ratio() -> None:
    found = compare(report(row("a", kept=plain(0, "share"))), report(row("a", kept=plain(0.5, "share"))))
    assert [(one.ratio, one.verdict) for one in found.changes] == [(None, Verdict.CHANGED)]
    listing(found)


def test_unmatched_and_failed_rows_are_listed_but_not_compared() -> None:
    before = report(
        row("kept", ttft=SLOW),
        row("gone", ttft=SLOW),
        row("breaks", ttft=SLOW),
        Row({"mode": "broken"}, failed="no memory"),
        Row({"mode": "mended"}, failed="no memory"),
        row("poorer", ttft=SLOW, scoring=SLOW),
    )
    after = report(
        row("kept", ttft=SLOW),
        Row({"context": 4096, "mode": "breaks"}, failed="crashed"),
        Row({"mode": "broken"}, failed="no memory"),
        Row({"mode": "mended"}, {"ttft": SLOW}),
        row("poorer", ttft=SLOW),
        row("new", ttft=SLOW),
    )
    found = compare(before, after)
    assert {one.key for one in found.changes} == {"context 4096, mode kept", "context 4096, mode poorer"}
    assert found.lost == [
        "context 4096, mode gone: only in A",
        "context 4096, mode breaks: failed in B: crashed",
        "context 4096, mode poorer: scoring only in A",
    ]
    assert found.regressions == found.lost, "a gate must not pass because rows are missing"
    assert found.others == [
        "context 4096, mode new: only in B",
        "mode broken: failed in A and in B: no memory",
        "mode mended: failed in A only: no memory",
    ]
    text = listing(found)
    assert all(entry in text for entry in [*found.lost, *found.others])


def test_differences_in_machine_versions_and_settings_are_noted() -> None:
    other = report(row("a", ttft=SLOW), machine={"cores": 64, "gpu": "H200"}, settings={"seed": 1})
    assert compare(report(row("a", ttft=SLOW)), other).notes == [
        "machine: cores is 2 in A, 64 in B",
        "machine: gpu is nothing in A, H200 in B",
        "settings: seed is 0 in A, 1 in B",
    ]


def test_measured_values_are_not_differences_in_settings() -> None:
    a, b = (
        report(row("a", ttft=SLOW), settings={"seed": 0, "ceiling": {"flops": n}, "crossover": {"x": n}})
        for n in (1, 2)
    )
    assert compare(a, b).notes == []


def noisy_decode(rng: random.Random, repeats: int, noise: float) -> dict[str, Figure]:
    samples = [
        decode.Sample(Steps(tuple(0.01 * (1 + abs(rng.gauss(0, noise))) for _ in range(24)), (10,)), 5_000)
        for _ in range(repeats)
    ]
    return decode.figures_of(samples, bandwidth=1e6)


def noisy_ttft(rng: random.Random, repeats: int, noise: float) -> dict[str, Figure]:
    layers = (LayerShape(kv_heads=2, key_dim=8, value_dim=4),)
    work = Work(1000, 50, 4200, query_heads=4, layers=layers)
    samples = []
    for repeat in range(repeats):
        parts = [seconds * (1 + abs(rng.gauss(0, noise))) for seconds in (0.1, 0.3, 0.6)]
        phases = Phases(*parts, kept=48 + repeat % 5, cached=0)  # depends on the prompt, not on chance
        samples.append(FirstToken(sum(parts), 0.05 * (1 + abs(rng.gauss(0, noise))), 100, phases))
    return ttft.figures_of(samples, (work, Ceiling(flops=1e6, bandwidth=1e6)))


@pytest.mark.parametrize("make", [noisy_decode, noisy_ttft])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_two_runs_of_the_same_thing_show_no_change(
    make: Callable[[random.Random, int, float], dict[str, Figure]], repeats: int, noise: float
) -> None:
    rng = random.Random(0)
    flagged: dict[str, int] = {}
    runs = 500
    for _ in range(runs):
        a, b = (report(row("a", **make(rng, repeats, noise))) for _ in range(2))
        for change in compare(a, b).changes:
            moved = change.verdict in (Verdict.BETTER, Verdict.WORSE, Verdict.CHANGED)
            flagged[change.name] = flagged.get(change.name, 0) + moved
    assert {"step_p99", "of_floor"} <= flagged.keys() or {"ttft_p99", "of_peak", "gflops"} <= flagged.keys()
    assert max(flagged.values()) <= 0.03 * runs, flagged


@pytest.mark.parametrize("repeats", [3, 5])
def test_a_run_at_half_the_speed_is_flagged(repeats: int) -> None:
    rng = random.Random(0)
    slow = {
        name: timing([2 * x for x in (f.low, f.value, f.high)] * 2)
        for name, f in noisy_ttft(rng, repeats, 0.05).items()
        if f.unit == "s" and name != "queue"
    }
    found = compare(report(row("a", **noisy_ttft(rng, repeats, 0.05))), report(row("a", **slow)))
    assert {one.name: one.verdict for one in found.changes} == dict.fromkeys(slow, Verdict.WORSE)


def test_reports_of_different_kinds_and_rows_with_one_key_are_refused() -> None:
    mine = report(row("a", ttft=SLOW))
    with pytest.raises(
        MeasurementError, match="a report of `skim bench ttft`, the second of `skim eval needle`"
    ):
        compare(mine, report(row("a", ttft=SLOW), kind="eval needle"))
    with pytest.raises(MeasurementError, match="both context 4096, mode a"):
        compare(mine, report(row("a", ttft=SLOW), row("a", ttft=FAST)))


def run(*arguments: str) -> int:
    parser = Parser(prog="skim bench compare")
    bench_compare.configure(parser)
    return bench_compare.run(parser.parse_args(arguments))


def test_regressions_set_the_exit_code_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    Path(a).write_text(report(row("dense", ttft=FAST)).to_json())
    Path(b).write_text(report(row("dense", ttft=SLOW)).to_json())
    assert run(a, b) == 0
    assert "! ttft [s]" in capsys.readouterr().out
    assert run(a, b, "--fail-on-regression") == 1
    assert run(b, a, "--fail-on-regression") == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "it is JSON, but not a report"),
        (b"[1]", "it is JSON, but not a report"),
        (b"| a | b |", "it is not JSON: "),
        (b"\xff\xfe", "it is not text"),
        (b'{"format": 99}', "it is a report of format 99, and this version of Skim reads 1"),
        (b'{"format": 1, "rows": [1]}', "it is a damaged report: "),
        (None, "No such file"),
    ],
)
def test_errors_name_files_that_are_not_reports(
    content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(report(row("dense", ttft=FAST)).to_json())
    if content is not None:
        bad.write_bytes(content)
    assert main(["bench", "compare", str(good), str(bad)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"skim bench compare: cannot read {bad}: {reason}")
    assert error.endswith("; give a report written by skim bench or skim eval with --json\n")


def test_errors_name_files_of_different_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(report(row("dense", ttft=FAST)).to_json())
    b.write_text(report(row("dense", ttft=FAST), kind="eval needle").to_json())
    assert main(["bench", "compare", str(a), str(b)]) == 2
    assert capsys.readouterr().err == (
        f"skim bench compare: cannot compare {a} with {b}: the first is a report of `skim bench ttft`, "
        "the second of `skim eval needle`; give two of one command\n"
    )


def test_rows_of_different_models_are_not_matched() -> None:
    def of(model: str, seconds: Figure) -> Row:
        return Row({"model": model, "context": 4096, "mode": "dense"}, {"ttft": seconds})

    found = compare(report(of("a", SLOW), of("b", FAST)), report(of("b", FAST), of("c", FAST)))
    assert [(one.key, one.verdict) for one in found.changes] == [
        ("context 4096, mode dense, model b", Verdict.SAME)
    ]
    assert found.lost == ["context 4096, mode dense, model a: only in A"]
    assert found.others == ["context 4096, mode dense, model c: only in B"]


def test_the_help_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "95% intervals do not overlap and both have n >= 5" in shown
    assert "must exceed both the width of the wider range and 5% of the value" in shown
