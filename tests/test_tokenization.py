"""Long texts are encoded in pieces, with the ids and offsets of the whole."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skim import tokenization
from skim.tokenization import OVERLAP, encode_with_offsets, seams, token_ids
from tests import tiny
from tests.paths import BOOK

SIZE = 1024  # characters of a piece in these tests


def trained(kind: str) -> Any:
    """A small tokenizer, trained on the beginning of the book."""
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        )
    else:
        backend = Tokenizer(models.BPE(byte_fallback=kind == "no splits"))
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<s>", "</s>"])
        if kind == "no splits":  # as Llama 2 has it: a text is one word
            marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            backend.normalizer = normalizers.Sequence(marks)
        else:
            digits = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")  # groups count from the left
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
            backend.decoder = decoders.ByteLevel()
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
    texts = BOOK[:60_000].split() if kind == "no splits" else BOOK[:60_000].split("\n")
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def default(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module", params=["default", "bytes", "byte-level", "unigram", "no splits"])
def tokenizer(request: pytest.FixtureRequest, default: Any) -> Any:
    if request.param == "default":
        return default
    return tiny.tokenizer() if request.param == "bytes" else trained(request.param)


def mixture(rng: random.Random, length: int) -> str:
    """Prose, digits, blanks, code, emoji, Chinese and control tokens, in runs of any length."""
    runs = [
        lambda n: BOOK[(at := rng.randrange(len(BOOK) - n)) : at + n],
        lambda n: "".join(rng.choice("0123456789") for _ in range(n)),
        lambda n: rng.choice(" \n\t") * n,
        lambda n: "".join(rng.choice("{}[]();=+-*/<>_ab1 \n") for _ in range(n)),
        lambda n: "".join(rng.choice("🦜🧑‍🚀é́ñ") for _ in range(n)),
        lambda n: "".join(rng.choice("鲸鱼很大。船长说、") for _ in range(n)),
        lambda n: rng.choice(("<|im_start|>", "<|im_end|>", "</s>", "<s>")) * (1 + n // 100),
        lambda n: "x" * n,
    ]
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts.append(rng.choice(runs)(rng.randrange(1, 700)))
    return "".join(parts)


def whole(tokenizer: Any, text: str) -> tuple[list[int], list[list[int]]]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], [[a, b] if b else [0, 0] for a, b in found["offset_mapping"]]


def pieces(tokenizer: Any, text: str) -> tuple[list[int], list[list[int]]] | None:
    found = tokenization._cut(tokenizer, text, SIZE, with_offsets=True)
    return None if found is None else (found[0], found[1].tolist())


def test_prose_is_encoded_in_pieces(tokenizer: Any) -> None:
    text = BOOK[20_000:45_000]
    found = pieces(tokenizer, text)
    if tokenizer.backend_tokenizer.pre_tokenizer is None:
        assert found is None, "its offsets drift, so its pieces do not agree"
    else:
        assert found == whole(tokenizer, text)


def count_in_pieces(tokenizer: Any, texts: Iterable[str]) -> int:
    """How many texts are encoded in pieces, after checking that their pieces are the whole."""
    count = 0
    for text in texts:
        found = pieces(tokenizer, text)
        count += found is not None
        assert found is None or found == whole(tokenizer, text)
    return count


@pytest.mark.parametrize("texts", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_pieces_of_any_text_are_the_whole_or_none(tokenizer: Any, texts: int) -> None:
    rng = random.Random(texts)
    in_pieces = count_in_pieces(tokenizer, (mixture(rng, 6000) for _ in range(texts)))
    assert in_pieces > 0 or tokenizer.backend_tokenizer.pre_tokenizer is None


def test_a_long_text_has_the_ids_and_special_tokens_of_the_whole(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "PIECE", 8192)
    text = BOOK[20_000:60_000]
    for special in (False, True):
        expected = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert token_ids(tokenizer, text, add_special_tokens=special) == expected
    ids, offsets = encode_with_offsets(tokenizer, text)
    assert (ids, [[a, b] if b else [0, 0] for a, b in offsets.tolist()]) == whole(tokenizer, text)


def ruled(rng: random.Random, length: int, share: float = 0.2) -> str:
    """Prose with rulers and blanks: runs in which no two pieces agree."""
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        if rng.random() < share:
            parts.append(rng.choice("-=_*. \n#") * rng.randrange(1, 3500))
        else:
            at = rng.randrange(len(BOOK) - 3000)
            parts.append(BOOK[at : at + rng.randrange(1, 3000)])
    return "".join(parts)


@pytest.mark.parametrize("texts", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_pieces_of_a_text_with_rulers_are_joined_to_those_of_the_whole(tokenizer: Any, texts: int) -> None:
    rng = random.Random(texts)
    in_pieces = count_in_pieces(tokenizer, (ruled(rng, 25_000) for _ in range(texts)))
    assert in_pieces >= texts / 3 or tokenizer.backend_tokenizer.pre_tokenizer is None


@pytest.mark.parametrize("dropped", [1, 111, 900])
def test_pieces_whose_offsets_drift_do_not_agree_by_chance(tokenizer: Any, dropped: int) -> None:
    """Some tokenizers drop characters they do not know, and the offsets after them are too small."""
    text = BOOK[20_000:22_500] + "\n" * dropped + " " * 2500 + BOOK[30_000:45_000]
    found = pieces(tokenizer, text)
    assert found is None or found == whole(tokenizer, text)


@pytest.mark.parametrize("run", ["-", "=", "_", "*", ".", " "])
@pytest.mark.parametrize("at", [0, 3 * SIZE - 1500, 20_000])
def test_a_ruler_joins_only_the_pieces_around_it(default: Any, run: str, at: int) -> None:
    text = BOOK[20_000 : 20_000 + at] + run * 3000 + " word" + BOOK[40_000:60_000]
    parts = list(tokenization._agreeing(default, text, SIZE))
    assert None not in parts
    spans = [(one.start, one.stop) for one in parts if one is not None]
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), len(text)]
    assert max(stop - start for start, stop in spans) <= 10 * SIZE
    assert sum(stop - start <= 2 * SIZE for start, stop in spans) >= 8
    assert pieces(default, text) == whole(default, text)


def test_a_sample_without_a_seam_is_taken_elsewhere(default: Any) -> None:
    tokenizer = Watched(default)
    run = "-" * (tokenization._SAMPLE + 1)
    text = run + " word" + BOOK[20_000 : 20_000 + 4 * tokenization.PIECE] + run
    ids, offsets = encode_with_offsets(tokenizer, text)
    assert (ids, offsets.tolist()) == whole(tokenizer.tokenizer, text)
    assert max(tokenizer.lengths) < len(text) // 2, "the text was encoded in one call"


def test_a_text_that_is_one_run_is_encoded_as_a_whole(default: Any) -> None:
    text = "-" * (3 * tokenization.JOINED * SIZE)
    assert pieces(default, text) is None
    assert not tokenization._can_cut(default, text)
    assert token_ids(default, text, add_special_tokens=False) == whole(default, text)[0]


class Watched:
    """A tokenizer that notes the length of every text."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.lengths: list[int] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self.tokenizer(text, **options)


class Forgetful:
    """A tokenizer whose tokens depend on the length of the text, so that no piece has those of the whole."""

    is_fast = True

    def __init__(self) -> None:
        self.tokenizer = tiny.tokenizer()

    def __call__(self, text: str, **options: Any) -> Any:
        found = self.tokenizer(text, **options)
        found["input_ids"] = [(token + len(text)) % 256 for token in found["input_ids"]]
        return found


def test_a_tokenizer_that_looks_far_ahead_encodes_the_whole() -> None:
    text = BOOK[: 5 * tokenization.PIECE]
    strange = Forgetful()
    assert tokenization._in_pieces(strange, text, with_offsets=False) is None
    expected = strange(text, add_special_tokens=False)["input_ids"]
    assert token_ids(strange, text, add_special_tokens=False) == expected


@pytest.mark.parametrize("text", [BOOK[:50_000], "x" * 50_000, "鲸鱼" * 9000, " " * 9000])
def test_seams_cut_a_text_into_pieces_of_bounded_size(text: str) -> None:
    found = seams(text, SIZE)
    assert (found[0], found[-1]) == (0, len(text))
    lengths = [b - a for a, b in itertools.pairwise(found)]
    assert all(SIZE <= length <= 2 * SIZE for length in lengths)
    assert SIZE > 2 * OVERLAP


RULED = "-" * 3000 + " word"


@pytest.mark.slow  # it measures time
@pytest.mark.parametrize(("before", "offsets"), [("", True), (RULED, True), (RULED, False)])
def test_other_threads_run_while_a_long_text_is_encoded(default: Any, before: str, offsets: bool) -> None:
    text, gaps, done = before + BOOK * 8, [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.002)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    if offsets:
        encode_with_offsets(default, text)
    else:
        token_ids(default, text, add_special_tokens=False)
    done.set()
    watcher.join()
    print(f"longest gap {max(gaps) * 1e3:.0f} ms")
    assert max(gaps) < 0.1
