"""`/v1/chat/completions`: checks a request, turns its messages into a prompt, and admits it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skim.config import ServerConfig
from skim.errors import shown
from skim.llm import LLM, Prepared
from skim.prefill.request import Request
from skim.rendering import PLAIN, Rendering
from skim.sampling.grammar import Grammar
from skim.server.chat_reply import ChatReply
from skim.server.constraints import constraint_of
from skim.server.errors import ApiError
from skim.server.formats.dialect import Dialect
from skim.server.functions import older_chunk, older_reply, with_tools
from skim.server.generation import Generation, requests_of
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
from skim.server.protocol.requests import ChatRequest, usage_in_stream
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.report import TOKEN_BYTES
from skim.server.service import Service
from skim.server.tokens import texts_of
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


async def older_chunks(
    chunks: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[dict[str, Any], None]:
    async for chunk in chunks:
        yield older_chunk(chunk)


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


async def count_tokens(service: Service, request: ChatRequest, size: int) -> int:
    """The prompt tokens of a conversation of `size` bytes, as it is encoded if nothing is skimmed."""
    service.check_model(request.model)
    work = partial(
        prepare,
        service.llm,
        request.messages,
        tools_of(request),
        service.dialect,
        skimmed=False,
        control_tokens=service.config.control_tokens,
        rendering=request.rendering(),
    )
    prompt = await service.off_loop(work, size)
    return len(prompt.tokens)


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
