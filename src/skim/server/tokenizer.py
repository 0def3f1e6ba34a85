"""The routes of the tokenizer: texts and messages to token ids and back, and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from skim.server.chat import prepare
from skim.server.endpoint import TEXT_ERRORS, Call, Endpoint
from skim.server.errors import ApiError
from skim.server.protocol import replies
from skim.server.protocol.requests import DetokenizeRequest, TokenizeRequest
from skim.server.reply import Reply, json_reply

SLICE = 65536  # token ids that are written at once
_FOR_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def post_tokenize(call: Call) -> Reply:
    service, body = call.service, call.body
    llm = service.llm
    window = llm.engine.core.max_model_len
    service.check_model(body.model)
    _check(body)
    dialect = service.dialect
    special = body.add_special_tokens is not False
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
    rendering = body.rendering()

    def tokenize() -> Reply:
        if body.messages is not None:
            tokens = prepare(
                llm,
                body.messages,
                tools,
                dialect,
                skimmed=False,
                control_tokens=service.config.control_tokens,
                rendering=rendering,
            ).tokens
        else:
            tokens = llm.encode(body.prompt, add_special_tokens=special)
        strings = llm.tokenizer.convert_ids_to_tokens if body.return_token_strs else None
        return Reply(_tokenize_reply(tokens, window, strings))

    return await service.off_loop(tokenize, call.log.size)


def _check(body: TokenizeRequest) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise _misplaced("add_special_tokens", "prompt", "messages")
    for name in _FOR_MESSAGES:
        if body.messages is None and getattr(body, name) is not None:
            raise _misplaced(name, "messages", "prompt")


def _misplaced(name: str, place: str, other: str) -> ApiError:
    return ApiError(400, f"{name} applies to {place}, not to {other}; remove it", param=name)


def _tokenize_reply(
    tokens: Sequence[int], window: int, strings: Callable[[list[int]], list[str]] | None
) -> bytes:
    """A `TokenizeResponse` as JSON, written in slices: no call may hold the interpreter's lock for long."""
    head = replies.TokenizeResponse(count=len(tokens), max_model_len=window, tokens=[]).model_dump_json()
    slices = [tokens[start : start + SLICE] for start in range(0, len(tokens), SLICE)]
    listed = ",".join(",".join(map(str, each)) for each in slices)
    texts = ""
    if strings is not None:
        written = (json.dumps(strings(list(each)), ensure_ascii=False)[1:-1] for each in slices)
        texts = f',"token_strs":[{",".join(written)}]'
    return head.removesuffix("[]}").encode() + f"[{listed}]{texts}}}".encode("utf-8", "replace")


async def post_detokenize(call: Call) -> Reply:
    service, tokens = call.service, call.body.tokens
    llm = service.llm
    service.check_model(call.body.model)

    def detokenize() -> Reply:
        largest, last = max(tokens, default=0), llm.engine.model.vocab_size - 1
        if largest > last:
            raise ApiError(
                400, f"tokens: {largest} is not a token id; valid ids are 0 to {last}", param="tokens"
            )
        text = str(llm.tokenizer.decode(tokens, skip_special_tokens=False))
        return json_reply(replies.DetokenizeResponse(prompt=text))

    return await service.off_loop(detokenize, call.log.size)


async def get_tokenizer_info(call: Call) -> Reply:
    """Names and texts only: the tokenizer's own settings also have paths of this machine."""
    llm = call.service.llm
    tokenizer: Any = llm.tokenizer
    added = {
        token_id: replies.AddedToken(content=str(token), special=bool(token.special))
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    special = {name: _text(getattr(tokenizer, name)) for name in _SPECIAL}
    info = replies.TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=llm.engine.model.vocab_size,
        max_model_len=llm.engine.core.max_model_len,
        added_tokens_decoder=added,
        chat_template=tokenizer.chat_template,
        **special,
    )
    return json_reply(info)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _text(token: Any) -> str | None:
    return str(token) if token is not None else None


ENDPOINTS = (
    Endpoint(
        "POST",
        "/tokenize",
        "Tokenize a text or messages",
        post_tokenize,
        replies.TokenizeResponse,
        TokenizeRequest,
        TEXT_ERRORS,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        "Detokenize token ids",
        post_detokenize,
        replies.DetokenizeResponse,
        DetokenizeRequest,
        TEXT_ERRORS,
    ),
    Endpoint(
        "GET",
        "/tokenizer_info",
        "The tokenizer's settings and chat template",
        get_tokenizer_info,
        replies.TokenizerInfo,
        errors=(401, 403, 503),
    ),
)
