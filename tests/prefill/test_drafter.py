"""Drafters that share the target's tokenizer, and drafters with another one."""

from __future__ import annotations

import random
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skim.attention import hook
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.drafter import (
    Drafter,
    MappedScorer,
    decoder_with_offsets,
    encoder_with_offsets,
    same_tokens,
)
from skim.prefill.scoring.features import Feature, Statistic
from skim.prefill.scoring.scorer import ScoringError, ScoringTask
from tests import paths, tiny

TEXT = paths.LICENSE


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer of words and parts of words: several characters per token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tiny.tokenizer()


class Pointer:
    """Scores a block 1.0 if its text has the word, else 0.01. Records the task."""

    def __init__(self, tokenizer: Any, word: str) -> None:
        self.tokenizer, self.word = tokenizer, word
        self.task: ScoringTask | None = None

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        self.task = task
        yield
        size = task.block_size
        wanted = range(task.blocks) if task.candidates is None else task.candidates
        texts = [
            self.tokenizer.decode(list(task.tokens[i * size : (i + 1) * size])) for i in range(task.blocks)
        ]
        return [
            (1.0 if self.word in text else 0.01) if block in wanted else 0.0
            for block, text in enumerate(texts)
        ]


def drive(work: Generator[None, None, list[float]]) -> list[float]:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return list(done.value)


def test_equal_tokenizers_share_tokens(letters: Any, words: Any) -> None:
    assert same_tokens(letters, letters)
    assert same_tokens(letters, tiny.tokenizer())
    assert not same_tokens(letters, words)
    other = tiny.tokenizer()
    other.add_tokens(["Oslo"])
    assert not same_tokens(letters, other)


def test_a_drafter_with_the_same_tokenizer_reads_the_ids_unchanged(letters: Any, words: Any) -> None:
    hook.register()
    module = tiny.build("llama")
    module.set_attn_implementation(hook.NAME)
    same, other = Drafter(module, letters, tiny.tokenizer()), Drafter(module, letters, words)
    assert same.shares_tokens
    assert not other.shares_tokens
    scorer = AttentionScorer(module, Calibration((1,), (Feature(Statistic.MAX, 1, 0, 1.0),), (0.1, 0.2)))
    assert same.adapt(scorer) is scorer
    mapped = other.adapt(scorer)
    assert isinstance(mapped, MappedScorer)


def test_a_drafter_with_fewer_tokens_than_the_target_cannot_share(letters: Any) -> None:
    module = tiny.build("llama")
    module.config.vocab_size = 200
    assert not Drafter(module, letters, letters).shares_tokens


@pytest.mark.parametrize("candidates", [None, (3, 4, 9)])
def test_scores_are_mapped_to_the_block_with_the_same_text(
    letters: Any, words: Any, candidates: tuple[int, ...] | None
) -> None:
    """The target's tokens are words, the drafter's are letters."""
    body = TEXT[2000:6000].replace("\n", " ")
    at = len(words(body[:1400], add_special_tokens=False).input_ids)
    text = body[:1400] + " zebra crossing " + body[1400:] + "\n\nWhere is the zebra?"
    tokens, offsets = encoder_with_offsets(words)(text)
    question = range(next(i for i, (_, end) in enumerate(offsets) if end > text.index("Where")), len(tokens))
    size = at * 2 // 7  # puts the needle into the middle of block 3
    pointer = Pointer(letters, "zebra")
    mapped = MappedScorer(pointer, decoder_with_offsets(words), encoder_with_offsets(letters))
    scores = drive(mapped.score(ScoringTask(tuple(tokens), (question,), size, candidates)))

    blocks = -(-len(tokens) // size)
    asked = {place // size for place in question}
    assert len(scores) == blocks
    assert max((score, block) for block, score in enumerate(scores) if block not in asked)[1] == 3
    assert pointer.task is not None
    own = pointer.task
    assert letters.decode(own.question_ids.tolist()).strip() == "Where is the zebra?"
    assert abs(own.blocks - 2 * blocks) <= 2  # drafter blocks have half as many characters
    if candidates is None:
        assert all(score > 0 for score in scores)
    else:
        assert {block for block, score in enumerate(scores) if score > 0} == set(candidates)


def test_an_attention_scorer_with_another_tokenizer(letters: Any, words: Any) -> None:
    hook.register()
    module = tiny.build("qwen3")
    module.set_attn_implementation(hook.NAME)
    tokens = words(TEXT[1000:4000], add_special_tokens=False).input_ids
    task = ScoringTask(tuple(tokens), (range(len(tokens) - 8, len(tokens)),), 16)
    calibration = Calibration((1,), (Feature(Statistic.MAX, 1, 0, 1.0),), (0.1, 0.2))
    scorer = Drafter(module, letters, words).adapt(AttentionScorer(module, calibration))
    scores = drive(scorer.score(task))
    assert len(scores) == task.blocks
    assert all(0 < score <= 1 for score in scores[:-1])


@pytest.mark.parametrize("text", ["plain", "naïve café 日本語 🙂", "  spaces\n\n\ttabs", "<s>user: hi</s>"])
def test_offsets_cover_the_decoded_text(letters: Any, words: Any, text: str) -> None:
    for tokenizer in (letters, words):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        decoded, offsets = decoder_with_offsets(tokenizer)(tokens)
        assert decoded == text
        assert len(offsets) == len(tokens)
        assert offsets == sorted(offsets)
        assert offsets[0][0] == 0
        assert offsets[-1][1] == len(text)


def test_ids_that_no_text_encodes_to_have_offsets(words: Any) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(900) for _ in range(200)]
    decoded, offsets = decoder_with_offsets(words)(tokens)
    assert words(decoded, add_special_tokens=False).input_ids != tokens
    assert len(offsets) == 200
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(decoded)
    assert all(a[1] == b[0] for a, b in pairwise(offsets))


def test_a_prompt_that_cannot_be_mapped_is_refused(letters: Any, words: Any) -> None:
    pointer = Pointer(letters, "zebra")
    decode, encode = decoder_with_offsets(words), encoder_with_offsets(letters)
    task = ScoringTask(tuple(words("some text").input_ids), (), 4)
    with pytest.raises(ScoringError, match="has no text"):
        drive(MappedScorer(pointer, decode, encode).score(task))
    with pytest.raises(ScoringError, match="do not match up"):
        drive(MappedScorer(pointer, lambda tokens: ("", []), encode).score(task))
