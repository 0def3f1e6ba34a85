"""A plan as an HTML page: its passages as a list and in the prompt, with the skipped text folded.

Blocks are shaded by score. Code, tables and logs have a fixed-width font.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from skim.cli.documents import Source
from skim.cli.heatmap import Cell, cells, heats
from skim.cli.shown import TEMPLATE, Shown
from skim.measure.pages import render
from skim.prefill.plan import Plan

STRIP = 240  # most cells of the overview at the top
EXCERPT = 160  # characters of a passage in the list
PROSE_ENDINGS = (".md", ".rst", ".html", ".htm", ".pdf")
CODE_SHARE = 0.03
"""Least share of digits and symbols among the visible characters of code, tables and logs. Novels have less
than 1%, code has 5% or more."""
_CODE = re.compile(r"[^\w\s.,;:!?'\"()\u2010-\u201f-]|[\d_]")


def page(shown: Shown, *, title: str, question: str) -> str:
    """The page for a plan with its texts."""
    plan = shown.plan
    kept = f"{plan.kept_tokens} of {plan.prompt_tokens} tokens are read, at {plan.positions} positions"
    if plan.coverage is not None:
        kept += f"; they have {plan.coverage:.1%} of the score"
    stretches = stretches_of(shown)
    passages = [one for one in stretches if one["kept"]]
    for number, one in enumerate(passages):
        one["number"] = number
    return render(
        "plan.html.jinja",
        title=title,
        question=question,
        summary=plan.summary(),
        kept=kept,
        strip=[_link(plan, cell) for cell in cells(plan, STRIP)],
        stretches=stretches,
        passages=passages,
    )


def stretches_of(shown: Shown) -> list[dict[str, Any]]:
    """The prompt as runs of neighbouring blocks that are all kept or all skipped."""
    plan, heat = shown.plan, heats(shown.plan)
    fixed = {source.name for source in shown.files.sources if is_code(source)}
    found = []
    numbers = range(len(plan.reasons))
    for is_kept, group in itertools.groupby(numbers, lambda block: plan.reasons[block] is not None):
        members = list(group)
        blocks = range(members[0], members[-1] + 1)
        lines = shown.lines_of(blocks)
        place = shown.place_of(blocks)
        tokens = min(blocks.stop * plan.block_size, plan.prompt_tokens) - blocks.start * plan.block_size
        found.append(
            {
                "kept": is_kept,
                "place": "template and question" if place == TEMPLATE else place,
                "code": any(each.file in fixed for each in lines),
                "lines": sum(each.last - each.first + 1 for each in lines),
                "tokens": tokens,
                "reasons": ", ".join(dict.fromkeys(reason for b in blocks if (reason := plan.reasons[b]))),
                "excerpt": " ".join("".join(shown.texts[b] for b in blocks).split())[:EXCERPT],
                "blocks": [
                    {
                        "number": block,
                        "reason": plan.reasons[block],
                        "heat": heat[block],
                        "title": block_title(plan, block),
                        "text": shown.texts[block],
                    }
                    for block in blocks
                ],
            }
        )
    return found


def is_code(source: Source) -> bool:
    """True for code, tables and logs: texts that need a fixed-width font."""
    if source.file.lower().endswith(PROSE_ENDINGS):
        return False
    text = source.text[:100_000]
    visible = sum(not char.isspace() for char in text)
    return len(_CODE.findall(text)) >= CODE_SHARE * visible


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
