"""A plan as an HTML page: the whole prompt, shaded by score, with the kept blocks outlined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from skim.cli.heatmap import Cell, cells, heats
from skim.measure.pages import render
from skim.prefill.plan import Plan

STRIP = 240  # most cells of the overview at the top


def page(plan: Plan, texts: Sequence[str], *, title: str, question: str) -> str:
    """The page for a plan whose prompt blocks have these texts."""
    kept = f"{plan.kept_tokens} of {plan.prompt_tokens} tokens are read, at {plan.positions} positions"
    if plan.coverage is not None:
        kept += f"; they have {plan.coverage:.1%} of the score"
    heat = heats(plan)
    blocks = [
        {
            "number": block,
            "reason": plan.reasons[block],
            "heat": heat[block],
            "title": block_title(plan, block),
            "text": text,
        }
        for block, text in enumerate(texts)
    ]
    return render(
        "plan.html.jinja",
        title=title,
        question=question,
        summary=plan.summary(),
        kept=kept,
        strip=[_link(plan, cell) for cell in cells(plan, STRIP)],
        stretches=[  # neighbouring blocks that are all kept or all skipped
            (is_kept, list(group))
            for is_kept, group in itertools.groupby(blocks, lambda block: block["reason"] is not None)
        ],
    )


def block_title(plan: Plan, block: int) -> str:
    """Tooltip for a block."""
    start = block * plan.block_size
    end = min(start + plan.block_size, plan.prompt_tokens)
    score = "no score" if plan.scores is None else f"score {plan.scores[block]:.4g}"
    reason = plan.reasons[block]
    fate = "skipped" if reason is None else f"kept: {reason}"
    return f"block {block}, tokens {start}-{end - 1}, {score}, {fate}"


def _link(plan: Plan, cell: Cell) -> dict[str, Any]:
    """A cell of the overview and the block it links to: the first with the cell's reason."""
    block = next((b for b in cell.blocks if plan.reasons[b] == cell.reason), cell.blocks.start)
    title = block_title(plan, block)
    return {"block": block, "kept": cell.reason is not None, "heat": cell.heat, "title": title}
