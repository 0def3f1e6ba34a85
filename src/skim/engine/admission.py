"""Whether a request can ever be served: decided from plain numbers, before it takes any memory."""

from __future__ import annotations

from skim.errors import PromptTooLongError, RequestError
from skim.sampling.params import SamplingParams


def check_request(
    prompt: tuple[int, ...], params: SamplingParams, *, vocab_size: int, sequences: int
) -> None:
    """Refuse what no plan could mend; `sequences` is the most in progress at once."""
    params.check_vocab(vocab_size)
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(
            f"prompt token {wrong} is outside the vocabulary of {vocab_size}; use this model's tokenizer"
        )
    if params.n > sequences:
        raise RequestError(f"n={params.n} is more than max_num_seqs={sequences}; lower n, or raise that")


def room_for_reply(
    slots: int,  # tokens of the prompt that are computed
    end: int,  # the position after the last of them
    params: SamplingParams,
    *,
    window: int,  # positions that are served
    widest_window: int,  # the most the model allows
    pool_tokens: int,  # tokens the KV pool holds
    unskimmed: str | None = None,  # why it is read in full, if it was to be skimmed
) -> int:
    """The most tokens the request may generate, cut to the window; an error if there can be none."""
    room = window - end
    if room < 1:
        wider = (
            f" or raise max_model_len (the model allows {widest_window})" if window < widest_window else ""
        )
        remedy = f"; shorten it, or have it skimmed (sparse_prefill){wider}"
        if unskimmed is not None:
            remedy = f", and it could not be skimmed: {unskimmed}"
        raise PromptTooLongError(
            f"the prompt has {end} tokens, which leaves no room for output in the window of {window}{remedy}"
        )
    fits = pool_tokens + 1 - slots  # the last token is never computed
    room = min(room, max(fits, 1) if params.max_tokens is None else params.max_tokens)
    if room > fits:
        raise PromptTooLongError(
            f"{slots} prompt tokens and {room} generated ones can never fit the KV pool of {pool_tokens} "
            f"tokens; raise kv_memory{' or lower max_tokens' if fits > 0 else ''}"
        )
    return room
