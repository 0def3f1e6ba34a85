"""The part of a prompt that a scoring model may read, given the time that skimming saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skim.prefill.scoring.scorer import ScoringTask
from skim.prefill.scoring.windows import weights_read

GPU_TOKENS = 1 << 18  # a GPU reads at least this many tokens
CPU_LEAST = 2560  # a CPU reads at least this many, times `Cost.speed`: half a second, about
CPU_WHOLE = 18_432  # the longest prompt that a CPU reads whole, times `Cost.speed`
CPU_TOKENS = 8192  # a CPU reads at most this many of a longer one, times `Cost.speed`
EIGHT_BITS = 1.8  # measured speed of a forward that only ranks, with products in 8 bits


@dataclass(frozen=True)
class Cost:
    """Cost of a token in the scoring model, relative to the target's products for a token."""

    per_token: float
    on_gpu: bool
    speed: float = 1.0  # of the scoring model's products
    per_key: float = 0.0  # cost of a key that a token reads in the target

    @classmethod
    def of(cls, target: Any, reader: Any, layers: int) -> Cost:
        """The cost of the first `layers` layers of the module `reader`."""
        own = int(target.config.get_text_config().num_hidden_layers)
        weights = max(1, weights_read(target, own))
        return cls(
            weights_read(reader, layers) / weights,
            reader.device.type == "cuda",
            EIGHT_BITS if _rounds(reader) else 1.0,
            _products_of_key(target) / weights,
        )

    def most_tokens(self, task: ScoringTask) -> int:
        """Tokens that may be read.

        Skimming saves about a dense reading, in which a token reads half of the prompt on average. Where a
        CPU reads the whole prompt, no choice by words loses anything, so it may read more then.
        """
        count = len(task.tokens)
        if task.scoring_budget >= 1:
            return count
        saved = count * (1 + self.per_key * count / 2)
        affordable = int(task.scoring_budget * saved * self.speed / max(self.per_token, 1e-9))
        if self.on_gpu:
            return max(affordable, GPU_TOKENS)
        least, whole, most = (int(tokens * self.speed) for tokens in (CPU_LEAST, CPU_WHOLE, CPU_TOKENS))
        affordable = max(affordable, least)
        return count if count <= min(affordable, whole) else min(affordable, most)

    def may_read_again(self, task: ScoringTask) -> bool:
        """True if a second look is affordable: on a CPU it would cost as much as the first."""
        return self.on_gpu or task.scoring_budget >= 1


def _products_of_key(module: Any) -> int:
    """Multiply-adds for a key that a token reads, in the layers without a sliding window."""
    config = module.config.get_text_config()
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    dim = int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads)
    kinds = getattr(config, "layer_types", None)
    full = layers if kinds is None else list(kinds).count("full_attention")
    return 2 * heads * dim * full


def _rounds(module: Any) -> bool:
    """True if the layers' forwards compute products in 8 bits where they only rank."""
    return any(getattr(vars(part).get("forward"), "rounds", False) for part in module.modules())
