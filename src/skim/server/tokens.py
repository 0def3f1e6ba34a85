"""Single tokens as clients see them in log-probabilities: their text and their bytes."""

from __future__ import annotations

import re
from typing import Any

from skim.tokenization import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Bytes of a tokenizer's tokens, worked out from its vocabulary: a decoder would trim and join them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._added = set(tokenizer.added_tokens_decoder)
        self.longest = max(map(len, tokenizer.get_vocab()))
        """Characters in the longest token."""

    def bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""  # an id that pads the vocabulary
        if token_id in self._added:
            return str(token).encode()
        if self._byte_level:
            alphabet = byte_alphabet()
            return bytes(alphabet[letter] for letter in token if letter in alphabet)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("\u2581", " ").encode()

    def text(self, token_id: int) -> str:
        """Its text; `bytes:\\xe2\\x82`, as OpenAI writes it, where it is only a part of a character."""
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
