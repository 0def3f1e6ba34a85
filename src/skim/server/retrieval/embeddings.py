"""`/v1/embeddings`: pooled hidden states of the served model, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from skim.llm import LLM
from skim.server.endpoint import Call
from skim.server.errors import ApiError
from skim.server.reply import Reply
from skim.server.retrieval.replies import Embedding, EmbeddingResponse, EmbeddingUsage
from skim.server.retrieval.requests import EmbeddingRequest
from skim.server.tasks import Task, Work


async def post_embeddings(call: Call) -> Reply:
    service, request = call.service, call.body
    llm, config = service.llm, service.config
    service.check_model(request.model)
    check_dimensions(request.dimensions, width_of(llm))
    given = inputs_of(request)
    if len(given) > config.max_documents:
        raise ApiError(
            400,
            f"input: this server allows at most {config.max_documents} texts, got {len(given)}",
            param="input",
        )
    most = min(config.max_embedding_tokens, llm.engine.core.max_model_len)

    def make() -> Work[list[np.ndarray]]:
        longest = service.texts.longest
        texts = [tokens_of(llm, one, index, most, most * longest) for index, one in enumerate(given)]
        return Work(sum(map(len, texts)), partial(llm.engine.embed, texts))

    task = Task[list[np.ndarray]](service, call.log)
    vectors = await task.run("embed", make)
    call.log.fields["inputs"] = len(given)
    usage = EmbeddingUsage(prompt_tokens=task.tokens, total_tokens=task.tokens)

    def write() -> Reply:
        data = [
            Embedding(index=index, embedding=shown(vector, request.encoding_format))
            for index, vector in enumerate(vectors)
        ]
        reply = EmbeddingResponse(data=data, model=service.model_name, usage=usage)
        return Reply(reply.model_dump_json().encode())

    return await service.off_loop(write, 32 * sum(map(len, vectors)), admitted=True)


def inputs_of(request: EmbeddingRequest) -> Sequence[str | Sequence[int]]:
    given: Any = request.input
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def tokens_of(
    llm: LLM, given: str | Sequence[int], index: int, most: int, most_chars: int
) -> tuple[int, ...]:
    """The tokens of an input. Raises `ApiError` that names it."""
    place = f"input[{index}]"
    if isinstance(given, str) and len(given) > most_chars:
        raise _refused(f"{place} has {len(given)} characters, far more than {most} tokens can hold", index)
    tokens = llm.encode(given) if isinstance(given, str) else tuple(given)
    if not tokens:
        raise _refused(f"{place} has no tokens", index)
    if len(tokens) > most:
        raise _refused(f"{place} has {len(tokens)} tokens; this server embeds texts of at most {most}", index)
    last = llm.engine.model.vocab_size - 1
    if max(tokens) > last:
        raise _refused(f"{place}: {max(tokens)} is not a token id; valid ids are 0 to {last}", index)
    return tokens


def width_of(llm: LLM) -> int:
    return int(llm.engine.model.module.config.get_text_config().hidden_size)


def check_dimensions(wanted: int | None, width: int) -> None:
    if wanted not in (None, width):
        raise ApiError(
            400,
            f"dimensions must be {width}, the model's width, got {wanted}: vectors are not trained to be cut",
            param="dimensions",
        )


def shown(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    """The vector as numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector.astype(np.float32)]


def _refused(message: str, index: int) -> ApiError:
    return ApiError(400, message, param="input" if index == 0 else f"input[{index}]")
