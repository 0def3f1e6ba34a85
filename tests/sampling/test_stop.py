"""Text is emitted once final, never taken back, and adds up; stop strings are found across pieces."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from skim.sampling import Detokenizer, StopChecker

Decode = Callable[[list[int]], str]

SMILE = "\N{GRINNING FACE}"
SAMPLE = f"héllo wörld, 你好吗 {SMILE}{SMILE} naïve — ok\n\n  fine \ufffd\ufffd done."


def _byte_level() -> Tokenizer:
    """Tokens: every byte, merges within and across characters, and a special one (the last id)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: index for index, letter in enumerate(alphabet)}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = []
    for text in ("he", "ll", "é", "你", SMILE, "\ufffd", " 你"):
        spelled = spell.pre_tokenize_str(text)[0][0]
        left = spelled[0]
        for right in spelled[1:]:
            if left + right not in letters:
                merges.append((left, right))
                letters[left + right] = len(letters)
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=merges))
    tokenizer.pre_tokenizer = spell
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def _byte_fallback() -> tuple[Decode, dict[str, int]]:
    """A SentencePiece-style decoder: ▁ for space, bytes as <0xNN>, and the first space is dropped."""
    words = ["▁", "▁Hello", "▁world", "ing", "a", ",", "\ufffd", "▁▁"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True), vocab


BYTE_LEVEL = _byte_level()
SIZE = BYTE_LEVEL.get_vocab_size()


def decode(ids: list[int]) -> str:
    return str(BYTE_LEVEL.decode(ids, skip_special_tokens=True))


def stream(decode: Decode, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(decode, context or [])
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.flush()]


def byte_tokens(data: bytes) -> list[int]:
    """One token per byte. Byte-level BPE maps printable bytes to themselves, the others to U+0100 and up."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) if byte in plain else chr(256 + shifted.index(byte)) for byte in data]
    return [BYTE_LEVEL.token_to_id(letter) for letter in letters]


# --- Detokenizer


def test_text_adds_up_and_has_no_broken_characters() -> None:
    pieces = stream(decode, BYTE_LEVEL.encode(SAMPLE.replace("\ufffd", "?")).ids)
    assert "".join(pieces) == SAMPLE.replace("\ufffd", "?")
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_a_plain_token_is_emitted_at_once() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(token) for token in BYTE_LEVEL.encode("hello").ids] == ["he", "ll", "o"]


@settings(max_examples=400)
@given(st.lists(st.integers(0, SIZE - 1), max_size=60))
def test_any_ids_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(stream(decode, ids)) == decode(ids)


PARTIAL_BYTES = [0x80, 0xBF, 0xC3, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x41, 0xED, 0xF4, 0xFF, 0xE0]


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PARTIAL_BYTES), max_size=80), st.integers(0, 3))
def test_partial_characters_add_up_to_their_text(data: list[int], specials: int) -> None:
    ids = byte_tokens(bytes(data))
    for place in range(specials):
        ids.insert(place * 7 % (len(ids) + 1), SIZE - 1)
    assert "".join(stream(decode, ids)) == decode(ids)


def test_bytes_are_spelled_as_the_tokenizer_spells_them() -> None:
    data = SAMPLE.encode()
    assert decode(byte_tokens(data)) == SAMPLE


def test_long_random_sequences_are_decoded_a_few_tokens_at_a_time() -> None:
    rng = random.Random(5)
    for pool in (
        range(SIZE),
        byte_tokens(bytes(PARTIAL_BYTES)),
        [SIZE - 1],
        byte_tokens(b"\xff"),
        byte_tokens(b"\xf0\x9f"),
    ):
        ids = [rng.choice(list(pool)) for _ in range(3000)]
        longest, calls = 0, 0

        def counting(part: list[int]) -> str:
            nonlocal longest, calls
            longest, calls = max(longest, len(part)), calls + 1
            return decode(part)

        assert "".join(stream(counting, ids)) == decode(ids)
        assert longest <= 20
        assert calls <= 15 * len(ids)


@pytest.mark.parametrize("text", ["\ufffd" * 50, "ok \ufffd fine", "\ufffd"])
def test_a_replacement_character_from_the_model_does_not_stall_the_stream(text: str) -> None:
    given, total = "", BYTE_LEVEL.encode(text).ids
    detokenizer = Detokenizer(decode)
    for count, token in enumerate(total, start=1):
        given += detokenizer.push(token)
        assert len(decode(total[:count])) - len(given) <= 3
    assert given + detokenizer.flush() == text


def test_an_incomplete_character_is_emitted_by_flush() -> None:
    pieces = stream(decode, byte_tokens(b"a" + SMILE.encode()[:3]))
    assert pieces == ["a", "", "", "", "\ufffd"]


def test_skipped_special_tokens_have_no_text_and_do_not_lengthen_the_tail() -> None:
    ids = byte_tokens(SMILE.encode()[:2]) + [SIZE - 1] * 40 + byte_tokens(SMILE.encode()[2:])
    assert "".join(stream(decode, ids)) == SMILE


def test_sentencepiece_spaces_are_kept_between_tokens() -> None:
    decode, vocab = _byte_fallback()
    words = ["▁Hello", "▁world", "ing", "▁", "▁", "▁Hello", ",", "▁▁", "a"]
    ids = [vocab[word] for word in words]
    assert stream(decode, ids)[:3] == ["Hello", " world", "ing"]
    assert "".join(stream(decode, ids)) == decode(ids) == "Hello worlding   Hello,  a"
    assert stream(decode, [vocab["▁world"]], context=[vocab["▁Hello"]]) == [" world", ""]


@settings(max_examples=200)
@given(st.text(alphabet="aé你" + SMILE + " ", max_size=12))
def test_byte_fallback_gives_whole_characters(text: str) -> None:
    decode, vocab = _byte_fallback()
    ids = [vocab["▁Hello"]] + [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
    pieces = stream(decode, ids)
    assert "".join(pieces) == "Hello" + text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 263), max_size=60))
def test_byte_fallback_with_invalid_bytes_neither_stalls_nor_loses_words(picks: list[int]) -> None:
    decode, vocab = _byte_fallback()
    by_id = {index: word for word, index in vocab.items()}
    ids = [pick if pick < 8 else 8 + PARTIAL_BYTES[pick % len(PARTIAL_BYTES)] for pick in picks]
    text = "".join(stream(decode, ids))
    for word in ("Hello", "world", "ing", ","):
        assert text.count(word) == sum(word in by_id[token] for token in ids)


# --- StopChecker


def reference_stop(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Searches the whole text after every piece."""
    text = ""
    for piece in pieces:
        text += piece
        hits = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if hits:
            at, _, stop = min(hits)
            return text[: at + len(stop)] if include else text[:at], stop
    return text, None


@settings(max_examples=600)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=15),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_stop_strings_are_found_as_in_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    checker = StopChecker(stops, include)
    shown, matched = "", None
    for piece in pieces:
        text, matched = checker.push(piece)
        shown += text
        whole, _ = reference_stop(pieces, stops, include)
        assert whole.startswith(shown)
        if matched is not None:
            break
    shown += checker.flush()
    assert (shown, matched) == reference_stop(pieces, stops, include)


def test_only_a_possible_beginning_is_held_back() -> None:
    checker = StopChecker(["</s>"], include=False)
    assert checker.push("a < b") == ("a < b", None)
    assert checker.push(" </") == (" ", None)
    assert checker.push("x") == ("</x", None)
    assert checker.push("<") == ("", None)
    assert checker.flush() == "<"


def test_the_earliest_match_wins_then_the_longest() -> None:
    assert StopChecker(["cd", "bcd", "bc"], include=False).push("abcde") == ("a", "bcd")
    assert StopChecker(["cd", "bcd", "bc"], include=True).push("abcde") == ("abcd", "bcd")


def test_nothing_is_emitted_after_a_match() -> None:
    checker = StopChecker(["\n\n"], include=False)
    assert checker.push("one\n") == ("one", None)
    assert checker.push("\ntwo") == ("", "\n\n")
    assert checker.push("three") == ("", "\n\n")
    assert checker.flush() == ""


def test_without_stop_strings_all_text_passes() -> None:
    checker = StopChecker([], include=False)
    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""
