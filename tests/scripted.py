"""A model with a script: it answers with given texts, so that tests of protocols need no clever model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Event, Failed, Finished, RequestMetrics
from skim.errors import SkimError
from skim.llm import LLM
from skim.prefill.request import Request
from skim.sampling.grammar import Matcher


@contextlib.contextmanager
def scripted(llm: LLM, *replies: str | SkimError, cut: int = 3) -> Iterator[list[str]]:
    """Answer the next requests with `replies`, in pieces of `cut` characters; an error ends its request.

    Yields the prompts of these requests, as texts. Requests are checked as the engine checks them, and a
    reply must be one that the request's grammar allows. Stop strings and `max_tokens` (in pieces) end it.
    """
    engine, prompts = llm.engine, []  # type: ignore[var-annotated]
    submit, left = engine.submit, list(replies)

    def answer(request: Request, emit: Callable[[Event], None] | None = None) -> RequestHandle:
        assert emit is not None
        handle = RequestHandle(-1, engine.abort)
        state = engine.core.intake.open(-1, request, emit)
        prompts.append(llm.tokenizer.decode(list(request.prompt_token_ids)))
        reply = left.pop(0)
        if isinstance(reply, SkimError):
            emit(Failed(reply))
            return handle
        check_grammar(state.matcher, llm.tokenizer.encode(reply, add_special_tokens=False), reply)
        for event in events_of(reply, request, cut):
            emit(event)
        return handle

    engine.submit = answer  # type: ignore[method-assign]
    try:
        yield prompts
        assert not left, f"{len(left)} replies of the script were not asked for"
    finally:
        engine.submit = submit  # type: ignore[method-assign]


def tool_call(name: str, /, **arguments: Any) -> str:
    """A reply, or a part of one, that calls a tool: Hermes style, as the default model's family writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_grammar(matcher: Matcher | None, tokens: list[int], reply: str) -> None:
    for token in tokens if matcher is not None else ():
        assert matcher is not None
        matcher.consume(token)
        assert matcher.error is None, f"the request's grammar does not allow {reply!r}: {matcher.error}"


def events_of(reply: str, request: Request, cut: int) -> Iterator[Event]:
    """The events of a request that the model answers with this text."""
    params = request.params
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    found = min(((reply.find(stop), stop) for stop in stops if stop in reply), default=None)
    ending: dict[str, Any] = {"finish_reason": "stop"}
    if found is not None:
        reply, ending = reply[: found[0]], {**ending, "stop_reason": found[1]}
    pieces = [reply[at : at + cut] for at in range(0, len(reply), cut)] or [""]
    if params.max_tokens is not None and len(pieces) > params.max_tokens:
        pieces, ending = pieces[: params.max_tokens], {"finish_reason": "length"}
    for piece in pieces[:-1]:
        yield Delta(0, piece, (1,))
    yield Delta(0, pieces[-1], (1,), **ending)
    count = len(request.prompt_token_ids)
    yield Finished(RequestMetrics(count, count, 0, len(pieces), 0, 0.0, 0.0, 0.0, 0.0))
