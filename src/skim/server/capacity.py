"""Room for requests: sequences in progress, and prompt tokens that wait. Refusals are 429."""

from __future__ import annotations

import threading

from skim.server.errors import ApiError

WINDOWS = 16
LEAST_TOKENS = 2**20
SMALL_PART = 64
"""A request is small if its prompts have at most this part of the limit."""


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
        self._small = max(1, tokens // SMALL_PART)
        self._tokens = {True: 0, False: 0}  # by `_is_small`
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Prompt tokens of requests whose first token has not come yet."""
        return sum(self._tokens.values())

    def take_sequences(self, sequences: int) -> None:
        """Admit `sequences`, whose prompts are not tokenized yet, or raise `ApiError`."""
        if sequences > self.max_sequences:
            raise ApiError(
                400,
                f"{sequences} sequences exceed this server's capacity of {self.max_sequences}; lower n, "
                "send fewer prompts, or raise the server's max_num_seqs or max_queued_requests",
                param="n",
            )
        with self._lock:
            if self.sequences + sequences > self.max_sequences:
                raise _queue_full(
                    f"{self.sequences} sequences are running or waiting, and the capacity is "
                    f"{self.max_sequences}; try again later"
                )
            self.sequences += sequences

    def take_tokens(self, tokens: int) -> None:
        """Admit a request whose prompts have `tokens` in all, or raise `ApiError`.

        Small requests have the same limit of their own, so no long prompt keeps them out. Among the others,
        any length is admitted alone.
        """
        small = self._is_small(tokens)
        with self._lock:
            waiting = self._tokens[small]
            if waiting and waiting + tokens > self.max_tokens:
                raise _queue_full(
                    f"{waiting} prompt tokens of {'small' if small else 'large'} requests are waiting, this "
                    f"request has {tokens}, and the limit is {self.max_tokens}; try again later, or raise "
                    "the server's max_queued_tokens"
                )
            self._tokens[small] += tokens

    def release_sequences(self, sequences: int) -> None:
        with self._lock:
            self.sequences -= sequences

    def release_tokens(self, tokens: int, *, of: int) -> None:
        """Stop counting `tokens` of a request that was admitted with `of`."""
        with self._lock:
            self._tokens[self._is_small(of)] -= tokens

    def _is_small(self, tokens: int) -> bool:
        return tokens <= self._small


def _queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", reason="queue_full", retry_after=1)
