"""Captured steps of several rows with several queries each, as exact slow-fast decode verifies drafts."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from skim.attention.cuda import metadata
from skim.attention.cuda.captured import CapturedTables
from skim.attention.step import AttentionCall, Step
from tests.attention.test_triton_coded import DEVICE, INTERPRETED, Case, assert_close

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

QUERIES = 16


@pytest.mark.parametrize("kv_format", ["auto", "int8", "k8v4"])
@pytest.mark.parametrize("processors", [2, 132])  # without splits, and with
def test_captured_rows_serve_rows_of_other_lengths(
    kv_format: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may be fewer and shorter than those captured. Padding is neither written nor read."""
    monkeypatch.setattr(metadata, "processors", lambda _: processors)
    rng = random.Random(processors)
    call = AttentionCall(0.125)
    case = Case([(280, QUERIES), (60, QUERIES), (130, QUERIES)], kv_format, group=3)
    rows = list(case.rows)
    captured = CapturedTables(case.pool, rows=4, slots=300, queries=QUERIES)
    whole = Step(case.pool, (rows[0],) * 4, case.step.backend)
    query, key, value = (torch.empty(4 * QUERIES, h, 64, device=DEVICE) for h in (case.heads, 2, 2))
    graph = None
    for count in (3, 1, 2, 3):
        chosen = rng.sample(rows, count)
        case.rows = [
            row._replace(context=rng.randrange(row.context), queries=rng.randrange(2, QUERIES + 1))
            for row in chosen
        ]
        step = Step(case.pool, tuple(case.rows), case.step.backend)
        assert captured.refill(step) is None
        tokens = step.cumulative_lengths[-1]
        for tensor in (query, key, value):
            tensor.copy_(torch.randn(tensor.shape))
            tensor[tokens:] = float("nan")
        case.copy()
        if graph is None:
            whole.metadata = captured.metadata(whole, None)
            out = whole.attend(0, query, key, value, call)
        if not INTERPRETED and graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = whole.attend(0, query, key, value, call)
        if graph is not None:
            graph.replay()
        case.query, case.key, case.value = query[:tokens], key[:tokens], value[:tokens]
        assert_close(out[:tokens], case.expected(call), 2e-3)
        for mine, other in zip(*(pool.planes(0).blocks.values() for pool in case.pools), strict=True):
            same = mine.float().nan_to_num(7.0) == other.float().nan_to_num(7.0)
            assert same.float().mean() > 0.99  # a code may be rounded the other way
