"""The text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import re
from codecs import IncrementalDecoder, getincrementaldecoder
from typing import Any

from skim.tokenization import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST = -9999.0


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it: that of an impossible token is -9999, as in OpenAI's API."""
    return max(logprob, _LEAST)


class TokenTexts:
    """Bytes of each token, read from the vocabulary: decoding single tokens would trim spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._added = set(tokenizer.added_tokens_decoder)
        self.longest = max(map(len, tokenizer.get_vocab()))
        """Length of the longest token, in characters."""

    def is_added(self, token_id: int) -> bool:
        """True for tokens that were added to the vocabulary, such as special tokens."""
        return token_id in self._added

    def decoder(self) -> IncrementalDecoder:
        """Decodes the bytes of successive tokens: a character may span several."""
        return getincrementaldecoder("utf-8")("replace")

    def bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""  # padding of the vocabulary
        if token_id in self._added:
            return str(token).encode()
        if self._byte_level:
            alphabet = byte_alphabet()
            return bytes(alphabet[letter] for letter in token if letter in alphabet)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("\u2581", " ").encode()

    def text(self, token_id: int) -> str:
        """The token's text. Part of a character is written like OpenAI does: `bytes:\\xe2\\x82`."""
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenIdTexts:
    """Names tokens by their ids, for `return_tokens_as_token_ids`: texts of tokens may be equal."""

    def __init__(self, texts: TokenTexts) -> None:
        self.bytes = texts.bytes
        self.is_added = texts.is_added
        self.decoder = texts.decoder

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


Texts = TokenTexts | TokenIdTexts


def texts_of(texts: TokenTexts, as_ids: bool | None) -> Texts:
    return TokenIdTexts(texts) if as_ids else texts
