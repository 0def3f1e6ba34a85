"""A plan is consistent, reports its coverage, and survives JSON unchanged."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.prefill.plan import Plan, Reason, Span

P, S, R, N = Reason.PINNED, Reason.SCORED, Reason.RESCUED, Reason.NEIGHBOUR
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def plan(reasons: Any = (P, None, S), **fields: Any) -> Plan:
    known: dict[str, Any] = {
        "block_size": 4,
        "prompt_tokens": 4 * len(reasons) - 1,
        "positions": "original",
        "scorer": "lexical",
    }
    return Plan(reasons=tuple(reasons), **{**known, **fields})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    block_size = draw(st.integers(1, 9))
    prompt_tokens = draw(st.integers(1, 80))
    blocks = -(-prompt_tokens // block_size)
    each = {"min_size": blocks, "max_size": blocks}
    half = draw(st.integers(0, 3))
    edges = sorted(draw(st.lists(st.integers(0, prompt_tokens), min_size=2 * half, max_size=2 * half)))
    return Plan(
        block_size=block_size,
        prompt_tokens=prompt_tokens,
        reasons=tuple(draw(st.lists(st.sampled_from([None, *Reason]), **each))),
        positions=draw(st.sampled_from(["original", "compact"])),
        scorer=draw(st.text(max_size=8)),
        scores=draw(st.none() | st.lists(FINITE, **each).map(tuple)),
        timings_ms=draw(st.dictionaries(st.text(max_size=6), st.floats(0, 1e9), max_size=3)),
        asked=tuple(zip(edges[::2], edges[1::2], strict=True)),
        read_again=draw(st.integers(0, blocks)),
    )


@given(plans())
def test_json_round_trip_is_exact(one: Plan) -> None:
    again = Plan.from_json(one.to_json())
    assert again == one
    assert again.to_json() == one.to_json()
    assert all(isinstance(reason, Reason) for reason in again.reasons if reason is not None)


@given(plans())
def test_derived_values_agree_with_a_count_of_tokens(one: Plan) -> None:
    tokens = [t for t in range(one.prompt_tokens) if one.reasons[t // one.block_size] is not None]
    assert one.token_indices() == tokens
    assert one.kept_tokens == len(tokens)
    assert one.ratio == len(tokens) / one.prompt_tokens
    assert one.first_gap == next(
        (t for t in range(one.prompt_tokens) if t not in set(tokens)), one.prompt_tokens
    )
    assert [t for run in one.runs for t in run] == tokens
    assert all(a.stop < b.start for a, b in pairwise(one.runs))
    assert [t for span in one.spans for t in range(span.start, span.end)] == tokens
    for span in one.spans:
        assert {one.reasons[t // one.block_size] for t in range(span.start, span.end)} == {span.reason}
    for a, b in pairwise(one.spans):
        assert a.end < b.start or a.reason != b.reason


@given(plans())
def test_coverage_is_between_zero_and_one(one: Plan) -> None:
    if one.scores is None or max(one.scores) <= 0:
        assert one.coverage is None
        return
    assert one.coverage is not None
    assert 0 <= one.coverage <= 1
    if all(one.kept):
        assert one.coverage == 1
    if not any(one.kept):
        assert one.coverage == 0


def test_coverage_ignores_negative_scores() -> None:
    assert plan([P, None, S], scores=(3, 1, -5)).coverage == 0.75
    assert plan([P, None, S], scores=(1e308, 1e308, 1e308)).coverage == pytest.approx(2 / 3)


def test_spans_split_at_reasons_and_runs_do_not() -> None:
    one = plan([P, P, S, N, None, R])
    assert one.spans == (Span(0, 8, P), Span(8, 12, S), Span(12, 16, N), Span(20, 23, R))
    assert one.runs == (range(16), range(20, 23))
    assert one.kept_tokens == 19


def test_the_summary() -> None:
    reasons = ([S] * 3 + [None] * 57) * 16 + [P] * 4 + [None] * 60
    one = Plan(64, 64 * 1024, tuple(reasons), "original", "attention", timings_ms={"scoring": 212.4})
    assert one.summary() == "52/1024 blocks kept (5.1%, 17 spans) attention 0.21s"
    again = dataclasses.replace(one, read_again=128)
    assert again.summary() == "52/1024 blocks kept (5.1%, 17 spans) attention 0.21s, 128 read again"
    assert plan([P]).summary() == "1/1 blocks kept (100.0%, 1 span) lexical"


def test_the_percentage_is_of_tokens_not_blocks() -> None:
    assert plan([None, P, S], block_size=5, prompt_tokens=11).summary().startswith("2/3 blocks kept (54.5%")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"reasons": (P, None)}, "3 reasons, got 2"),
        ({"reasons": (P, None, "best")}, "best"),
        ({"scores": (1.0, 2.0)}, "3 scores, got 2"),
        ({"scores": (1.0, math.nan, 2.0)}, "block 1 is nan"),
        ({"scores": (1.0, 2.0, math.inf)}, "block 2 is inf"),
        ({"block_size": 0}, "block_size"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"positions": "packed"}, "packed"),
        ({"timings_ms": {"scoring": math.nan}}, "scoring"),
        ({"timings_ms": {"scoring": -1.0}}, "scoring"),
        ({"asked": ((3, 2),)}, "asked"),
        ({"asked": ((0, 4), (3, 5))}, "asked"),
        ({"asked": ((0, 12),)}, "asked"),
        ({"asked": ((-1, 4),)}, "asked"),
        ({"read_again": 4}, "read_again must be 0 to 3"),
        ({"read_again": -1}, "read_again"),
        ({"read_again": True}, "read_again"),
    ],
)
def test_an_inconsistent_plan_is_refused(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        dataclasses.replace(plan(), **fields)


@pytest.mark.parametrize(
    "change", [{"extra": 1}, {"scorer": ...}, {"reasons": 3}, {"timings_ms": [1]}, {"asked": 3}]
)
def test_json_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    fields = {**json.loads(plan().to_json()), **change}
    text = json.dumps({name: value for name, value in fields.items() if value is not ...})
    with pytest.raises(ValueError):
        Plan.from_json(text)


def test_a_plan_does_not_change_with_the_mapping_it_was_given() -> None:
    timings = {"scoring": 1.0}
    one = plan(timings_ms=timings)
    timings["scoring"] = 2.0
    assert one.timings_ms == {"scoring": 1.0}
    assert hash(one) == hash(plan(timings_ms={"scoring": 3.0}))
