"""A report as a page: how it was measured, what was found, what failed, and the plots.

One file that takes nothing from elsewhere; browsers are told to see to that.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from skim.measure.drawing import Plot, require
from skim.measure.plots import plots
from skim.measure.report import Report, Row, show, titled

__all__ = ["page", "require"]

_STYLE = """
:root { color-scheme: light; --failed: #b00020; --faint: #666; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
code { background: #f2f2f2; padding: .5rem; display: block; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; } th.key, td.key { text-align: left; }
tr.failed td, p.failed { color: var(--failed); }
tr.failed td.reason { text-align: left; white-space: normal; }
svg { max-width: 100%; height: auto; }
figure { margin: 1rem 0; }
"""


def page(report: Report) -> str:
    """The page for a report. Everything that is not ours is escaped; the same report gives the same page."""
    drawn = "".join(_figure(plot) for plot in plots(report))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>skim {escape(report.kind)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>skim {escape(report.kind)}</h1>
<code>$ {escape(shlex.join(report.command))}</code>
{_failures(report)}
<h2>Results</h2>
<div class="wide">{_table(report)}</div>
{f"<h2>Plots</h2>{drawn}" if drawn else ""}
<h2>Settings</h2>
{_facts(report.settings)}
<h2>Machine</h2>
{_facts(report.machine)}
<h2>Versions</h2>
{_facts(report.versions)}
</body>
</html>
"""


def _failures(report: Report) -> str:
    failed = len(report.failures)
    if not failed:
        return ""
    told = f"{failed} of {len(report.rows)} rows failed; they have no figures and are in no plot."
    return f'<p class="failed">{told}</p>'


def _table(report: Report) -> str:
    """The rows, with units in the head and ranges in brackets. A failed row has its reason instead."""
    keys = list(dict.fromkeys(name for row in report.rows for name in row.key))
    units = {name: figure.unit for row in report.rows for name, figure in row.figures.items()}
    head = "".join(f'<th class="key">{escape(name)}</th>' for name in keys)
    head += "".join(f"<th>{escape(titled(name, unit))}</th>" for name, unit in units.items())
    body = "".join(_row(row, keys, list(units)) for row in report.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Row, keys: list[str], figures: list[str]) -> str:
    cells = "".join(f'<td class="key">{escape(_plain(row.key.get(name, "")))}</td>' for name in keys)
    if row.failed is not None:
        reason = f'<td class="reason" colspan="{max(1, len(figures))}">FAILED: {escape(row.failed)}</td>'
        return f'<tr class="failed">{cells}{reason}</tr>'
    for name in figures:
        cells += f"<td>{escape(show(row.figures[name])) if name in row.figures else ''}</td>"
    return f"<tr>{cells}</tr>"


def _facts(facts: Mapping[str, Any]) -> str:
    pairs = (f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(pairs)}</dl>"


def _figure(plot: Plot) -> str:
    return f'<figure role="img" aria-label="{escape(plot.title)}">{plot.svg}</figure>'


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False, default=str)
