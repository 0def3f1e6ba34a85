"""A report as an HTML page: its command, results, failures, plots, settings and machine."""

from __future__ import annotations

import shlex

from skim.measure.drawing import require
from skim.measure.plots import plots
from skim.measure.report import Report, show, titled
from skim.measure.templates import render

__all__ = ["page", "require"]


def page(report: Report) -> str:
    """The page for a report; the same report gives the same page.

    The table has units in its head and ranges in brackets. A failed row has its reason instead of figures.
    """
    return render(
        "report.html.jinja",
        report=report,
        command=shlex.join(report.command),
        keys=list(dict.fromkeys(name for row in report.rows for name in row.key)),
        units={name: figure.unit for row in report.rows for name, figure in row.figures.items()},
        plots=plots(report),
        titled=titled,
        show=show,
    )
