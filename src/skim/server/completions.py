"""`/v1/completions`: continues prompts given as text or token ids, without a chat template."""

from __future__ import annotations

import time
from codecs import IncrementalDecoder
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from skim.engine.sequence import Delta
from skim.llm import LLM, Prepared
from skim.prefill.request import Request
from skim.sampling.logprobs import PromptLogprobs, TokenLogprob
from skim.server.constraints import constraint_of
from skim.server.echo import best, echoed, joined, prompt_tokens, top_by_text
from skim.server.errors import ApiError
from skim.server.fill_in import encode_middle
from skim.server.generation import Generation, requests_of
from skim.server.limits import at_most, check_scored, completion_params, truncated
from skim.server.logs import RequestLog
from skim.server.options import decode_of, prefill_of, prefix_cache_of, wants_progress, wants_spans
from skim.server.protocol.replies import CompletionChoice, CompletionLogprobs, CompletionResponse
from skim.server.protocol.requests import CompletionRequest, usage_in_stream
from skim.server.reply import EventStream, Reply, json_reply
from skim.server.report import TOKEN_BYTES, RunningUsage, usage
from skim.server.service import Service
from skim.server.tokens import finite, texts_of


async def complete(service: Service, request: CompletionRequest, log: RequestLog) -> Reply | EventStream:
    llm, config = service.llm, service.config
    service.check_model(request.model)
    given = prompts_of(request)
    at_most("prompt", len(given), config.max_prompts, "prompts")
    params = completion_params(request, config, llm.sampling_defaults)
    prefill = prefill_of(request.skim, llm.config.prefill)
    decode = decode_of(request.skim, llm.config.decode)
    if request.suffix:
        check_middle(request, given)
        prefill = replace(prefill, sparse_prefill="off")  # a mark in the middle must not be skipped
    shows_progress = wants_progress(request.skim, stream=bool(request.stream))
    log.fields["user"] = request.user
    check = None
    if request.truncate_prompt_tokens is None:
        check = partial(service.check_length, prefill=prefill)
    cache = prefix_cache_of(request.skim, request.cache_prompt, request.cache_salt)
    texts: list[str] = []  # of the prompts, if they are echoed

    def encode(prompt: str | Sequence[int]) -> Prepared:
        if request.suffix and isinstance(prompt, str):
            if check is not None:
                check(prompt + request.suffix)
            encoded = encode_middle(llm, prompt, request.suffix)
        else:
            encoded = llm.encode_prompt(prompt, skimmed=prefill.sparse_prefill != "off", check=check)
        return truncated(encoded, request, params, llm.engine.core.max_model_len)

    def make() -> list[Request]:
        grammar = constraint_of(request, config)
        held = replace(params, grammar=grammar) if grammar is not None else params
        prompts = [encode(prompt) for prompt in given]
        check_scored(prompts, params, config)
        if request.echo:
            texts.extend(text_of(llm, prompt) for prompt in prompts)
        return requests_of(prompts, held, cache, prefill, decode)

    generation = await service.admit(len(given) * params.n, log, make)
    reply = CompletionReply(f"cmpl-{log.id}", service, request, texts)
    if request.stream:
        include_usage, continuous = usage_in_stream(request)
        return EventStream(
            generation,
            reply.stream(generation, include_usage, continuous=continuous),
            keepalive=config.keepalive,
            progress_head=reply.chunk_head(include_usage) if shows_progress else None,
        )
    async with generation:
        return await reply.whole(generation)


def prompts_of(request: CompletionRequest) -> Sequence[str | Sequence[int]]:
    prompt: Any = request.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def check_middle(request: CompletionRequest, given: Sequence[str | Sequence[int]]) -> None:
    """Refuse a suffix beside fields that it cannot be combined with."""
    if request.echo:
        raise ApiError(400, "echo cannot be used with suffix; leave one of them out", param="echo")
    if not all(isinstance(prompt, str) for prompt in given):
        raise ApiError(400, "suffix needs a prompt that is given as text", param="suffix")


def text_of(llm: LLM, prompt: Prepared) -> str:
    """The prompt as it was given; token ids are decoded, special tokens included."""
    if prompt.text is not None:
        return prompt.text
    return str(llm.tokenizer.decode(prompt.tokens, skip_special_tokens=False))


class CompletionReply:
    """One reply in progress. Tracks the text length of every choice, for token offsets in logprobs.

    Deltas are numbered by prompt and sequence. With `best_of` there are more sequences than choices.
    """

    def __init__(
        self, reply_id: str, service: Service, request: CompletionRequest, texts: Sequence[str]
    ) -> None:
        self._head: dict[str, Any] = {
            "id": reply_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._service = service
        self._texts = texts_of(service.texts, request.return_tokens_as_token_ids)
        self._token_ids = bool(request.return_token_ids)  # show those of the prompt and of the reply
        self._logprobs = request.logprobs
        self._n = request.n or 1
        self._drawn = request.best_of or self._n  # sequences of each prompt
        self._echoed = texts  # of each prompt, if it is part of the reply
        self._scored = request.prompt_logprobs is not None
        self._spans = wants_spans(request.skim)  # report the spans that were read
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, IncrementalDecoder] = {}  # a character may span several tokens

    async def whole(self, generation: Generation) -> Reply:
        deltas: list[list[Delta]] = [[] for _ in range(generation.sequences)]
        async for delta in generation:
            deltas[delta.index].append(delta)
        skim = await generation.report(spans=self._spans)

        def write() -> Reply:
            firsts = range(0, len(deltas), self._drawn)
            choices = [
                choice
                for first in firsts
                for choice in self._choices(generation, first, deltas[first : first + self._drawn])
            ]
            counts = usage(generation.metrics)
            return json_reply(CompletionResponse(**self._head, choices=choices, usage=counts, skim=skim))

        if deltas[0][0].prompt_logprobs is None:
            return write()
        size = TOKEN_BYTES * generation.prompt_tokens
        return await self._service.off_loop(write, size, admitted=True)

    def _choices(
        self, generation: Generation, first: int, sequences: Sequence[Sequence[Delta]]
    ) -> list[CompletionChoice]:
        """The choices of one prompt, from the deltas of all its sequences."""
        prompt = first // self._drawn
        found = sequences[0][0].prompt_logprobs
        entries = [[entry for delta in parts for entry in delta.logprobs] for parts in sequences]
        kept = list(range(len(sequences)))
        if self._drawn > self._n:
            kept = best([fmean(entry.logprob for entry in one) if one else 0.0 for one in entries], self._n)
        before = self._before(prompt, found)
        scored = prompt_tokens(found, self._texts) if self._scored and found is not None else None
        choices = []
        for place, sequence in enumerate(kept):
            parts = sequences[sequence]
            text = "".join(delta.text for delta in parts)
            logprobs = self._entries(first + sequence, entries[sequence])
            choices.append(
                CompletionChoice(
                    index=prompt * self._n + place,
                    text=self._echoed[prompt] + text if self._echoed else text,
                    logprobs=joined(before, logprobs)
                    if before is not None and logprobs is not None
                    else logprobs,
                    finish_reason=parts[-1].finish_reason,  # type: ignore[arg-type]
                    prompt_logprobs=scored,
                    **self._ids(generation, first, [one for delta in parts for one in delta.token_ids]),
                )
            )
        return choices

    def _before(self, prompt: int, found: PromptLogprobs | None) -> CompletionLogprobs | None:
        """The log-probabilities of an echoed prompt."""
        if found is None or not self._echoed or self._logprobs is None:
            return None
        return echoed(found, self._echoed[prompt], self._texts, top=self._logprobs)

    async def stream(
        self, generation: Generation, include_usage: bool, *, continuous: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        unfinished = generation.sequences
        head = self.chunk_head(include_usage)
        last: dict[str, Any] = {}
        begun: dict[int, CompletionLogprobs | None] = {}  # by prompt: its log-probabilities
        waiting = set(range(generation.sequences)) if self._echoed else set()  # choices not begun

        def chunk(
            index: int, text: str, logprobs: CompletionLogprobs | None, end: Any = None, **ids: list[int]
        ) -> dict[str, Any]:
            choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=end)
            return {**head, "choices": [choice.model_dump() | ids]}

        counted = RunningUsage(generation.prompt_tokens)
        shown: set[int] = set()  # choices whose prompt's token ids were sent
        async for delta in generation:
            counted.add(len(delta.token_ids))
            index, prompt = delta.index, delta.index // self._drawn
            if index in waiting:
                waiting.remove(index)
                if prompt not in begun:
                    work = partial(self._before, prompt, delta.prompt_logprobs)
                    size = TOKEN_BYTES * generation.prompt_tokens
                    begun[prompt] = await self._service.off_loop(work, size, admitted=True)
                yield chunk(index, self._echoed[prompt], begun[prompt])
            logprobs = self._entries(index, delta.logprobs)
            ids = self._ids(generation, index, delta.token_ids, begun=index in shown)
            if not delta.text and logprobs is None and delta.finish_reason is None and not ids:
                continue
            shown.add(index)
            made = chunk(index, delta.text, logprobs, delta.finish_reason, **ids)
            if continuous:
                made["usage"] = counted.dump()
            unfinished -= delta.finish_reason is not None
            if unfinished:
                yield made
            else:
                last = made  # held back: it carries the report, known only when the generation has ended
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
        offsets = []
        at = self._offsets.get(index, len(self._echoed[index // self._drawn]) if self._echoed else 0)
        decoder = self._decoders.setdefault(index, self._texts.decoder())
        for entry in entries:
            offsets.append(at)
            at += len(decoder.decode(self._texts.bytes(entry.token_id)))
        self._offsets[index] = at
        return CompletionLogprobs(
            tokens=[self._texts.text(entry.token_id) for entry in entries],
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[top_by_text(entry, self._texts) for entry in entries]
            if self._logprobs > 0
            else None,
            text_offset=offsets,
        )
