"""What measurements are made of: formulas against cases worked out by hand, reports, modes, pages."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from skim.errors import ConfigError
from skim.measure import page as pages
from skim.measure.drawing import log_ticks
from skim.measure.modes import parse_mode
from skim.measure.plots import kept_share, label_of, pooled
from skim.measure.report import (
    Figure,
    Key,
    MeasurementError,
    Report,
    Row,
    make_report,
    plain,
    score,
    show,
    table,
    timing,
)
from skim.measure.stats import mean_interval, percentile, tpot, wilson

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
def test_percentiles_lie_between_neighbours(values: Sequence[float], share: float, expected: float) -> None:
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
    assert wilson(hits, count) == pytest.approx(expected, abs=5e-5)
    assert mean_interval([1.0] * hits + [0.0] * (count - hits)) == wilson(hits, count)


def test_other_scores_have_an_interval_by_resampling() -> None:
    values = [0.2, 0.4, 0.6, 0.8] * 25
    low, high = mean_interval(values)
    # The mean's standard error is sqrt(0.05 / 100) = 0.02236; 1.96 of them on either side of 0.5.
    assert (low, high) == pytest.approx((0.4562, 0.5438), abs=0.006)
    assert mean_interval(values) == (low, high), "the same scores have the same interval"
    assert mean_interval([0.5] * 5) == (0.5, 0.5)


def test_time_per_output_token_leaves_the_first_one_out() -> None:
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


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_what_is_not_a_measured_number_is_refused(values: list[float]) -> None:
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


def test_fewer_rows_than_asked_for_are_no_report() -> None:
    with pytest.raises(MeasurementError, match="1 rows came back of 2"):
        make_report("bench ttft", ["skim"], {}, [Row({}, {"ttft": plain(1, "s")})], expected=2)


def test_a_report_comes_back_from_its_json() -> None:
    report = make(
        "bench ttft", Row({"mode": "dense"}, {"ttft": timing([1, 2])}), Row({"mode": "x"}, failed="no")
    )
    again = Report.from_json(report.to_json())
    assert again == report
    assert [row.failed for row in again.failures] == ["no"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [1]}'])
def test_what_is_no_report_is_refused(text: str) -> None:
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
    head, first, second = table(report).splitlines()[1:]
    assert head.split() == ["mode", "context", "score", "ttft", "[s]"]
    assert first.split() == ["dense", "4,096", "75%", "(30-95)", "1.50", "(1.25-2.00)"]
    assert second.split(maxsplit=2) == ["lexical", "4,096", "FAILED: the engine crashed"]
    assert show(plain(0.056, "share")) == "6%"
    assert show(plain(1234.7, "tok/s")) == "1,235"


# -- modes


def test_modes_are_read_from_their_names() -> None:
    assert parse_mode("dense").is_dense
    cascade = parse_mode("cascade:0.05")
    assert (cascade.is_dense, cascade.prefill.scorer, cascade.prefill.keep_ratio) == (False, "cascade", 0.05)
    assert cascade.prefill.skims(1), "a mode skims at any length"
    assert parse_mode("lexical:512t").prefill.keep_tokens == 512
    assert parse_mode("cascade:0.1,follow_up=replan").prefill.follow_up == "replan"
    assert parse_mode("random:0.1").prefill.rescue_cap == 0.0, "a control knows nothing of the question"


@pytest.mark.parametrize("text", ["", "dense:0.1", "cascade:much", "cascade:1.5", "cascade:0.1,colour=red"])
def test_other_names_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        parse_mode(text)


# -- pages


def ttft(mode: str, context: int, *values: float) -> Row:
    return Row({"context": context, "mode": mode, "state": "cold"}, {"ttft": timing(values)})


def needle(mode: str, context: int, depth: float, hits: int, **more: Key) -> Row:
    key = {"context": context, "depth": depth, "mode": mode, **more}
    return Row(key, {"score": score([1.0] * hits + [0.0] * (10 - hits))})


def serve_row(concurrency: int) -> Row:
    curves = {"ttft": [float(i) for i in range(101)], "itl": [5.0] * 101}
    return Row({"concurrency": concurrency}, {"ttft_mean": timing([1], "ms")}, notes={"percentiles": curves})


REPORTS: Mapping[str, tuple[Report, list[str]]] = {
    "ttft": (
        make(
            "bench ttft",
            *(ttft(mode, n, n / 1e3, n / 900) for mode in ("dense", "cascade:0.1") for n in (2048, 4096)),
            Row({"context": 8192, "mode": "dense", "state": "cold"}, failed="out of memory"),
        ),
        ["time to first token against context"],
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
                for mode in ("dense", "cascade:0.1", "cascade:0.2")
                for context in (4096, 7168)
                for depth in (0.1, 0.9)
            ),
            Row({"context": 4096, "depth": 0.5, "mode": "dense"}, failed="it broke"),
        ),
        [
            "found by depth and context: dense",
            "found by depth and context: cascade:0.1",
            "found by depth and context: cascade:0.2",
            "quality against what is kept: context 4096",
            "quality against what is kept: context 7168",
        ],
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
    return pages.page(REPORTS[name][0])


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_has_the_plots_that_there_is_data_for(name: str) -> None:
    report, titles = REPORTS[name]
    text = made(name)
    assert re.findall(r'<figure role="img" aria-label="([^"]*)">', text) == titles
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(titles)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names)), "two things in the page have one id"
    assert text == pages.page(report), "the same report gives the same page"


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_takes_nothing_from_elsewhere(name: str) -> None:
    text = made(name)
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"|url\(([^)]*)\)', text)
    assert all(one.startswith(("#", "data:")) for pair in links for one in pair if one)
    assert "@import" not in text
    assert "<script" not in text


def test_a_page_tells_how_and_where_and_marks_failures() -> None:
    text = made("ttft")
    assert "$ skim bench ttft" in text
    assert "1 of 5 rows failed" in text
    assert '<tr class="failed">' in text
    assert "FAILED: out of memory" in text
    for word in ("cores", "transformers", "seed", "ttft [s]", "8,192"):
        assert word in text


def test_everything_in_a_page_is_escaped() -> None:
    bad = "<script>$x$</script>"
    rows = [ttft(bad, 1024, 1, 2), ttft("b", 1024, 1), Row({"context": 2, "mode": bad}, failed=bad)]
    report = make("bench ttft", *rows, model=bad, **{bad: bad})
    text = pages.page(report)
    assert "<script" not in text
    assert "&lt;script&gt;$x$&lt;/script&gt;" in text


def test_a_missing_plotting_library_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'skim-llm\[bench\]'"):
        pages.require()


def test_lines_are_named_by_what_tells_them_apart() -> None:
    rows = [ttft("dense", 1, 1), ttft("lexical", 1, 1)]
    assert [label_of(row, rows, ("context",)) for row in rows] == ["dense", "lexical"]
    other = Row({"context": 1, "mode": "dense", "state": "warm"}, {"ttft": timing([1])})
    assert label_of(other, [*rows, other], ("context",)) == "dense, state warm"
    assert label_of(rows[0], rows[:1], ("context",)) == "dense"


def test_what_a_mode_keeps_is_read_from_its_name() -> None:
    assert kept_share("cascade:0.05", 4096) == ("cascade", 0.05)
    assert kept_share("cascade:0.05,follow_up=replan", 4096) == ("cascade,follow_up=replan", 0.05)
    assert kept_share("lexical:1024t", 4096) == ("lexical", 0.25)
    assert kept_share("lexical", None) == ("lexical", 0.1)
    for mode in ("dense", "llama.cpp", "cascade,keep_mass=0.9"):
        assert kept_share(mode, 4096) is None


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


def test_scores_of_several_cells_are_pooled_by_their_number() -> None:
    found = pooled(
        [Figure(1.0, "share", 0.7, 1.0, 10, "higher"), Figure(0.4, "share", 0.2, 0.8, 30, "higher")]
    )
    assert found.value == pytest.approx(0.55)
    assert found.low == pytest.approx(0.55 - ((0.3 / 4) ** 2 + (0.2 * 3 / 4) ** 2) ** 0.5)
    assert found.high == pytest.approx(0.55 + 0.4 * 3 / 4)
    assert found.n == 40
