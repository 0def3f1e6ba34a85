"""HTML pages from the templates in `data/pages`: every value is escaped, and a missing one is an error.

Each page is one file that loads nothing; its content security policy forbids browsers to.
"""

from __future__ import annotations

import functools
import json
import shlex
from typing import Any

from skim.measure.plots import plots
from skim.measure.report import Report, show, titled
from skim.measure.speedup import speedups


def render(name: str, **values: Any) -> str:
    """The page that the template `name` makes of these values."""
    return str(_environment().get_template(name).render(values))


def page(report: Report) -> str:
    """The page for a report; the same report gives the same page.

    The table has units in its head and ranges in brackets, and speedups over dense where there are several
    modes. A failed row has its reason instead of figures.
    """
    return render(
        "report.html.jinja",
        report=report,
        command=shlex.join(report.command),
        keys=list(dict.fromkeys(name for row in report.rows for name in row.key)),
        units={name: figure.unit for row in report.rows for name, figure in row.figures.items()},
        plots=plots(report),
        speedups=speedups(report),
        titled=titled,
        show=show,
    )


def plain(value: Any) -> str:
    """A value as readable text: texts unchanged, whole numbers with separators, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False, default=str)


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("skim", "data/pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["plain"] = plain
    return made
