"""Finds the retrieval heads of a model with needle tasks whose answers are known.

Every head of every layer scores the prompt blocks of short prompts. The rank of the block with the answer
measures the head. The few heads that rank it best together are chosen. Takes minutes on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skim.errors import ConfigError
from skim.prefill.needles import Encode, Wording, make_task
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion

BLOCK = 64
LENGTH = 2048  # tokens of a task: several scoring windows, whose scores must then be comparable
_CANDIDATES = 32  # the best single heads, from which sets are built
_MOST_HEADS = 4
_GAIN = 0.05  # bits of rank that another head must gain
_SLACK = 0.05  # bits of rank that may be lost for stopping at an earlier layer


@dataclass(frozen=True)
class Trial:
    """The scores of one task at every head."""

    scores: torch.Tensor  # [layers, heads, blocks]
    answer: tuple[int, ...]  # blocks with the answer

    def ranks(self, scores: torch.Tensor) -> torch.Tensor:
        """Number of blocks that score above the answer's worst block. [..., blocks] -> [...]"""
        own = scores[..., list(self.answer)]
        return (scores[..., None, :] > own[..., :, None]).sum(dim=-1).amax(dim=-1).float()


def calibrate(
    module: Any,
    encode: Encode,
    text: str,
    *,
    model: str,
    trials: int = 64,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Calibration:
    """Choose the heads of `module` that retrieve best on `trials` tasks; judge them on half as many others.

    `encode` turns text into tokens, without special ones. `text` is natural text to hide needles in, at least
    20,000 characters. The same arguments give the same calibration. `progress` is called with (done, total).
    """
    if trials < 4 or len(text) < 20_000:
        raise ConfigError(
            f"calibration needs at least 4 trials and 20000 characters of text, got {trials} and {len(text)}"
        )
    counts = trials, (trials + 1) // 2
    halves: list[list[Trial]] = []
    for held_out, count in enumerate(counts):
        half: list[Trial] = []
        for index in range(count):
            half.append(run_trial(module, encode, text, f"{seed}:{held_out}:{index}", index, bool(held_out)))
            progress(sum(map(len, halves)) + len(half), sum(counts))
        halves.append(half)
    heads = choose(halves[0])
    return Calibration(
        layers=tuple(sorted({layer for layer, _ in heads})),
        heads=heads,
        model=model,
        trials=trials,
        quality=judge(halves[1], heads),
    )


def run_trial(module: Any, encode: Encode, text: str, seed: str, index: int, held_out: bool) -> Trial:
    config = module.config.get_text_config()
    wording = list(Wording)[index % len(Wording)]
    length = min(LENGTH, 2 * int(config.max_position_embeddings))
    task = make_task(random.Random(seed), text, encode, length, wording, held_out=held_out)
    everything = Calibration(layers=tuple(range(config.num_hidden_layers)))
    work = AttentionScorer(module, everything).score_heads(ScoringTask(task.tokens, (task.question,), BLOCK))
    scores = run_to_completion(work)[:, : -(-task.question.start // BLOCK)].cpu()
    answer = tuple(sorted({place // BLOCK for place in task.answer}))
    return Trial(scores.view(config.num_hidden_layers, -1, scores.shape[1]), answer)


def choose(trials: Sequence[Trial]) -> tuple[tuple[int, int], ...]:
    """The best set of heads that ends at the earliest layer within `_SLACK` bits of the best of all sets."""
    layers, heads, _ = trials[0].scores.shape
    flat = [trial.scores.flatten(0, 1) for trial in trials]
    alone = _bits(trials, flat)
    best = sorted(range(layers * heads), key=lambda index: (float(alone[index]), index))[:_CANDIDATES]
    sets = {}
    for depth in sorted({index // heads for index in best}):
        sets[depth] = _grow(trials, flat, [index for index in best if index // heads <= depth])
    least = min(bits for _, bits in sets.values())
    chosen = next(found for _, (found, bits) in sorted(sets.items()) if bits <= least + _SLACK)
    return tuple(sorted((index // heads, index % heads) for index in chosen))


def judge(trials: Sequence[Trial], heads: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Ranks of the answer by the chosen heads, by all heads together and by the whole last layer."""
    figures = {
        "chosen": _figures(trials, lambda s: torch.stack([s[layer, head] for layer, head in heads]).mean(0)),
        "max_over_all": _figures(trials, lambda s: s.amax(dim=(0, 1))),
        "mean_over_all": _figures(trials, lambda s: s.mean(dim=(0, 1))),
    }
    last = max(layer for layer, _ in heads)
    figures["mean_of_last_layer"] = _figures(trials, lambda s: s[last].mean(dim=0))
    return figures


def _figures(trials: Sequence[Trial], combine: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    ranks = [float(trial.ranks(combine(trial.scores))) for trial in trials]
    tenths = [max(1, trial.scores.shape[-1] // 10) for trial in trials]
    found = sum(rank < tenth for rank, tenth in zip(ranks, tenths, strict=True))
    return {
        "rank1": round(ranks.count(0.0) / len(ranks), 3),
        "top10": round(found / len(ranks), 3),
        "bits": round(float(torch.log2(1 + torch.tensor(ranks)).mean()), 3),
        "trials": len(ranks),
    }


def _bits(trials: Sequence[Trial], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean log2(1 + rank) over the trials: 0 if the answer always comes first. [n, blocks] each -> [n]"""
    ranks = [trial.ranks(some) for trial, some in zip(trials, scores, strict=True)]
    return torch.log2(1 + torch.stack(ranks)).mean(dim=0)


def _grow(
    trials: Sequence[Trial], flat: Sequence[torch.Tensor], candidates: Sequence[int]
) -> tuple[list[int], float]:
    """Grow a set of heads by the best next one while that gains `_GAIN`; return it and its bits of rank."""
    chosen: list[int] = []
    least = float("inf")
    while len(chosen) < min(_MOST_HEADS, len(candidates)):
        rest = [index for index in candidates if index not in chosen]
        sums = [scores[chosen].sum(dim=0) + scores[rest] for scores in flat]
        bits = _bits(trials, sums)
        if float(bits.min()) > least - _GAIN:
            break
        least = float(bits.min())
        chosen.append(rest[int(bits.argmin())])
    return chosen, least
