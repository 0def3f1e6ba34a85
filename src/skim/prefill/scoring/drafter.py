"""A drafter: a small model that scores prompts for another one, the target.

If both have the same tokens, the drafter reads the prompt's own ids. Otherwise the prompt is decoded to text
and encoded again for the drafter, and the scores are mapped back through character offsets. The rest of Skim
sees one more `Scorer`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skim.errors import ConfigError
from skim.prefill.scoring.background import in_thread
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringModel, ScoringTask, handing_over
from skim.tokenization import OffsetsError, encode_with_offsets

Pairs = list[tuple[int, int]]
"""For each token the characters it stands for: start and end, ascending."""

_PROBES = (
    "The access code for the Oslo office is 16979.",
    "  def f(x):\n\treturn x ** 2  # naïve café\n\n\n",
    "日本語のテキスト, русский, 🙂, 0xDEADBEEF 1e-9",
    "<|im_start|>user\n<s>[INST] <bos><start_of_turn> </s>",
)

_SLICE = 1 << 14  # blocks between two yields


class Drafter:
    """Adapts scorers over a drafter's module and tokenizer to the target's prompts."""

    def __init__(self, module: Any, tokenizer: Any, target_tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._target_tokenizer = target_tokenizer
        known = int(module.config.get_text_config().vocab_size)
        self.shares_tokens = same_tokens(tokenizer, target_tokenizer) and len(target_tokenizer) <= known
        """True if the drafter can read the target's token ids."""

    def adapt(self, scorer: Scorer) -> Scorer:
        """Wrap a scorer that reads the drafter's tokens, so that it takes tasks in the target's."""
        if self.shares_tokens:
            return scorer
        return MappedScorer(
            scorer, decoder_with_offsets(self._target_tokenizer), encoder_with_offsets(self._tokenizer)
        )


class MappedScorer:
    """Runs a scorer of other tokens: maps the task to its tokens through text, and its scores back.

    Its blocks are half as long as the task's, in characters. A block of the task gets the best score of the
    blocks that overlap it, each multiplied by the overlapping share.
    """

    def __init__(
        self,
        scorer: Scorer,
        decode_with_offsets: Callable[[Sequence[int]], tuple[str, Pairs]],
        encode_with_offsets: Callable[[str], tuple[list[int], Pairs]],
    ) -> None:
        self._scorer = scorer
        self._decode = decode_with_offsets
        self._encode = encode_with_offsets

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        mapped = yield from handing_over(in_thread(lambda: self._map(task)), task)
        scores = yield from self._scorer.score(mapped.task)
        result = [0.0] * task.blocks
        for turn, (block, first_last) in enumerate(mapped.touched.items(), start=1):
            for other in _between(first_last):
                share = _share(mapped.own[other], mapped.spans[block])
                result[block] = max(result[block], scores[other] * share)
            if turn % _SLICE == 0:
                yield
        return result

    def _map(self, task: ScoringTask) -> _Mapped:
        """The task in the drafter's tokens. Takes seconds for millions of tokens, in one piece."""
        text, theirs = self._decode(task.tokens)
        tokens, ours = self._encode(text)
        if not tokens or len(theirs) != len(task.tokens) or len(ours) != len(tokens):
            raise ScoringError(
                f"the prompt's {len(task.tokens)} tokens became {len(text)} characters and {len(tokens)} "
                "tokens of the drafter, which do not match up; use a drafter of the target's family"
            )
        question = _disjoint(_tokens_in(_span(theirs, run), ours) for run in task.question)
        if not question:
            asked = ", ".join(f"{run.start} to {run.stop}" for run in task.question)
            raise ScoringError(
                f"the question at tokens {asked or 'none'} has no text that the drafter could read; use a "
                "drafter of the target's family"
            )
        size = max(1, round(task.block_size * len(tokens) / len(task.tokens) / 2))
        spans = [_span(theirs, block) for block in _blocks(len(task.tokens), task.block_size)]
        own = [_span(ours, block) for block in _blocks(len(tokens), size)]
        wanted = range(task.blocks) if task.candidates is None else sorted(set(task.candidates))
        touched = {block: [i // size for i in _ends(_tokens_in(spans[block], ours))] for block in wanted}
        candidates = sorted({b for first_last in touched.values() for b in _between(first_last)})
        chosen = None if task.candidates is None else tuple(candidates)
        inner = ScoringTask(
            tuple(tokens),
            question,
            size,
            chosen,
            task.policy,
            slice_seconds=task.slice_seconds,
            hand_over=task.hand_over,
        )
        return _Mapped(inner.with_ids(np.array(tokens, dtype=np.int64)), touched, own, spans)


@dataclass(frozen=True)
class _Mapped:
    """A task in the drafter's tokens."""

    task: ScoringTask
    touched: dict[int, list[int]]  # the drafter's first and last block that overlap each block
    own: list[tuple[int, int]]  # the characters of the drafter's blocks
    spans: list[tuple[int, int]]  # the characters of the target's blocks


def same_tokens(one: Any, other: Any) -> bool:
    """True if two tokenizers have the same vocabulary and split probe texts the same way."""
    if one is other:
        return True
    if one.get_vocab() != other.get_vocab():
        return False
    return all(_ids(one, text) == _ids(other, text) for text in _PROBES)


def encoder_with_offsets(tokenizer: Any) -> Callable[[str], tuple[list[int], Pairs]]:
    """Text to tokens and their offsets, ascending; nothing is added to the text."""

    def encode(text: str) -> tuple[list[int], Pairs]:
        try:
            tokens, found = encode_with_offsets(tokenizer, text)
        except OffsetsError as error:
            raise ScoringError(f"drafter: {error}; use one with a tokenizer.json") from error
        return tokens, [(a, b) for a, b in np.maximum.accumulate(found).tolist()]

    return encode


def decoder_with_offsets(tokenizer: Any) -> Callable[[Sequence[int]], tuple[str, Pairs]]:
    """Tokens to text and their offsets.

    The text is encoded again, which gives exact offsets if it gives the same tokens. If it does not (token
    ids that no text encodes to), each token is decoded after its predecessor.
    """
    encode = encoder_with_offsets(tokenizer)

    def decode(tokens: Sequence[int]) -> tuple[str, Pairs]:
        text = str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
        again, offsets = encode(text)
        if again == list(tokens):
            return text, offsets
        parts, offsets, at = [], [], 0
        before = ""
        for index, token in enumerate(tokens):
            pair = tokenizer.decode(
                [*tokens[max(0, index - 1) : index], token], clean_up_tokenization_spaces=False
            )
            part = pair[len(before) :] if pair.startswith(before) else tokenizer.decode([token])
            before = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
            parts.append(part)
            offsets.append((at, at + len(part)))
            at += len(part)
        return "".join(parts), offsets

    return decode


def check_offsets(role: str, model: ScoringModel) -> None:
    """Raise a ConfigError unless the model's tokenizer has character offsets. `role` is its setting."""
    try:
        encoder_with_offsets(model.tokenizer)("a text")
    except Exception as error:  # tokenizers without offsets refuse them in many ways, or leave them out
        raise ConfigError(
            f"the {role} {model.name} has a tokenizer without character offsets, which are needed "
            f"where drafter and model have different tokens; choose a {role} with a tokenizer.json, or a "
            "drafter of the model's family",
            fields=role,
        ) from error


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _blocks(tokens: int, size: int) -> list[range]:
    return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _span(offsets: Pairs, tokens: range) -> tuple[int, int]:
    """The characters from the first to the last of these tokens."""
    own = offsets[tokens.start : tokens.stop]
    return (own[0][0], max(end for _, end in own)) if own else (0, 0)


def _tokens_in(characters: tuple[int, int], offsets: Pairs) -> range:
    """The tokens that overlap these characters."""
    start, end = characters
    if start >= end:
        return range(0)
    first = bisect_right(offsets, start, key=lambda one: one[1])
    last = bisect_right(offsets, end - 1, key=lambda one: one[0])
    return range(first, max(first, last))


def _disjoint(runs: Iterable[range]) -> tuple[range, ...]:
    """Runs of tokens in order, without the tokens that an earlier one has, and without empty ones."""
    found: list[range] = []
    for run in runs:
        left = range(max(run.start, found[-1].stop if found else 0), run.stop)
        if left:
            found.append(left)
    return tuple(found)


def _ends(tokens: range) -> tuple[int, ...]:
    return (tokens[0], tokens[-1]) if tokens else ()


def _between(first_last: Sequence[int]) -> range:
    return range(first_last[0], first_last[1] + 1) if first_last else range(0)


def _share(one: tuple[int, int], other: tuple[int, int]) -> float:
    """The share of `one` that lies in `other`."""
    overlap = min(one[1], other[1]) - max(one[0], other[0])
    return max(0, overlap) / max(1, one[1] - one[0])
