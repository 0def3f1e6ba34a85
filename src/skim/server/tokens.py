"""The text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable bytes stand for themselves, others start at U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """Bytes of each token, read from the vocabulary: decoding single tokens would trim spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._added = set(tokenizer.added_tokens_decoder)
        self.longest = max(map(len, tokenizer.get_vocab()))
        """Length of the longest token, in characters."""

    def bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""  # padding of the vocabulary
        if token_id in self._added:
            return str(token).encode()
        if self._byte_level:
            alphabet = _byte_alphabet()
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
