"""A plan as a page: the whole prompt, shaded by score, with outlines around what is kept.

One file that takes nothing from elsewhere; browsers are told to see to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from skim.cli.heatmap import Cell, cells, heats
from skim.prefill.plan import Plan, Reason

STRIP = 240  # most cells of the overview at the top

_STYLE = """
:root { color-scheme: light dark; --heat: 230, 120, 0; --kept: #0a6ed1; --faint: #888; }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; }
nav { position: sticky; top: 0; display: flex; height: 1.4rem; background: Canvas; border: 1px solid #8888; }
nav a { flex: 1 1 0; background: rgba(var(--heat), var(--s)); border-bottom: .3rem solid transparent; }
nav a.kept { border-bottom-color: var(--kept); }
main { white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 1rem; }
main span { background: rgba(var(--heat), var(--s)); scroll-margin-top: 3rem; }
main span:target { text-decoration: underline; }
.skipped { color: var(--faint); }
mark { color: inherit; background: none; outline: 2px solid var(--kept); outline-offset: 1px;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
mark .pinned { text-decoration: underline dotted var(--faint); }
.rescued, .neighbour, .earlier { font-style: italic; }
"""


def page(plan: Plan, texts: Sequence[str], *, title: str, question: str) -> str:
    """The page for a plan whose blocks have these texts. Everything that is not ours is escaped."""
    heat = heats(plan)
    kept = f"{plan.kept_tokens} of {plan.prompt_tokens} tokens are read, at {plan.positions} positions"
    if plan.coverage is not None:
        kept += f"; they have {plan.coverage:.1%} of the score"
    strip = "".join(_link(plan, cell) for cell in cells(plan, STRIP))
    body = "".join(_stretch(plan, blocks, texts, heat) for blocks in _stretches(plan))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(question)}</h1>
<p>{escape(title)}: {escape(plan.summary())}</p>
<p>{escape(kept)}.</p>
<p>The warmer a text, the higher its score; outlined is what is read, dotted underlines are what must be,
slanted is what was rescued or stands beside. Point at a block for its figures, click the strip to go
there.</p>
<nav>{strip}</nav>
<main>{body}</main>
</body>
</html>
"""


def block_title(plan: Plan, block: int) -> str:
    """What is told of a block that is pointed at."""
    start = block * plan.block_size
    end = min(start + plan.block_size, plan.prompt_tokens)
    score = "no score" if plan.scores is None else f"score {plan.scores[block]:.4g}"
    return f"block {block}, tokens {start}-{end - 1}, {score}, {_why(plan.reasons[block])}"


def _why(reason: Reason | None) -> str:
    return "skipped" if reason is None else f"kept: {reason}"


def _link(plan: Plan, cell: Cell) -> str:
    block = next((b for b in cell.blocks if plan.reasons[b] == cell.reason), cell.blocks.start)
    kept = "" if cell.reason is None else ' class="kept"'
    return f'<a href="#b{block}"{kept} style="--s:{cell.heat:.2f}" title="{block_title(plan, block)}"></a>'


def _stretches(plan: Plan) -> list[range]:
    """Blocks that are kept together, or skipped together."""
    found, block = [], 0
    for _, same in itertools.groupby(plan.kept):
        found.append(range(block, block := block + sum(1 for _ in same)))
    return found


def _stretch(plan: Plan, blocks: range, texts: Sequence[str], heat: Sequence[float]) -> str:
    spans = "".join(
        f'<span id="b{block}" class="{plan.reasons[block] or "skipped"}" style="--s:{heat[block]:.2f}" '
        f'title="{block_title(plan, block)}">{escape(texts[block])}</span>'
        for block in blocks
    )
    return f"<mark>{spans}</mark>" if plan.kept[blocks.start] else spans
