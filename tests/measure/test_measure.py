"""Formulas against hand-computed cases; reports, modes and pages."""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy.stats import binomtest

from skim.config import DecodeConfig, EngineConfig, PrefillConfig
from skim.errors import ConfigError
from skim.measure.drawing import log_ticks, require
from skim.measure.modes import ARMS, parse_mode
from skim.measure.pages import page
from skim.measure.plots import family_of, label_of, quality_lines, spaced
from skim.measure.report import (
    Figure,
    Key,
    MeasurementError,
    Report,
    Row,
    cpu_name,
    headline,
    make_report,
    plain,
    pooled,
    reason_of,
    score,
    show,
    table,
    tail,
    timing,
    without_password,
)
from skim.measure.stats import mean_interval, percentile, share_interval, t95, tpot
from skim.registry import scorers

# -- formulas


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([4, 1, 3, 2], 0.5, 2.5),
        ([7], 0.99, 7),
        (range(1, 102), 0.99, 100),
        ([10, 20], 0.99, 19.9),
        ([1, 2, 3, 4, 5], 0.25, 2),
        ([1, 2], 0.0, 1),
        ([1, 2], 1.0, 2),
    ],
)
def test_percentiles_interpolate_between_neighbours(
    values: Sequence[float], share: float, expected: float
) -> None:
    assert percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hits", "count", "expected"),
    [
        (8, 10, (0.4902, 0.9433)),
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (50, 100, (0.4038, 0.5962)),
        (1, 1, (0.2065, 1.0)),
    ],
)
def test_shares_have_wilsons_interval(hits: int, count: int, expected: tuple[float, float]) -> None:
    found = share_interval([1.0] * hits + [0.0] * (count - hits))
    assert found == pytest.approx(expected, abs=5e-5)
    assert found == pytest.approx(tuple(binomtest(hits, count).proportion_ci(method="wilson")))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # z * z = 3.8415; scale 1.7683; half = 1.96 / 1.7683 * sqrt(0.25 / 5 + 3.8415 / 100) = 0.3296
        ([0.5] * 5, (0.1704, 0.8296)),
        ([0.2, 0.4, 0.6, 0.8] * 25, (0.4038, 0.5962)),  # as for 50 hits of 100
        ([0.8] * 10, (0.4902, 0.9433)),  # as for 8 hits of 10
        ([0.95, 1.0] * 10, (0.7995, 0.9974)),  # scale 1.1921; middle 0.8985, half 1.6442 * 0.0602 = 0.0989
    ],
)
def test_scores_between_0_and_1_have_no_narrower_interval_than_hits(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert share_interval(values) == pytest.approx(expected, abs=5e-5)
    found = score(values)
    assert (found.low, found.high) == share_interval(values)


def test_values_without_bounds_have_students_interval() -> None:
    # Mean 3, deviation sqrt(2.5), error sqrt(2.5 / 5) = 0.7071; t for 4 degrees of freedom is 2.7764.
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((1.0368, 4.9632), abs=5e-5)
    assert mean_interval([0.0] * 4) == (0, 0)
    assert mean_interval([0.7]) == (0.7, 0.7)
    found = score([0.1, 0.2], unit="nats", better="lower")
    assert (found.low, found.high) == pytest.approx((0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05))
    for freedom, expected in ((1, 12.7062), (30, 2.0423), (31, 2.0395), (60, 2.0003), (10**6, 1.95997)):
        assert t95(freedom) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("values", [[-0.1, 0.5], [0.5, 1.1]])
def test_scores_outside_0_to_1_are_refused_as_shares(values: list[float]) -> None:
    with pytest.raises(MeasurementError, match="not shares"):
        score(values)
    score(values, unit="nats")


def test_time_per_output_token_excludes_the_first_token() -> None:
    assert tpot(e2e=2.1, ttft=0.1, output_tokens=11) == pytest.approx(0.2)
    assert tpot(e2e=0.3, ttft=0.1, output_tokens=2) == pytest.approx(0.2)
    assert tpot(e2e=0.1, ttft=0.1, output_tokens=1) is None


# -- figures, rows, reports


def test_times_are_medians_with_their_range_and_scores_are_means_with_their_interval() -> None:
    assert timing([3.0, 1.0, 2.0, 10.0]) == Figure(2.5, "s", 1.0, 10.0, 4, "lower")
    found = score([1, 1, 1, 1, 1, 1, 1, 1, 0, 0])
    assert (found.value, found.n, found.unit) == (0.8, 10, "share")
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert plain(5, "bytes") == Figure(5, "bytes", 5, 5, 1, "neither")


def test_a_tail_has_the_range_of_the_repeats() -> None:
    few = tail([[1.0], [3.0], [2.0]])
    assert (few.value, few.low, few.high) == (pytest.approx(2.98), 1.0, 3.0)
    assert (few.unit, few.n, few.better) == ("s", 3, "lower")
    values = [float(i) for i in range(101)]
    twice = [2 * value for value in values]
    many = tail([values, twice], "ms")
    assert (many.value, many.low, many.high) == pytest.approx((196.0 - 0.02, 99.0, 198.0), abs=1e-9)
    assert (many.unit, many.n) == ("ms", 2)
    with pytest.raises(MeasurementError):
        tail([[1.0], []])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pa@ss@host:80/v1?x=a@b", "http://host:80/v1?x=a@b"),
        ("--peer=https://me@host", "--peer=https://host"),
        ("http://host/a@b", "http://host/a@b"),
        ("me@host", "me@host"),
        ("/some/dir@2", "/some/dir@2"),
    ],
)
def test_passwords_are_left_out_of_urls(text: str, expected: str) -> None:
    assert without_password(text) == expected
    row = Row({"x": 1}, {"y": plain(1, "s")})
    assert make_report("bench ttft", ["skim", text], {}, [row], expected=1).command == ["skim", expected]


def test_a_reason_is_one_line_with_its_kind() -> None:
    assert reason_of(ConfigError("too much\nof it")) == "too much"
    assert reason_of(ValueError("too much\nof it")) == "ValueError: too much"
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(ConfigError()) == "ConfigError"


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_non_finite_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(MeasurementError):
        timing(values)
    with pytest.raises(MeasurementError):
        score(values)


def test_a_row_has_figures_or_a_reason_and_not_both() -> None:
    with pytest.raises(MeasurementError):
        Row({"mode": "dense"})
    with pytest.raises(MeasurementError):
        Row({"mode": "dense"}, {"ttft": plain(1, "s")}, failed="it broke")


def make(kind: str, *rows: Row, **settings: Any) -> Report:
    return make_report(kind, ["skim", *kind.split()], {"seed": 0, **settings}, rows, expected=len(rows))


def test_a_report_with_missing_rows_is_refused() -> None:
    with pytest.raises(MeasurementError, match="1 rows came back of 2"):
        make_report("bench ttft", ["skim"], {}, [Row({}, {"ttft": plain(1, "s")})], expected=2)


def test_a_report_survives_json() -> None:
    report = make(
        "bench ttft", Row({"mode": "dense"}, {"ttft": timing([1, 2])}), Row({"mode": "x"}, failed="no")
    )
    again = Report.from_json(report.to_json())
    assert again == report
    assert [row.failed for row in again.failures] == ["no"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [1]}'])
def test_other_json_is_refused_as_a_report(text: str) -> None:
    with pytest.raises(MeasurementError):
        Report.from_json(text)


def test_the_table_has_units_ranges_percent_and_failures() -> None:
    report = make(
        "eval needle",
        Row(
            {"mode": "dense", "context": 4096}, {"score": score([1, 1, 1, 0]), "ttft": timing([1.5, 1.25, 2])}
        ),
        Row({"mode": "lexical", "context": 4096}, failed="the engine crashed"),
    )
    head, first, second = table(report.rows).splitlines()
    assert head.split() == ["mode", "context", "n", "score", "ttft", "[s]"]
    assert first.split() == ["dense", "4,096", "4", "75%", "(30-95)", "1.50", "(1.25-2.00)"]
    assert second.split(maxsplit=2) == ["lexical", "4,096", "FAILED: the engine crashed"]
    assert show(plain(0.056, "share")) == "6%"
    assert show(plain(1234.7, "tok/s")) == "1,235"


def test_a_table_names_models_if_there_are_several() -> None:
    def row(model: str) -> Row:
        return Row({"model": model, "context": 9}, {"step": plain(1, "ms")})

    assert table([row("a"), row("a")]).splitlines()[0].split() == ["context", "n", "step", "[ms]"]
    head, *lines = table([row("a"), row("b")]).splitlines()
    assert head.split() == ["model", "context", "n", "step", "[ms]"]
    assert [line.split() for line in lines] == [["a", "9", "1", "1.00"], ["b", "9", "1", "1.00"]]
    shown = [line.split()[0] for line in table([row("/long/a"), row("org/b")]).splitlines()]
    assert shown == ["model", "a", "b"]
    shown = [line.split()[0] for line in table([row("/long/a"), row("org/a")]).splitlines()]
    assert shown == ["model", "/long/a", "org/a"], "the ends of the names would be the same"


def test_a_headline_names_machine_models_and_ceiling() -> None:
    machine = {"cpu": "Some CPU", "instructions": "AVX2", "cores": 8, "threads": 1, "gpu": "Some GPU"}
    settings = {"models": {"a": {}, "b": {}}, "dtype": "float32", "device": "cpu"}

    def told(**more: Any) -> str:
        return headline(Report("bench ttft", ["skim"], {**settings, **more}, [], machine, {}))

    assert told() == "Some CPU (AVX2), 8 cores, 1 thread; a, b in float32"
    sized = {"a": {"weight_bits": 5.6}, "b": {}}
    assert told(models=sized).endswith("; a (weights of 5.6 bits), b in float32")
    assert told(device="cuda:0", ceiling={"flops": 1.5e14, "bandwidth": 4.1e12}) == (
        "Some GPU; a, b in float32; measured ceiling 150,000 GFLOP/s, 4,100 GB/s"
    )


def test_the_processor_name_is_the_systems(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 207\nmodel name\t: Fast(R) CPU @ 2GHz \nprocessor\t: 1\n")
    assert cpu_name(info) == "Fast(R) CPU @ 2GHz"
    info.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert cpu_name(info) == cpu_name(tmp_path / "none") == (platform.processor() or platform.machine())
    assert make("bench kv").machine["cpu"] == cpu_name()


# -- modes


def test_modes_are_read_from_their_names() -> None:
    assert parse_mode("dense").is_dense
    blend = parse_mode("blend:0.05")
    assert (blend.is_dense, blend.prefill.scorer, blend.prefill.keep_ratio) == (False, "blend", 0.05)
    assert blend.prefill.skims(1), "a mode skims at any length"
    assert parse_mode("lexical:512t").prefill.keep_tokens == 512
    assert parse_mode("blend:0.1,follow_up=replan").prefill.follow_up == "replan"
    assert parse_mode("random:0.1").prefill.rescue_cap == 0.0, "a control does not use the question"
    small = parse_mode("dense,kv_cache_dtype=int8")
    assert (small.kv_cache_dtype, small.is_dense, small.prefill) == ("int8", False, PrefillConfig())
    assert parse_mode("blend:0.1,kv_cache_dtype=k8v4").kv_cache_dtype == "k8v4"
    assert blend.kv_cache_dtype is None
    coded = parse_mode("dense,quantization=int4")
    assert (coded.quantization, coded.is_dense) == ("int4", False)
    assert coded.engine(EngineConfig()).model.quantization == "int4"
    with pytest.raises(ConfigError, match="quantization must be"):
        parse_mode("dense,quantization=int3")


def test_modes_may_decode_slow_fast() -> None:
    on = parse_mode("dense,slow_fast=on,decode_budget=1024")
    assert on.decode == DecodeConfig(slow_fast="on", decode_budget=1024)
    assert not on.is_dense
    assert parse_mode("blend:0.1,slow_fast=auto").decode == DecodeConfig(slow_fast="auto")
    assert parse_mode("dense,slow_fast=off").is_dense
    assert not ARMS.keys() & set(scorers())
    arms = [parse_mode(f"{arm},decode_budget=512,refresh_interval=9").decode for arm in ARMS]
    assert all(arm is not None and arm.decode_budget == 512 for arm in arms)
    assert [arm.slow_fast for arm in arms if arm is not None] == ["on", "on", "on", "exact"]
    exact = parse_mode("exact,decode_budget=512").decode
    assert exact is not None
    assert exact.applies(513), "an arm has no least context"
    assert [(arm.positional, arm.fast_only) for arm in arms if arm is not None] == [
        (False, False),
        (True, False),
        (False, True),
        (False, False),
    ]
    config = EngineConfig()
    assert on.engine(config).has_summaries
    assert parse_mode("dense").engine(config) == config
    for wrong in (
        "dense,decode_budget=9",
        "slow-fast,slow_fast=off",
        "slow-fast,keep_ratio=0.1",
        "slow-fast,decode_budget=0",
    ):
        with pytest.raises(ConfigError, match="mode"):
            parse_mode(wrong)


def test_auto_skims_above_its_threshold() -> None:
    default = PrefillConfig()
    auto = parse_mode("auto:0.2")
    assert not auto.is_dense
    assert (auto.prefill.scorer, auto.prefill.keep_ratio) == (default.scorer, 0.2)
    assert [auto.prefill.skims(default.min_prompt_tokens - less) for less in (1, 0)] == [False, True]
    assert parse_mode("auto").prefill == PrefillConfig(sparse_prefill="auto")
    assert parse_mode("auto,min_prompt_tokens=9").prefill.skims(9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dense:0.1",
        "dense,kv_cache_dtype=int3",
        "dense,keep_ratio=0.1",
        "blend:much",
        "blend:1.5",
        "blend:0.1,colour=red",
        "auto:2",
        "auto,scorer=self",
    ],
)
def test_unknown_modes_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        parse_mode(text)


# -- pages


def ttft(mode: str, context: int, *values: float) -> Row:
    return Row({"context": context, "mode": mode, "state": "cold"}, {"ttft": timing(values)})


def needle(mode: str, context: int, depth: float, hits: int, **more: Key) -> Row:
    key = {"context": context, "depth": depth, "mode": mode, **more}
    read = timing([1.0 if mode == "dense" else float(mode.partition(":")[2]) + 0.03], "share")
    return Row(key, {"score": score([1.0] * hits + [0.0] * (10 - hits)), "read": read})


def serve_row(concurrency: int) -> Row:
    curves = {"ttft": [float(i) for i in range(101)], "itl": [5.0] * 101}
    return Row({"concurrency": concurrency}, {"ttft_mean": timing([1], "ms")}, notes={"percentiles": curves})


REPORTS: Mapping[str, tuple[Report, list[str]]] = {
    "ttft": (
        make(
            "bench ttft",
            *(ttft(mode, n, n / 1e3, n / 900) for mode in ("dense", "blend:0.1") for n in (2048, 4096)),
            Row({"context": 8192, "mode": "dense", "state": "cold"}, failed="out of memory"),
        ),
        ["time to first token against context", "speedup over dense against context"],
    ),
    "decode": (
        make(
            "bench decode",
            *(
                Row(
                    {"context": n, "batch": b, "mode": "dense"},
                    {"step": timing([2, 3], "ms"), "floor": plain(1, "ms")},
                )
                for n in (1024, 7168)
                for b in (1, 4)
            ),
        ),
        ["decode step against context"],
    ),
    "needle": (
        make(
            "eval needle",
            *(
                needle(mode, context, depth, 8)
                for mode in ("dense", "blend:0.1", "blend:0.2")
                for context in (4096, 7168)
                for depth in (0.1, 0.9)
            ),
            Row({"context": 4096, "depth": 0.5, "mode": "dense"}, failed="it broke"),
        ),
        [
            "found by depth and context: dense",
            "found by depth and context: blend:0.1",
            "found by depth and context: blend:0.2",
            "quality against share read: context 4096",
            "quality against share read: context 7168",
        ],
    ),
    "evidence": (
        make(
            "eval evidence",
            *(
                Row({"kind": kind, "context": context, "mode": mode}, {"kept": score([0.0, 1.0, 1.0])})
                for mode in ("blend:0.1", "lexical:0.1", "random:0.1", "random:0.2")
                for kind in ("far", "logs")
                for context in (7000, 32_000)
            ),
            Row({"kind": "agent", "context": 7000, "mode": "blend:0.1"}, failed="it broke"),
        ),
        ["evidence kept, n = 3 in each cell"],
    ),
    "serve": (
        make("bench serve", serve_row(1), serve_row(4)),
        ["time to first token by percentile", "inter-token latency by percentile"],
    ),
    "nothing to draw": (make("bench ttft", Row({"context": 1, "mode": "dense"}, failed="no")), []),
    "unknown kind": (make("bench kv", Row({"format": "fp8"}, {"bytes": plain(1, "bytes")})), []),
    "dense only": (make("eval quote", Row({"mode": "dense"}, {"score": score([1.0])})), []),
}


@functools.cache
def made(name: str) -> str:
    return page(REPORTS[name][0])


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_has_a_plot_for_all_data_it_has(name: str) -> None:
    report, titles = REPORTS[name]
    text = made(name)
    assert re.findall(r'<figure role="img" aria-label="([^"]*)">', text) == titles
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(titles)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names)), "ids are unique"
    assert text == page(report), "the same report gives the same page"


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_loads_nothing(name: str) -> None:
    text = made(name)
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"|url\(([^)]*)\)', text)
    assert all(one.startswith(("#", "data:")) for pair in links for one in pair if one)
    assert "@import" not in text
    assert "<script" not in text


def test_the_picture_of_evidence_has_a_panel_for_each_mode_and_marks_failures() -> None:
    text = made("evidence").split("<svg")[1]
    for word in ("blend:0.1", "lexical:0.1", "random:0.1", "random:0.2"):
        assert text.count(f">{word}<") == 1
    assert text.count(">67%<") == 16
    assert text.count(">failed<") == 1
    assert text.count(">7,000<") == 4, "panels without a mode are hidden"


def test_a_page_shows_command_and_machine_and_marks_failures() -> None:
    text = made("ttft")
    assert "$ skim bench ttft" in text
    assert "1 of 5 rows failed" in text
    assert '<tr class="failed">' in text
    assert "FAILED: out of memory" in text
    for word in ("cores", "transformers", "seed", "ttft [s]", "8,192"):
        assert word in text


def test_a_page_shows_speedups_over_dense() -> None:
    rows = [ttft("dense", 1024, 4.0), ttft("blend:0.1", 1024, 1.0), ttft("llama.cpp", 1024, 8.0)]
    text = page(make("bench ttft", *rows, ttft("dense", 2048, 9.0)))
    assert re.findall(r"<td>([\d.]+x)</td>", text) == ["1.00x", "4.00x", "0.50x", "1.00x"]
    assert "times as fast as dense" in text
    alone = page(make("bench ttft", *rows[:1]))  # nothing to compare
    assert "speedup" not in alone
    assert "speedup" not in page(make("bench ttft", *rows[1:]))  # no dense


def test_the_widest_table_fits_a_page_of_1280_pixels() -> None:
    """By the longest word of each column, at 6.2 pixels a character in 12 pixel type."""
    names = ["ttft", "ttft_p99", "queue", "scoring", "prefill", "first_decode", "gflops"]
    spread = timing([1234.5, 1300.0, 1420.5], "ms")
    shares = {name: timing([0.25, 0.5], "share") for name in ("kept", "blocks", "of_peak")}
    keys = {"model": "llama-3.1-8b", "context": 131_072, "state": "cold"}
    rows = [
        Row({**keys, "mode": mode}, {**dict.fromkeys(names, spread), **shares})
        for mode in ("dense", "blend:1000t")
    ]
    text = page(make("bench ttft", *rows))
    table = re.search(r"<table>.*?</table>", text, re.DOTALL)
    assert table
    lines = [
        re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)
        for row in re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)
    ]
    columns = list(zip(*lines, strict=True))
    assert len(columns) == len(keys) + 1 + 1 + len(names) + len(shares)
    words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    padding = 2 * 0.35 * 15
    assert sum(word * 6.2 + padding for word in words) <= 1280 - 2 * 15
    assert "white-space: nowrap" not in text


def test_everything_in_a_page_is_escaped() -> None:
    bad = "<script>$x$</script>"
    rows = [ttft(bad, 1024, 1, 2), ttft("b", 1024, 1), Row({"context": 2, "mode": bad}, failed=bad)]
    report = make("bench ttft", *rows, model=bad, **{bad: bad})
    text = page(report)
    assert "<script" not in text
    assert "&lt;script&gt;$x$&lt;/script&gt;" in text


def test_a_missing_plotting_library_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib, .*pip install '\.\[bench\]'"):
        require()


def test_lines_are_named_by_the_keys_that_vary() -> None:
    rows = [ttft("dense", 1, 1), ttft("lexical", 1, 1)]
    assert [label_of(row, rows, ("context",)) for row in rows] == ["dense", "lexical"]
    other = Row({"context": 1, "mode": "dense", "state": "warm"}, {"ttft": timing([1])})
    assert label_of(other, [*rows, other], ("context",)) == "dense, state warm"
    assert label_of(rows[0], rows[:1], ("context",)) == "dense"


def test_modes_that_differ_in_budget_only_are_a_family() -> None:
    for mode in ("blend", "blend:0.05", "blend:512t", "blend,keep_mass=0.9"):
        assert family_of(mode) == "blend"
    assert family_of("blend:0.05,follow_up=replan") == "blend,follow_up=replan"
    assert family_of("auto:0.1") == "auto"
    for mode in ("dense", "llama.cpp"):
        assert family_of(mode) is None


def test_quality_is_plotted_over_the_share_read_not_the_share_requested() -> None:
    def row(mode: str, read: float, hits: int) -> Row:
        figures = {"score": score([1.0] * hits + [0.0] * (4 - hits)), "read": timing([read] * 4, "share")}
        return Row({"mode": mode, "context": 4096}, figures)

    rows = [row("dense", 1.0, 4), row("blend:0.1", 0.18, 2), row("blend:0.05", 0.12, 1)]
    rows += [row("blend:0.1", 0.14, 3), row("lexical:1000t", 0.25, 4)]  # another depth, another scorer
    rows += [Row({"mode": "random:0.1"}, {"score": score([1.0])})]  # without a figure for the share read
    found = quality_lines(rows)
    assert {name: [(round(x, 3), y.value) for x, y in points] for name, points in found.items()} == {
        "blend": [(0.12, 0.25), (0.16, 0.625)],
        "lexical": [(0.25, 1.0)],
    }
    assert spaced([0.12, 0.1, 0.3, 0.101, 0.31]) == [0.1, 0.12, 0.3]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (0.9, 6, [1, 2, 5]),
        (2.5, 5.5, [3, 4, 5]),
        (2.05, 2.35, [2.1, 2.2, 2.3]),
        (2.01, 2.02, [2.01, 2.02]),
    ],
)
def test_logarithmic_axes_have_round_ticks(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_scores_of_several_cells_are_weighted_by_their_n() -> None:
    found = pooled(
        [Figure(1.0, "share", 0.7, 1.0, 10, "higher"), Figure(0.4, "share", 0.2, 0.8, 30, "higher")]
    )
    assert found.value == pytest.approx(0.55)
    assert found.low == pytest.approx(0.55 - ((0.3 / 4) ** 2 + (0.2 * 3 / 4) ** 2) ** 0.5)
    assert found.high == pytest.approx(0.55 + 0.4 * 3 / 4)
    assert found.n == 40
