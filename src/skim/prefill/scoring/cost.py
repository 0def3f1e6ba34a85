"""The part of a prompt that a scoring model may read, given the time that skimming saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skim.prefill.scoring.scorer import ScoringTask
from skim.prefill.scoring.windows import weights_read

GPU_TOKENS = 1 << 18  # a GPU reads at least this many tokens
CPU_TOKENS = 8192  # a CPU reads at most this many, unless the budget is 1
EIGHT_BITS = 1.8  # measured speed of a forward with products in 8 bits; attention is as slow as before


@dataclass(frozen=True)
class Cost:
    """Cost of a token in the scoring model, relative to the target."""

    per_token: float
    on_gpu: bool
    speed: float = 1.0  # of the scoring model's products

    @classmethod
    def of(cls, target: Any, reader: Any, layers: int) -> Cost:
        """The cost of the first `layers` layers of the module `reader`."""
        own = int(target.config.get_text_config().num_hidden_layers)
        ratio = weights_read(reader, layers) / max(1, weights_read(target, own))
        return cls(ratio, reader.device.type == "cuda", EIGHT_BITS if _rounds(reader) else 1.0)

    def most_tokens(self, task: ScoringTask) -> int:
        """Tokens that may be read. Skimming saves the target about one reading of the prompt."""
        count = len(task.tokens)
        if task.scoring_budget >= 1:
            return count
        affordable = int(task.scoring_budget * count * self.speed / max(self.per_token, 1e-9))
        if self.on_gpu:
            return max(affordable, GPU_TOKENS)
        return min(affordable, int(CPU_TOKENS * self.speed))

    def may_read_again(self, task: ScoringTask) -> bool:
        """True if a second look is affordable: on a CPU it would cost as much as the first."""
        return self.on_gpu or task.scoring_budget >= 1


def _rounds(module: Any) -> bool:
    """True if the layers' forwards compute products in 8 bits where they only rank."""
    return any(getattr(vars(part).get("forward"), "rounds", False) for part in module.modules())
