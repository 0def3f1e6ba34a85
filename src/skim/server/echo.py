"""Prompts in a completion's reply: their text (`echo`) and the log-probabilities of their tokens.

All of this takes time in proportion to the prompt, so it runs in a text thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from skim.sampling.logprobs import PromptLogprobs, TokenLogprob
from skim.server.protocol.replies import CompletionLogprobs, PromptToken
from skim.server.tokens import Texts, finite

PromptTokens = list[dict[str, PromptToken] | None]


def prompt_tokens(found: PromptLogprobs, texts: Texts) -> PromptTokens:
    """The reply's `prompt_logprobs`, in vLLM's shape: the likeliest tokens and the prompt's own, by id."""
    return [None if entry is None else _by_id(entry, texts) for entry in found]


def _by_id(entry: TokenLogprob, texts: Texts) -> dict[str, PromptToken]:
    assert entry.rank is not None
    ranked = [(token, value, place) for place, (token, value) in enumerate(entry.top, start=1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token): PromptToken(logprob=finite(value), rank=place, decoded_token=texts.text(token))
        for token, value, place in ranked
    }


def top_by_text(entry: TokenLogprob, texts: Texts) -> dict[str, float]:
    """The likeliest tokens and the token itself by their text, so there may be one more, as in OpenAI's API.

    Of tokens with the same text, the likeliest counts.
    """
    ascending = [(entry.token_id, entry.logprob), *reversed(entry.top)]
    return {texts.text(token): finite(value) for token, value in ascending}


def echoed(found: PromptLogprobs, text: str, texts: Texts, *, top: int) -> CompletionLogprobs:
    """The prompt's part of a completion's `logprobs`, with `top` alternatives for each token.

    Nothing comes before the first token: it has null.
    """
    entries = [None if entry is None else replace(entry, top=entry.top[:top]) for entry in found]
    tops = [None if entry is None else top_by_text(entry, texts) for entry in entries]
    return CompletionLogprobs(
        tokens=[texts.text(token) for token in found.tokens],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        top_logprobs=tops if top else None,
        text_offset=offsets_in(text, found.tokens, texts),
    )


def offsets_in(text: str, tokens: Iterable[int], texts: Texts) -> list[int]:
    """Where each token begins in its prompt's text.

    A special token that the tokenizer added, and the space that a SentencePiece vocabulary puts before the
    first word, are not in the text: they have no width.
    """
    decoder = texts.decoder()
    offsets, at = [], 0
    for token in tokens:
        offsets.append(min(at, len(text)))
        piece = decoder.decode(texts.bytes(token))
        if texts.is_added(token) and not text.startswith(piece, at):
            continue
        if at == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]
        at += len(piece)
    return offsets


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The log-probabilities of a prompt and of the text after it."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = [*first.top_logprobs, *second.top_logprobs]
    return CompletionLogprobs(
        tokens=[*first.tokens, *second.tokens],
        token_logprobs=[*first.token_logprobs, *second.token_logprobs],
        top_logprobs=tops,
        text_offset=[*first.text_offset, *second.text_offset],
    )


def best(logprobs: Sequence[float], n: int) -> list[int]:
    """The indices of the `n` likeliest sequences, best first; ties go to the earlier one.

    `logprobs` are means over the tokens, as OpenAI has it: sums would prefer short sequences.
    """
    return sorted(range(len(logprobs)), key=lambda index: -logprobs[index])[:n]
