"""The evidence kept by kind and context, as text."""

from __future__ import annotations

from skim.measure.grid import as_text, caption, grids
from skim.measure.report import Row, score, timing


def row(kind: str, context: int, hits: int | None, *, mode: str = "blend:0.1", figure: str = "kept") -> Row:
    """A row with `hits` of 4 samples, or a failed one."""
    key = {"task": "evidence", "kind": kind, "context": context, "mode": mode}
    if hits is None:
        return Row(key, failed="it broke")
    return Row(key, {figure: score([1.0] * hits + [0.0] * (4 - hits)), "read": timing([0.1] * 4, "share")})


def test_each_mode_has_a_grid_of_kinds_and_contexts() -> None:
    rows = [
        *(row("far", 32_000, 3), row("far", 7000, 4), row("agent", 7000, None)),
        *(row("summary", 7000, 2, figure="told"), row("far", 7000, 0, mode="random:0.1")),
    ]
    assert as_text(rows) == (
        "evidence kept, n = 4 in each cell; summary: prompts read in full or evenly\n"
        "\n"
        "blend:0.1\n"
        "  kind      7,000  32,000\n"
        "  far        100%     75%\n"
        "  agent    failed\n"
        "  summary     50%\n"
        "\n"
        "random:0.1\n"
        "  kind     7,000  32,000\n"
        "  far         0%\n"
        "  agent\n"
        "  summary"
    )


def test_depths_are_pooled_and_one_failure_fails_their_cell() -> None:
    deep = [Row({**one.key, "depth": depth}, one.figures) for depth, one in enumerate([row("far", 1, 4)] * 2)]
    [grid] = grids([*deep, row("far", 2, 1), row("far", 2, None)])
    first, second = grid.cells["far", 1], grid.cells["far", 2]
    assert first is not None
    assert (first.value, first.n) == (1, 8)
    assert second is None
    assert caption([*deep, row("far", 2, 1)]) == "evidence kept, n = 4 to 8 in each cell"


def test_there_is_no_grid_without_evidence_or_with_a_single_cell() -> None:
    assert as_text([row("far", 7000, 4), row("far", 7000, 4, mode="random:0.1")]) == ""
    assert as_text([row("words", context, 4, figure="score") for context in (1, 2)]) == ""
    assert as_text([row("far", context, None) for context in (1, 2)]) == ""
    assert (
        as_text([Row({"context": context, "mode": "dense"}, {"kept": score([1.0])}) for context in (1, 2)])
        == ""
    )
    assert as_text([]) == ""
