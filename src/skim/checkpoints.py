"""Named checkpoints: compute the beginning of future prompts once, and save it under a name.

A system prompt, a repository or a book is saved as the tokens that all prompts with it have in common, up to
the end of the last message's text. Requests that begin with them find the checkpoint by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from skim.config import PrefillConfig
from skim.engine.sequence import Failed, Finished
from skim.engine.slots import Slots
from skim.errors import RequestError, shown
from skim.llm import LLM
from skim.memory.checkpoint import Named, check_name
from skim.prefill.reading import Reading
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

CONTINUATIONS = ("a", "1", "\n\n", "?")
"""Texts that may follow: tokens that differ between them do not belong to the common beginning."""


def save(
    llm: LLM,
    name: str,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    cache_salt: str = "",
) -> Named:
    """Compute the common beginning of all prompts with these messages, or this text, and save it."""
    check_name(name)
    engine = llm.engine
    assert engine.keeper  # without a directory it raises, before the long work
    tokens = beginning(llm, messages=messages, prompt=prompt)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    request = Request(tokens, params, PrefillConfig(), cache_salt=cache_salt)
    for event in engine.submit(request):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            break
    return engine.save_checkpoint(name, Slots(Reading(tokens)).keys, request.namespace)


def beginning(
    llm: LLM, *, messages: Sequence[Mapping[str, Any]] | None = None, prompt: str | None = None
) -> tuple[int, ...]:
    """The tokens that all prompts with these messages, or this text, have in common."""
    if (messages is None) == (prompt is None):
        raise RequestError("give exactly one of messages and prompt", fields="prompt")
    if prompt is not None:
        encoded = [llm.encode(prompt + more) for more in CONTINUATIONS]
    else:
        assert messages is not None
        if not messages:
            raise RequestError("messages is empty; give at least one message", fields="messages")
        every = (_continued(messages, more) for more in CONTINUATIONS)
        encoded = [llm.encode_chat(one, skimmed=False).tokens for one in every]
    same = (len(set(tokens)) == 1 for tokens in zip(*encoded, strict=False))
    common = encoded[0][: sum(1 for _ in takewhile(bool, same))]
    if not common:
        given, field = ("these messages", "messages") if prompt is None else (shown(prompt), "prompt")
        raise RequestError(
            f"prompts that begin with {given} have no token in common; give a longer text", fields=field
        )
    return common


def _continued(messages: Sequence[Mapping[str, Any]], more: str) -> list[dict[str, Any]]:
    """The messages, with more text at the end of the last one: another part if it has parts."""
    *before, last = (dict(message) for message in messages)
    content = last.get("content") or ""
    parts = not isinstance(content, str)
    last["content"] = [*content, {"type": "text", "text": more}] if parts else content + more
    return [*before, last]
