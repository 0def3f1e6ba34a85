"""All evaluations by name. To add one, subclass `Task` and add it here."""

from __future__ import annotations

from skim.evals.task import Evaluation
from skim.evals.tasks.agree import Agree
from skim.evals.tasks.count import Count
from skim.evals.tasks.evidence import Evidence
from skim.evals.tasks.needle import Needle
from skim.evals.tasks.qa import QA
from skim.evals.tasks.quote import Quote
from skim.evals.tasks.trace import Trace
from skim.evals.tasks.turns import TwoTurns

TASKS: dict[str, type[Evaluation]] = {
    task.name: task for task in (Needle, Evidence, TwoTurns, Trace, Count, Quote, QA, Agree)
}
