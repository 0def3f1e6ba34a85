"""The reply to a chat request, whole or streamed: deltas of the engine become OpenAI's choices and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Any

from skim.engine.sequence import Delta
from skim.sampling.logprobs import PromptLogprobs, TokenLogprob
from skim.sampling.params import SamplingParams
from skim.server.echo import prompt_tokens
from skim.server.formats.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from skim.server.formats.deltas import Delta as ParsedDelta
from skim.server.formats.reply import ReplyParser, ToolCall, gathered
from skim.server.generation import Generation
from skim.server.protocol.replies import (
    CalledFunction,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatResponse,
    ReplyMessage,
    ReplyToolCall,
    TopLogprob,
)
from skim.server.report import RunningUsage, usage
from skim.server.tokens import Texts, finite


class ChatReply:
    """One reply in progress, whole or streamed."""

    def __init__(
        self,
        reply_id: str,
        model: str,
        texts: Texts,
        params: SamplingParams,
        *,
        spans: bool,
        token_ids: bool = False,
    ) -> None:
        self._head: dict[str, Any] = {"id": reply_id, "created": int(time.time()), "model": model}
        self._texts = texts
        self._params = params
        self._spans = spans  # report the spans that were read
        self._token_ids = token_ids  # show those of the prompt and of the reply
        self.prompt_logprobs: PromptLogprobs | None = None  # known with the whole reply
        self._parser: Callable[[], ReplyParser] = lambda: ReplyParser(None, None)
        self._stops: frozenset[int] = frozenset()
        self._only_one = False

    def expect(
        self, parser: Callable[[], ReplyParser], *, stops: frozenset[int], only_one_call: bool
    ) -> None:
        """Parse the text with a new `parser` for each choice. A token of `stops` is an ordinary end.

        With `only_one_call`, drop all calls but the first.
        """
        self._parser, self._stops, self._only_one = parser, stops, only_one_call

    async def whole(self, generation: Generation) -> ChatResponse:
        deltas: list[list[Delta]] = [[] for _ in range(self._params.n)]
        async for delta in generation:
            deltas[delta.index].append(delta)
        self.prompt_logprobs = deltas[0][0].prompt_logprobs
        parsers = [self._parser() for _ in deltas]
        choices = [self._choice(*given) for given in zip(count(), deltas, parsers)]
        skim = await generation.report(spans=self._spans)
        reasoning = sum(parser.reasoning_tokens for parser in parsers)
        return ChatResponse(
            **self._head,
            choices=choices,
            usage=usage(generation.metrics, reasoning_tokens=reasoning),
            prompt_token_ids=generation.prompt(0) if self._token_ids else None,
            skim=skim,
        )

    def add_prompt(self, whole: ChatResponse) -> None:
        """Add the prompt's log-probabilities, if wanted. Takes time in proportion to the prompt."""
        if self.prompt_logprobs is not None:
            whole.prompt_logprobs = prompt_tokens(self.prompt_logprobs, self._texts)

    def _choice(self, index: int, deltas: Sequence[Delta], parser: ReplyParser) -> ChatChoice:
        parsed = gathered([one for delta in deltas for one in self._parsed(delta, parser)])
        message = ReplyMessage(
            content=parsed.content or (None if parsed.calls else ""),
            reasoning_content=parsed.reasoning or None,
            reasoning=parsed.reasoning or None,
            tool_calls=[_called(call) for call in parsed.calls] or None,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
            finish_reason=self._finish_reason(deltas[-1], called=bool(message.tool_calls)),
            stop_reason=self._stop_reason(deltas[-1]),
            token_ids=[token for delta in deltas for token in delta.token_ids] if self._token_ids else None,
        )

    def _parsed(self, delta: Delta, parser: ReplyParser) -> list[ParsedDelta]:
        found = parser.push(delta.text, len(delta.token_ids))
        if delta.finish_reason is not None:
            found = [*found, *parser.finish()]
        return [one for one in found if not (self._only_one and _is_later_call(one))]

    def _stop_reason(self, last: Delta) -> str | int | None:
        return None if last.stop_reason in self._stops else last.stop_reason

    def _finish_reason(self, last: Delta, called: bool) -> Any:
        """`tool_calls` if the reply has calls and ended by itself. A stop string may cut a call short."""
        ended_itself = last.finish_reason == "stop" and self._stop_reason(last) is None
        return "tool_calls" if called and ended_itself else last.finish_reason

    async def stream(
        self, generation: Generation, include_usage: bool, *, continuous: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks: the role, reasoning, content and calls as they arrive, then the finish reason."""
        head = self.chunk_head(include_usage)
        parsers = [self._parser() for _ in range(self._params.n)]
        called = [False] * self._params.n
        begun = [False] * self._params.n
        unfinished = self._params.n
        counted = RunningUsage(generation.prompt_tokens)
        first = {"prompt_token_ids": generation.prompt(0)} if self._token_ids else {}

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            return {**head, "choices": [choice], **({"usage": counted.dump()} if continuous else {})}

        last: dict[str, Any] = {}
        async for delta in generation:
            index = delta.index
            if not begun[index]:
                begun[index] = True
                yield {**chunk(index, {"role": "assistant", "content": ""}), **first}
                first = {}
            counted.add(len(delta.token_ids))
            beside = self._beside(delta)
            for part in map(_part, self._parsed(delta, parsers[index])):
                called[index] |= "tool_calls" in part
                yield chunk(index, part, **beside)
                beside = {}
            if beside and delta.token_ids:
                yield chunk(index, {"content": ""}, **beside)
            if delta.finish_reason is not None:
                stop = self._stop_reason(delta)
                found_stop = {} if stop is None else {"stop_reason": stop}
                last = chunk(index, {}, finish_reason=self._finish_reason(delta, called[index]), **found_stop)
                unfinished -= 1
                if unfinished:
                    yield last
        metrics = generation.metrics
        done = {"skim": (await generation.report(spans=self._spans)).model_dump()}
        if include_usage:
            yield last
            spent = usage(metrics, reasoning_tokens=sum(parser.reasoning_tokens for parser in parsers))
            yield {**head, "choices": [], "usage": spent.model_dump(), **done}
        else:
            yield {**last, **done}

    def chunk_head(self, include_usage: bool) -> dict[str, Any]:
        """The fields that all chunks of a stream share."""
        return {**self._head, "object": "chat.completion.chunk", **({"usage": None} if include_usage else {})}

    def _beside(self, delta: Delta) -> dict[str, Any]:
        """What the first chunk of a delta has beside its text."""
        logprobs = self._logprobs(delta.logprobs)
        shown: dict[str, Any] = {"logprobs": logprobs.model_dump()} if logprobs is not None else {}
        return {**shown, "token_ids": list(delta.token_ids)} if self._token_ids else shown

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self._params.logprobs is None:
            return None
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **self._top(entry.token_id, entry.logprob).model_dump(),
                    top_logprobs=[self._top(token, logprob) for token, logprob in entry.top],
                )
                for entry in entries
            ]
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._texts.text(token), logprob=finite(logprob), bytes=list(self._texts.bytes(token))
        )


def _part(delta: ParsedDelta) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    function: dict[str, str] = {"arguments": delta.arguments}
    call: dict[str, Any] = {"index": delta.index, "function": function}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function"}
        call["function"] = {"name": delta.name, **function}
    return {"tool_calls": [call]}


def _is_later_call(delta: ParsedDelta) -> bool:
    return isinstance(delta, ToolCallDelta) and delta.index > 0


def _called(call: ToolCall) -> ReplyToolCall:
    return ReplyToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
