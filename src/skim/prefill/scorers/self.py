"""The attention scorer over the target's own first layers, with or without a drafter."""

from __future__ import annotations

from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scoring.calibration import calibration_of
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.scorer import Scorer
from skim.registry import Declaration

SCORER = Declaration(
    help="as `attention`, by the target even with a drafter", model="target", odds=True, order=30
)


def make(models: Models) -> Scorer:
    return AttentionScorer(models.target.module, calibration_of(models.target))
