"""Replies of the routes that generate nothing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from skim.server.protocol.replies import KeptSpan

# -- embeddings


class Embedding(BaseModel):
    """The mean of the last hidden states of a text, of length 1: numbers, or base64 of float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """Pooled hidden states of a model that was trained to generate text, not to embed it."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# -- rankings


class RankUsage(BaseModel):
    """Tokens of the query and all documents."""

    prompt_tokens: int
    total_tokens: int


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """A document by its index in the request.

    Relevances are shares: those of all documents of a request add up to 1. They compare documents of one
    request, and say nothing across requests.
    """

    index: int
    relevance_score: float
    document: RankedText | None = None


class RankReport(BaseModel):
    scorer: str


class RerankResponse(BaseModel):
    """The best documents, the best first; equal ones in the request's order."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RankUsage
    skim: RankReport


# -- plans


class PlanUsage(BaseModel):
    """Prompt tokens, with those of the chat template, and the ones that would be read."""

    prompt_tokens: int
    kept_tokens: int


class PlanBudget(BaseModel):
    """The setting that limits the kept tokens, and its value."""

    setting: Literal["keep", "keep_ratio", "keep_tokens", "keep_mass"]
    value: str | int | float


class SkimResponse(BaseModel):
    """The plan of a prompt. Without a plan (`spans` is null) all of it is read; a failure is in `fallback`.

    `messages` are those of the request, with contents as they would be read, and `skipped_chars` has a number
    for each. Both are null if the chat template changed the contents so that they cannot be found in its
    output. `spans` are runs of prompt tokens, with those of the chat template.
    """

    id: str
    object: Literal["skim.plan"] = "skim.plan"
    model: str
    messages: list[dict[str, Any]] | None
    skipped_chars: list[int] | None
    spans: list[KeptSpan] | None
    question: str | None
    budget: PlanBudget
    scorer: str | None
    coverage: float | None
    read_again: int  # blocks that the scorer read a second time
    positions: Literal["original", "compact"]
    block_size: int | None
    fallback: str | None
    problem: str | None
    usage: PlanUsage
