"""Whether a request can ever be served: decided before it is queued, from plain numbers."""

from __future__ import annotations

from skim.errors import PromptTooLongError, RequestError
from skim.sampling.params import SamplingParams


def admissible_max_tokens(
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    vocab_size: int,
    window: int,  # longest prompt plus output that is served
    widest_window: int,  # the longest the model allows
    sequences: int,  # most in progress at once
    pool_tokens: int,  # tokens the KV pool holds
) -> int:
    """The most tokens the request may generate, cut to the window; an error if there can be none."""
    params.check_vocab(vocab_size)
    count = len(prompt)
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"prompt token {wrong} is outside the vocabulary of {vocab_size}")
    if params.n > sequences:
        raise RequestError(f"n={params.n} is more than max_num_seqs={sequences}")
    room = window - count
    if room < 1:
        wider = f" or raise max_model_len (the model allows {widest_window})"
        raise PromptTooLongError(
            f"the prompt has {count} tokens, which leaves no room for output in the window of {window}; "
            f"shorten it{wider if window < widest_window else ''}"
        )
    fits = pool_tokens + 1 - count  # the last token is never computed
    room = min(room, max(fits, 1) if params.max_tokens is None else params.max_tokens)
    if room > fits:
        raise PromptTooLongError(
            f"{count} prompt tokens and {room} generated ones can never fit the KV pool of {pool_tokens} "
            f"tokens; raise kv_memory{' or lower max_tokens' if fits > 0 else ''}"
        )
    return room
