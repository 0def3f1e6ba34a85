"""One request: built by `LLM` and the server, read by planner and engine."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from skim.attention.blocksparse.policy import Policy
from skim.config import DecodeConfig, PrefillConfig
from skim.errors import RequestError
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import Anatomy, UnmappableError
from skim.sampling.params import SamplingParams

SLICE = 2**16  # tokens


@dataclass(frozen=True)
class Request:
    """A prompt to continue `params.n` times. Construction accepts any sequence of integers as token ids."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prefill: PrefillConfig
    anatomy: Anatomy | UnmappableError | None = None  # None: raw text, whose end is the question
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    use_prefix_cache: bool = True
    decode: DecodeConfig | None = None  # None: the engine's settings

    def __post_init__(self) -> None:
        token_ids: list[int] = []
        try:
            for part in slices(self.prompt_token_ids):
                token_ids.extend(map(operator.index, part))
        except TypeError as error:
            raise RequestError(f"a prompt must be a text or a list of token ids: {error}") from error
        object.__setattr__(self, "prompt_token_ids", tuple(token_ids))

    @cached_property
    def policy(self) -> Policy | None:
        """Block-sparse attention over the prompt; None for dense attention, as with `prompt_logprobs`."""
        return policy_of(self.prefill) if self.params.prompt_logprobs is None else None

    @cached_property
    def namespace(self) -> Namespace:
        """Prefix-cache namespace: one per salt and attention policy."""
        if self.policy is None:
            return Namespace(self.cache_salt)
        return Namespace(self.cache_salt, repr(self.policy))


def slices(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """A long prompt in parts. Loops of C over all of it would hold Python's lock for a tenth of a second."""
    if isinstance(tokens, (tuple, list)):
        for start in range(0, len(tokens), SLICE):
            yield tokens[start : start + SLICE]
    else:
        yield tokens


def policy_of(config: PrefillConfig) -> Policy | None:
    """The block-sparse attention policy for prompts; None for dense attention."""
    sparse = config.prefill_attention == "blocksparse"
    return Policy(float(config.blocksparse_alpha)) if sparse else None
