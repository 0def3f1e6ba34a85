"""Room for requests: sequences in progress, and prompt tokens that wait. Refusals are 429."""

from __future__ import annotations

import threading

from skim.server.errors import ApiError

WINDOWS = 16
LEAST_TOKENS = 2**20


def default_queued_tokens(window: int) -> int:
    """The default of `max_queued_tokens` for a context window. A lone book of a million tokens may wait."""
    return max(WINDOWS * window, LEAST_TOKENS)


class Capacity:
    """Counts what was admitted. Methods may be called from any thread."""

    def __init__(self, sequences: int, tokens: int) -> None:
        self.max_sequences = sequences
        self.max_tokens = tokens
        self.sequences = 0
        """Sequences in progress: running and waiting ones."""
        self.tokens = 0
        """Prompt tokens of requests whose first token has not come yet."""
        self._lock = threading.Lock()

    def take_sequences(self, sequences: int) -> None:
        """Admit `sequences`, whose prompts are not tokenized yet, or raise `ApiError`."""
        if sequences > self.max_sequences:
            raise ApiError(
                400,
                f"{sequences} sequences exceed this server's capacity of {self.max_sequences}; lower n, or "
                "raise the server's max_num_seqs or max_queued_requests",
                param="n",
            )
        with self._lock:
            if self.sequences + sequences > self.max_sequences:
                raise _queue_full(
                    f"{self.sequences} sequences are running or waiting, and the capacity is "
                    f"{self.max_sequences}; try again later"
                )
            if self.tokens >= self.max_tokens:
                raise self._too_many_tokens()
            self.sequences += sequences

    def take_tokens(self, tokens: int) -> None:
        """Admit prompts of `tokens` in all, or raise `ApiError`. Alone, any length is admitted."""
        with self._lock:
            if self.tokens and self.tokens + tokens > self.max_tokens:
                raise self._too_many_tokens(tokens)
            self.tokens += tokens

    def release_sequences(self, sequences: int) -> None:
        with self._lock:
            self.sequences -= sequences

    def release_tokens(self, tokens: int) -> None:
        with self._lock:
            self.tokens -= tokens

    def _too_many_tokens(self, tokens: int = 0) -> ApiError:
        more = f", this request has {tokens}," if tokens else ""
        return _queue_full(
            f"{self.tokens} prompt tokens are waiting{more} and the limit is {self.max_tokens}; try again "
            "later, or raise the server's max_queued_tokens"
        )


def _queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", reason="queue_full", retry_after=1)
