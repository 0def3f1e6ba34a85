"""Sampling parameters of one request. Checked on construction: params that exist are valid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skim.errors import RequestError, shown
from skim.sampling.grammar import Grammar

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: smaller divisors of the logits only lose precision."""

MAX_LOGPROBS = 20
MAX_PRIORITY = 100


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stop parameters of one request, by vLLM's names but for `grammar` and
    `shown_special_tokens`."""

    n: int = 1
    """Sequences to generate for the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach this sum, in (0, 1]. 1 keeps all."""
    top_k: int = 0
    """Keep only this many of the likeliest tokens. 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one, in [0, 1]. 0 keeps all."""
    seed: int | None = None
    """The same seed and logits give the same tokens, in any batch. Default: a new seed."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per time a token was already generated, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output. 1 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Maps token ids to numbers in [-100, 100] that are added to their logits."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be sampled. None allows all; kept as a tuple."""
    bad_words: Sequence[str] = ()
    """Texts that are not generated, as the tokenizer encodes them, alone or after a space."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and those of this many likeliest tokens, 0 to 20."""
    prompt_logprobs: int | None = None
    """Report the same for every prompt token but the first. The prompt is then read in full."""
    stop: Sequence[str] = ()
    """One string or several that end the output when they appear. None means none; kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output. None means none; kept as a tuple."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """Generate at least this many tokens before an end-of-sequence or stop token may be sampled."""
    max_tokens: int | None = 16
    """Most tokens to generate. 0 only reads the prompt. None means as many as the context window holds."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    shown_special_tokens: Sequence[int] = ()
    """Ids of special tokens that stay in the text even so. None means none; kept as a tuple."""
    grammar: Grammar | None = None
    """Grammar that the output follows, such as `Grammar.json_schema(...)`; the output ends where it ends."""
    priority: int = 0
    """Lower is served earlier, from -100 to 100. A level is worth ten seconds of waiting."""

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {shown(value)}", fields=name)
        self._whole("n", 1)
        self._whole("top_k", -1)
        self._whole("min_tokens", 0)
        self._whole("priority", -MAX_PRIORITY, MAX_PRIORITY)
        if self.max_tokens is not None:
            self._whole("max_tokens", 0)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                    fields=("min_tokens", "max_tokens"),
                )
        if self.logprobs is not None:
            self._whole("logprobs", 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self._whole("prompt_logprobs", 0, MAX_LOGPROBS)
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise RequestError(
                f"seed must be a whole number that fits in 64 bits, got {shown(self.seed)}", fields="seed"
            )
        self._number("temperature", "of at least 0", low=0.0)
        self._number("min_p", "in [0, 1]", low=0.0, high=1.0)
        self._number("presence_penalty", "in [-2, 2]", low=-2.0, high=2.0)
        self._number("frequency_penalty", "in [-2, 2]", low=-2.0, high=2.0)
        self._number("top_p", "in (0, 1]", above=0.0, high=1.0)
        self._number("repetition_penalty", "from 0.01 to 100", low=0.01, high=100.0)
        self._normalize_bias()
        self._normalize_stops()
        self._normalize_masks()
        self._check_grammar()

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < low or (high is not None and value > high):
            allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"{name} must be a whole number {allowed}, got {shown(value)}", fields=name)

    def _number(
        self,
        name: str,
        allowed: str,
        *,
        low: float = -math.inf,
        above: float = -math.inf,
        high: float = math.inf,
    ) -> None:
        value = getattr(self, name)
        if not _is_finite(value) or value < low or value <= above or value > high:
            raise RequestError(f"{name} must be a finite number {allowed}, got {shown(value)}", fields=name)

    def _normalize_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}", fields="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0:
                raise RequestError(
                    f"logit_bias keys must be token ids (whole numbers of at least 0), got {shown(token)}",
                    fields="logit_bias",
                )
            if not _is_finite(bias) or abs(bias) > 100:
                raise RequestError(
                    f"logit_bias of token {token} must be a number in [-100, 100], got {shown(bias)}",
                    fields="logit_bias",
                )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _normalize_stops(self) -> None:
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence):
            raise RequestError(
                f"stop must be a string or a list of strings, got {shown(stop)}", fields="stop"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop must hold strings of at least one character, got {shown(text)}", fields="stop"
                )
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("stop_token_ids", "shown_special_tokens"):
            given = getattr(self, name)
            object.__setattr__(self, name, _token_ids(name, () if given is None else given))

    def _normalize_masks(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could be sampled; list some, or leave it out",
                    fields="allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        words = () if self.bad_words is None else self.bad_words
        if not isinstance(words, Sequence) or isinstance(words, str):
            raise RequestError(f"bad_words must be a list of strings, got {shown(words)}", fields="bad_words")
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise RequestError(
                    f"bad_words must hold strings that are not blank, got {shown(word)}", fields="bad_words"
                )
        object.__setattr__(self, "bad_words", tuple(words))

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar must be a Grammar, such as Grammar.json_object(), got {shown(self.grammar)}",
                fields="grammar",
            )
        if self.ignore_eos or self.min_tokens > 0:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise RequestError(
                f"{name} cannot be used with a grammar, which decides where the output ends",
                fields=(name, "grammar"),
            )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """True if logits depend on earlier tokens, so that the sampler must count them."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids beyond the model's vocabulary, which is not known at construction."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token}, but the model's token ids are 0 to {vocab_size - 1}",
                        fields=name,
                    )


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise RequestError(f"{name} must be a list of token ids, got {shown(ids)}", fields=name)
    for token in ids:
        if not _is_int(token) or token < 0:
            raise RequestError(
                f"{name} must hold token ids (whole numbers of at least 0), got {shown(token)}", fields=name
            )
    return tuple(ids)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
