"""`/v1/completions`: continues prompts given as text or token ids, without a chat template."""

from __future__ import annotations

import time
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skim.engine.sequence import Delta, TokenLogprob
from skim.prefill.request import Request
from skim.server.constraints import constraint_of
from skim.server.limits import at_most, completion_params
from skim.server.logs import RequestLog
from skim.server.options import prefill_of, prefix_cache_of, wants_progress, wants_spans
from skim.server.protocol.replies import CompletionChoice, CompletionLogprobs, CompletionResponse
from skim.server.protocol.requests import CompletionRequest, usage_in_stream
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.report import RunningUsage, usage
from skim.server.service import Generation, Service, requests_of
from skim.server.tokens import Texts, texts_of


async def complete(service: Service, request: CompletionRequest, log: RequestLog) -> Reply | EventStream:
    llm = service.llm
    service.check_model(request.model)
    given = prompts_of(request)
    at_most("prompt", len(given), service.config.max_prompts, "prompts")
    params = completion_params(request, service.config)
    prefill = prefill_of(request.skim, llm.config.prefill)
    shows_progress = wants_progress(request.skim, stream=bool(request.stream))
    log.fields["user"] = request.user
    check = partial(service.check_length, prefill=prefill)
    cache = prefix_cache_of(request.skim, request.cache_prompt, request.cache_salt)

    def make() -> list[Request]:
        grammar = constraint_of(request, service.config)
        held = replace(params, grammar=grammar) if grammar is not None else params
        skimmed = prefill.sparse_prefill != "off"
        prompts = [llm.encode_prompt(prompt, skimmed=skimmed, check=check) for prompt in given]
        return requests_of(prompts, held, cache, prefill)

    generation = await service.admit(len(given) * params.n, log, make)
    spans = wants_spans(request.skim)
    reply = CompletionReply(
        f"cmpl-{log.id}",
        service.model_name,
        texts_of(service.texts, request.return_tokens_as_token_ids),
        params.logprobs,
        spans=spans,
        token_ids=bool(request.return_token_ids),
    )
    if request.stream:
        include_usage, continuous = usage_in_stream(request)
        return EventStream(
            generation,
            reply.stream(generation, include_usage, continuous=continuous),
            keepalive=service.config.keepalive,
            progress_head=reply.chunk_head(include_usage) if shows_progress else None,
        )
    async with generation:
        return json_reply(await reply.whole(generation))


def prompts_of(request: CompletionRequest) -> Sequence[str | Sequence[int]]:
    prompt: Any = request.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class CompletionReply:
    """One reply in progress. Tracks the text length of every choice, for token offsets in logprobs."""

    def __init__(
        self,
        reply_id: str,
        model: str,
        texts: Texts,
        logprobs: int | None,
        *,
        spans: bool,
        token_ids: bool = False,
    ) -> None:
        self._head: dict[str, Any] = {
            "id": reply_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = texts
        self._logprobs = logprobs
        self._spans = spans  # report the spans that were read
        self._token_ids = token_ids  # show those of the prompt and of the reply
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, IncrementalDecoder] = {}  # a character may span several tokens

    async def whole(self, generation: Generation) -> CompletionResponse:
        deltas: list[list[Delta]] = [[] for _ in range(generation.sequences)]
        async for delta in generation:
            deltas[delta.index].append(delta)
        choices = [
            CompletionChoice(
                index=index,
                text="".join(delta.text for delta in parts),
                logprobs=self._entries(index, [entry for delta in parts for entry in delta.logprobs]),
                finish_reason=parts[-1].finish_reason,  # type: ignore[arg-type]
                **self._ids(generation, index, [token for delta in parts for token in delta.token_ids]),
            )
            for index, parts in enumerate(deltas)
        ]
        skim = await generation.report(spans=self._spans)
        return CompletionResponse(**self._head, choices=choices, usage=usage(generation.metrics), skim=skim)

    async def stream(
        self, generation: Generation, include_usage: bool, *, continuous: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        unfinished = generation.sequences
        head = self.chunk_head(include_usage)
        last: dict[str, Any] = {}
        counted = RunningUsage(generation.prompt_tokens)
        begun: set[int] = set()
        async for delta in generation:
            counted.add(len(delta.token_ids))
            logprobs = self._entries(delta.index, delta.logprobs)
            ids = self._ids(generation, delta.index, delta.token_ids, begun=delta.index in begun)
            if not delta.text and logprobs is None and delta.finish_reason is None and not ids:
                continue
            begun.add(delta.index)
            choice = CompletionChoice(
                index=delta.index,
                text=delta.text,
                logprobs=logprobs,
                finish_reason=delta.finish_reason,  # type: ignore[arg-type]
                **ids,
            )
            chunk = {**head, "choices": [choice.model_dump()]}
            if continuous:
                chunk["usage"] = counted.dump()
            unfinished -= delta.finish_reason is not None
            if unfinished:
                yield chunk
            else:
                last = chunk  # held back: it carries the report, known only when the generation has ended
        metrics = generation.metrics
        done = {"skim": (await generation.report(spans=self._spans)).model_dump()}
        if include_usage:
            yield last
            yield {**head, "choices": [], "usage": usage(metrics).model_dump(), **done}
        else:
            yield {**last, **done}

    def chunk_head(self, include_usage: bool) -> dict[str, Any]:
        """The fields that all chunks of a stream share."""
        return {**self._head, **({"usage": None} if include_usage else {})}

    def _ids(
        self, generation: Generation, index: int, tokens: Sequence[int], *, begun: bool = False
    ) -> dict[str, list[int]]:
        """Token ids of a choice, with those of its prompt unless it has `begun`."""
        if not self._token_ids:
            return {}
        prompt = {} if begun else {"prompt_token_ids": generation.prompt(index)}
        return {"token_ids": list(tokens), **prompt}

    def _entries(self, index: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        tokens = [self._texts.text(entry.token_id) for entry in entries]
        offsets = []
        at = self._offsets.get(index, 0)
        decoder = self._decoders.setdefault(index, getincrementaldecoder("utf-8")("replace"))
        for entry in entries:
            offsets.append(at)
            at += len(decoder.decode(self._texts.bytes(entry.token_id)))
        self._offsets[index] = at
        tops = [{self._texts.text(token): value for token, value in entry.top} for entry in entries]
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=tops if self._logprobs > 0 else None,
            text_offset=offsets,
        )
