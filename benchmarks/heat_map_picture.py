"""Draw a prefill plan as the SVG picture that the README shows: one cell per prompt block, shaded by score.

skim plan src/skim/data/moby-dick.txt -q QUESTION --json > plan.json
python benchmarks/heat_map_picture.py plan.json docs/plan.svg
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from skim.cli.heatmap import heats
from skim.prefill.plan import Plan

COLUMNS, CELL, TOP, MARGIN = 119, 7, 58, 10
COLDEST = 0.1  # cells below this heat are drawn as one background
COLD, HOT, KEPT, INK = (238, 241, 245), (222, 104, 24), "#1447c0", "#24292f"


def colour(heat: float) -> str:
    """From almost white to orange."""
    red, green, blue = (round(cold + heat * (hot - cold)) for cold, hot in zip(COLD, HOT, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def draw(report: dict[str, Any]) -> str:
    plan = Plan.from_json(json.dumps({field.name: report[field.name] for field in fields(Plan)}))
    lines = -(-len(plan.reasons) // COLUMNS)
    width, height = COLUMNS * CELL + 2 * MARGIN, lines * CELL + TOP + MARGIN
    read = f"{plan.kept_tokens:,} of {plan.prompt_tokens:,} tokens are read (outlined)"
    each = f"each cell is {plan.block_size} tokens, shaded by its score for the question"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="24" font-size="15" fill="{INK}">{escape(report["question"])}</text>',
        f'<text x="{MARGIN}" y="45" font-size="12" fill="{INK}">{read}; {each}</text>',
    ]
    cold = f'<rect width="{CELL - 1}" height="{CELL - 1}" fill="{colour(0)}"/>'
    parts.append(
        f'<pattern id="cold" x="{MARGIN}" y="{TOP}" width="{CELL}" height="{CELL}" '
        f'patternUnits="userSpaceOnUse">{cold}</pattern>'
    )
    for line in range(lines):
        cells = min(COLUMNS, len(plan.reasons) - line * COLUMNS)
        at = f'x="{MARGIN}" y="{TOP + line * CELL}" width="{cells * CELL}" height="{CELL}"'
        parts.append(f'<rect {at} fill="url(#cold)"/>')
    kept = []
    for index, (heat, reason) in enumerate(zip(heats(plan), plan.reasons, strict=True)):
        line, column = divmod(index, COLUMNS)
        x, y = MARGIN + column * CELL, TOP + line * CELL
        cell = f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour(heat)}"'
        if reason is None and heat < COLDEST:
            continue
        if reason is None:
            parts.append(f"{cell}/>")
        else:  # above its neighbours
            kept.append(f'{cell} stroke="{KEPT}" stroke-width="2"/>')
    return "\n".join([*parts, *kept, "</svg>", ""])


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())))
