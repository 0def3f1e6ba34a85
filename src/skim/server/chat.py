"""`/v1/chat/completions`: turns messages into a prompt, and deltas into a reply."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from skim.config import ServerConfig
from skim.engine.sequence import Delta
from skim.errors import shown
from skim.llm import LLM, Prepared
from skim.prefill.request import Request
from skim.rendering import PLAIN, Rendering
from skim.sampling.grammar import Grammar
from skim.sampling.logprobs import PromptLogprobs, TokenLogprob
from skim.sampling.params import SamplingParams
from skim.server.constraints import constraint_of
from skim.server.echo import prompt_tokens
from skim.server.errors import ApiError
from skim.server.formats.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from skim.server.formats.deltas import Delta as ParsedDelta
from skim.server.formats.dialect import Dialect
from skim.server.formats.reply import ReplyParser, ToolCall, gathered
from skim.server.functions import older_chunk, older_reply, with_tools
from skim.server.limits import chat_params, check_schemas, check_scored, truncated
from skim.server.logs import RequestLog
from skim.server.options import (
    control_tokens_of,
    decode_of,
    prefill_of,
    prefix_cache_of,
    wants_progress,
    wants_spans,
)
from skim.server.protocol.messages import Message, NamedToolChoice, for_template
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
from skim.server.protocol.requests import ChatRequest, usage_in_stream
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.report import TOKEN_BYTES, RunningUsage, usage
from skim.server.service import Generation, Service, requests_of
from skim.server.tokens import Texts, finite, texts_of
from skim.server.tools import tool_grammar

Tools = list[dict[str, Any]]

PROMPT_END = 256  # characters that tell whether the prompt has opened the reasoning


@dataclass(frozen=True)
class OpenedChat:
    """An admitted chat request. Use `generation` in `async with`, or in an `EventStream`."""

    generation: Generation
    reply: ChatReply


async def chat(service: Service, request: ChatRequest, log: RequestLog) -> Reply | EventStream:
    shows_progress = wants_progress(request.skim, stream=bool(request.stream))
    opened = await open_chat(service, with_tools(request), log)
    generation, reply = opened.generation, opened.reply
    older = bool(request.functions)
    if request.stream:
        include_usage, continuous = usage_in_stream(request)
        chunks = reply.stream(generation, include_usage, continuous=continuous)
        return EventStream(
            generation,
            older_chunks(chunks) if older else chunks,
            keepalive=service.config.keepalive,
            progress_head=reply.chunk_head(include_usage) if shows_progress else None,
        )
    async with generation:
        response = await reply.whole(generation)

        def write() -> Reply:
            reply.add_prompt(response)
            return json_reply(older_reply(response) if older else response)

        if reply.prompt_logprobs is None:
            return write()
        return await service.off_loop(write, TOKEN_BYTES * generation.prompt_tokens, admitted=True)


async def open_chat(service: Service, request: ChatRequest, log: RequestLog) -> OpenedChat:
    """Check and admit a chat request, whichever protocol it came by."""
    llm = service.llm
    service.check_model(request.model)
    tools = tools_of(request)
    dialect = service.dialect
    prefill = prefill_of(request.skim, llm.config.prefill)
    decode = decode_of(request.skim, llm.config.decode)
    sampled = chat_params(request, service.config, llm.sampling_defaults)
    params = dialect.params(sampled, calls=tools is not None)
    log.fields["user"] = request.user
    check = None
    if request.truncate_prompt_tokens is None:
        check = partial(service.check_length, prefill=prefill)
    control_tokens = control_tokens_of(request.skim, service.config)
    cache = prefix_cache_of(request.skim, request.cache_prompt, request.cache_salt)
    skimmed, rendering = prefill.sparse_prefill != "off", request.rendering()
    reply = ChatReply(
        f"chatcmpl-{log.id}",
        service.model_name,
        texts_of(service.texts, request.return_tokens_as_token_ids),
        params,
        spans=wants_spans(request.skim),
        token_ids=bool(request.return_token_ids),
    )

    def make() -> list[Request]:
        calls, answer = grammars_of(request, tools, dialect, service.config)
        prompt = prepare(
            llm,
            request.messages,
            tools,
            dialect,
            skimmed=skimmed,
            control_tokens=control_tokens,
            check=check,
            rendering=rendering,
        )
        end = (prompt.text or "")[-PROMPT_END:]
        reply.expect(
            lambda: dialect.parser(tools, end),
            stops=dialect.stops(calls=tools is not None),
            only_one_call=request.parallel_tool_calls is False,
        )
        grammar = dialect.constrained(calls, answer, end)
        held = replace(params, grammar=grammar) if grammar is not None else params
        prompt = truncated(prompt, request, params, llm.engine.core.max_model_len)
        check_scored([prompt], replace(params, n=1), service.config)
        return requests_of([prompt], held, cache, prefill, decode)

    return OpenedChat(await service.admit(params.n, log, make), reply)


# -- request


def tools_of(request: ChatRequest) -> Tools | None:
    """The tools to show to the model, or None."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in request.tools]
        if choice.function.name not in names:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name!r}, but the tools are "
                f"{shown(', '.join(names), quoted=False)}",
                param="tool_choice",
            )
    if choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def grammars_of(
    request: ChatRequest, tools: Tools | None, dialect: Dialect, config: ServerConfig
) -> tuple[Grammar | None, Grammar | None]:
    """The grammars of calls and of the answer, or None. If both are given, the reply is one or the other."""
    wanted = constraint_of(request, config)
    if tools is None:
        return None, wanted
    choice = request.tool_choice or "auto"
    asked = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
    form_or_call = wanted is not None and asked == "auto"
    if asked != "auto" or form_or_call or any(tool["function"].get("strict") for tool in tools):
        check_schemas([tool["function"].get("parameters", {}) for tool in tools], "tools", config)
    calls = tool_grammar(
        tools,
        "required" if form_or_call else asked,
        parallel=request.parallel_tool_calls is not False,
        form=dialect.tools,
        tags=dialect.tags,
    )
    return calls and replace(calls, asked_by="tools"), wanted if form_or_call else None


def prepare(
    llm: LLM,
    messages: Sequence[Message],
    tools: Tools | None,
    dialect: Dialect,
    *,
    skimmed: bool,
    control_tokens: str,
    check: Callable[[str], None] | None = None,
    rendering: Rendering = PLAIN,
) -> Prepared:
    """Render the conversation with the chat template, `check` the text, and tokenize it."""
    known = [for_template(message) for message in messages]
    prepared, shown = dialect.prepare(known, tools)
    return llm.encode_chat(
        prepared,
        tools=shown,
        skimmed=skimmed,
        control_tokens=control_tokens,
        check=check,
        rendering=rendering,
    )


# -- reply


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


async def older_chunks(
    chunks: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[dict[str, Any], None]:
    async for chunk in chunks:
        yield older_chunk(chunk)


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
