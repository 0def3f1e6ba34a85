"""Finds the retrieval heads of a model, with questions about facts whose place in a text is known.

Every head of every layer scores the blocks of short prompts. The rank of the evidence measures a head. A few
heads are chosen and weighted: those that, together with shared and similar words, rank it best over all kinds
of questions, the worst kinds counting most. A head that only finds repeated words adds nothing. Takes minutes
on two cores.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from skim.errors import ConfigError
from skim.prefill.pairs import Kind, Pair, calibration, held_out
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.combine import log_attention, odds, word_logits
from skim.prefill.scoring.decoding import Decode
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion

Encode = Callable[[str], list[int]]

BLOCK = 32
LENGTH = 2048  # tokens of a prompt: several scoring windows, whose scores must then be comparable
MOST_HEADS = 4
_CANDIDATES = 32  # the best single heads, from which sets are built
_FIRST = 1.6  # weight of the first head
_WEIGHTS = (0.15, 0.3, 0.6, 1.0)  # of a head that joins others, relative to the first
_SCALES = (0.3, 0.45, 0.6, 0.75, 1.0, 1.25)  # of all weights together, at last
_GAIN = 0.02  # bits of rank that another head must gain
_SLACK = 0.1  # bits of rank that may be lost for stopping at an earlier layer


@dataclass(frozen=True)
class Trial:
    """The log attention of every head to the blocks of one prompt, standardised; and the part of words."""

    kind: Kind
    logs: np.ndarray  # [layers * heads, blocks]
    words: np.ndarray  # [blocks], see `word_logits`
    evidence: tuple[tuple[int, ...], ...]  # the blocks of each passage

    def found(self, scores: np.ndarray) -> np.ndarray:
        """The score of each passage: that of its best block, which brings the others. [..., passages]"""
        return np.stack([scores[..., list(blocks)].max(axis=-1) for blocks in self.evidence], axis=-1)

    def ranks(self, scores: np.ndarray) -> np.ndarray:
        """Number of blocks that score above the worst passage of the evidence. [..., blocks] -> [...]"""
        ranks: np.ndarray = (scores > self.found(scores).min(axis=-1, keepdims=True)).sum(axis=-1)
        return ranks


def calibrate(
    module: Any,
    encode: Encode,
    decode: Decode,
    text: str,
    *,
    model: str,
    trials: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Calibration:
    """Choose the heads of `module` that find evidence best; judge them on as many held-out pairs.

    `encode` turns text into tokens, without special ones, and `decode` runs of tokens into texts. `text` is
    natural text to hide facts in, at least 20,000 characters. `trials` limits the pairs; None uses all. The
    same arguments give the same calibration.
    `progress` is called with (done, total).
    """
    if (trials is not None and trials < len(Kind)) or len(text) < 20_000:
        raise ConfigError(
            f"calibration needs at least {len(Kind)} trials, one of each kind, and 20000 characters of text; "
            f"got {trials} and {len(text)}"
        )
    halves = [_in_turns([part(kind) for kind in Kind])[:trials] for part in (calibration, held_out)]
    total = sum(map(len, halves))
    tools = Tools(module, encode, decode)
    done: list[list[Trial]] = []
    for name, pairs in zip(("calibration", "held-out"), halves, strict=True):
        half: list[Trial] = []
        for index, pair in enumerate(pairs):
            half.append(tools.run_trial(text, pair, random.Random(f"{seed}:{name}:{index}")))
            progress(sum(map(len, done)) + len(half), total)
        done.append(half)
    config = module.config.get_text_config()
    chosen = choose(done[0], int(config.num_attention_heads))
    return Calibration(
        layers=tuple(sorted({layer for layer, _ in chosen})),
        heads=tuple(chosen),
        weights=tuple(chosen.values()),
        model=model,
        trials=len(done[0]),
        quality=judge(done[1], int(config.num_attention_heads), chosen),
    )


class Tools:
    """The scorers that a trial uses: every head of the module, and the words that the default scorer adds."""

    def __init__(self, module: Any, encode: Encode, decode: Decode) -> None:
        config = module.config.get_text_config()
        self._length = min(LENGTH, 2 * int(config.max_position_embeddings))
        self._encode = encode
        self._heads = AttentionScorer(module, Calibration(layers=tuple(range(config.num_hidden_layers))))
        self._words = LexicalScorer(decode), EmbeddingScorer(module)

    def run_trial(self, text: str, pair: Pair, rng: random.Random) -> Trial:
        tokens, question, evidence = hide(rng, text, self._encode, self._length, pair)
        task = ScoringTask(tokens, (question,), BLOCK)
        count = -(-question.start // BLOCK)
        heads = run_to_completion(self._heads.score_heads(task))
        shared, alike = (np.array(run_to_completion(one.score(task)))[:count] for one in self._words)
        blocks = tuple(tuple(sorted({place // BLOCK for place in span})) for span in evidence)
        logs = log_attention(heads[:, :count]).astype(np.float32)
        return Trial(pair.kind, logs, word_logits(shared, alike), blocks)


def hide(
    rng: random.Random, text: str, encode: Encode, length: int, pair: Pair
) -> tuple[tuple[int, ...], range, list[range]]:
    """About `length` tokens of text with the pair's passages between sentences, then its question.

    Returns the tokens, and the ranges of the question and of each evidence.
    """
    passages = [
        _cut(passage, evidence) for passage, evidence in zip(pair.passages, pair.evidence, strict=True)
    ]
    hidden = [[encode(part) if part else [] for part in parts] for parts in passages]
    left = length - sum(len(part) for parts in hidden for part in parts)
    sentences: list[list[int]] = []
    for sentence in _sentences_from(rng, text):
        ids = encode(" " + sentence)
        if len(ids) > left:
            break
        left -= len(ids)
        sentences.append(ids)
    places = [rng.randint(0, len(sentences)) for _ in hidden]
    tokens: list[int] = []
    evidence: dict[int, range] = {}
    for place in range(len(sentences) + 1):
        for index, parts in enumerate(hidden):
            if places[index] == place:
                before, own, after = parts
                start = len(tokens) + len(before)
                evidence[index] = range(start, start + len(own))
                tokens += [*before, *own, *after]
        tokens += sentences[place] if place < len(sentences) else []
    question = encode("\n\n" + pair.question)
    asked = range(len(tokens), len(tokens) + len(question))
    return (*tokens, *question), asked, [evidence[index] for index in range(len(hidden))]


def choose(trials: Sequence[Trial], heads: int) -> dict[tuple[int, int], float]:
    """Weights of the chosen heads, by (layer, head), ascending.

    Takes the best set that ends at the earliest layer within `_SLACK` bits of the best of all sets.
    """
    alone = _bits(trials, [trial.words + _FIRST * trial.logs for trial in trials])
    best = sorted(range(len(alone)), key=lambda index: (float(alone[index]), index))[:_CANDIDATES]
    sets = {}
    for depth in sorted({index // heads for index in best}):
        sets[depth] = _grow(trials, [index for index in best if index // heads <= depth])
    least = min(bits for _, bits in sets.values())
    chosen = next(found for _, (found, bits) in sorted(sets.items()) if bits <= least + _SLACK)
    scale = min(_SCALES, key=lambda factor: _surprise(trials, chosen, factor))
    return {(i // heads, i % heads): round(scale * weight, 3) for i, weight in sorted(chosen.items())}


def judge(
    trials: Sequence[Trial], heads: int, chosen: dict[tuple[int, int], float]
) -> dict[str, dict[str, float]]:
    """By kind: `kept`, all passages in the best tenth of blocks; `first`, they came first; `bits` of rank.

    Ranks are those of heads and words together.
    """
    figures: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(trial.kind for trial in trials):
        own = [trial for trial in trials if trial.kind is kind]
        sums = [
            _weighted(trial, {layer * heads + head: w for (layer, head), w in chosen.items()})
            for trial in own
        ]
        ranks = np.array([float(trial.ranks(total)) for trial, total in zip(own, sums, strict=True)])
        tenths = np.array([max(1, len(total) // 10) for total in sums])
        figures[str(kind)] = {
            "kept": round(float((ranks < tenths).mean()), 3),
            "first": round(float(np.mean([r < len(t.evidence) for r, t in zip(ranks, own, strict=True)])), 3),
            "bits": round(float(np.log2(1 + ranks).mean()), 3),
            "trials": len(own),
        }
    return figures


def _bits(trials: Sequence[Trial], scores: Sequence[np.ndarray]) -> np.ndarray:
    """log2(1 + rank): the root mean square over kinds of their means. [n, blocks] each -> [n]

    Bad kinds count more, but not alone: with 16 trials of a kind, the worst one is often bad luck.
    """
    by_kind: dict[Kind, list[np.ndarray]] = {}
    for trial, some in zip(trials, scores, strict=True):
        by_kind.setdefault(trial.kind, []).append(np.log2(1 + trial.ranks(some)))
    means = np.stack([np.stack(values).mean(axis=0) for values in by_kind.values()])
    found: np.ndarray = np.sqrt((means**2).mean(axis=0))
    return found


def _grow(trials: Sequence[Trial], candidates: Sequence[int]) -> tuple[dict[int, float], float]:
    """Grow a set of heads by the best next one while that gains `_GAIN`; return its weights and bits."""
    chosen: dict[int, float] = {}
    least = float("inf")
    while len(chosen) < min(MOST_HEADS, len(candidates)):
        rest = [index for index in candidates if index not in chosen]
        options = [
            (index, _FIRST * weight) for index, weight in product(rest, _WEIGHTS if chosen else (1.0,))
        ]
        factors = np.array([weight for _, weight in options])[:, None]
        picked = [index for index, _ in options]
        sums = [_weighted(trial, chosen) + factors * trial.logs[picked] for trial in trials]
        bits = _bits(trials, sums)
        if float(bits.min()) > least - _GAIN:
            break
        least = float(bits.min())
        index, weight = options[int(bits.argmin())]
        chosen[index] = weight
    return chosen, least


def _surprise(trials: Sequence[Trial], chosen: dict[int, float], factor: float) -> float:
    """Mean over kinds of -log of the chance that the evidence gets, if heads weigh `factor` times as much."""
    by_kind: dict[Kind, list[float]] = {}
    for trial in trials:
        chance = odds(_weighted(trial, {index: factor * weight for index, weight in chosen.items()}))
        own = trial.found(chance)
        rest = chance.sum() - chance[[block for blocks in trial.evidence for block in blocks]].sum()
        by_kind.setdefault(trial.kind, []).append(float(-np.log(own / (own + rest)).mean()))
    return float(np.mean([np.mean(values) for values in by_kind.values()]))


def _weighted(trial: Trial, chosen: dict[int, float]) -> np.ndarray:
    """The logits of the blocks: the part of words, and the chosen heads by their weights."""
    total = trial.words
    for index, weight in chosen.items():
        total = total + weight * trial.logs[index]
    return total


def _cut(passage: str, evidence: str) -> tuple[str, str, str]:
    """The passage before, in and after the evidence. A passage of several lines stands alone."""
    before, _, after = passage.partition(evidence)
    edge = "\n\n" if "\n" in passage else " "
    if before.strip():
        return (
            edge + before.rstrip(" "),
            (" " if before.endswith(" ") else "") + evidence,
            after + edge.strip(" "),
        )
    return edge.strip(" "), (" " if edge == " " else "") + evidence, after + edge.strip(" ")


def _in_turns(groups: Sequence[Sequence[Pair]]) -> list[Pair]:
    """One pair of each kind, then the next of each, until all are used."""
    turns = max(map(len, groups), default=0)
    return [group[turn] for turn in range(turns) for group in groups if turn < len(group)]


def _sentences_from(rng: random.Random, text: str) -> Iterator[str]:
    """The sentences of the text from a random one, wrapping around at its end."""
    start = rng.randrange(len(text))
    turned = text[start:] + " " + text[:start]
    yield from re.split(r"(?<=[.!?])\s+", turned[: 2**18])[1:]
