"""The list of routes that generate nothing."""

from __future__ import annotations

from skim.server.endpoint import GENERATION_ERRORS, Endpoint
from skim.server.retrieval.embeddings import post_embeddings
from skim.server.retrieval.plan import post_skim
from skim.server.retrieval.replies import EmbeddingResponse, RerankResponse, SkimResponse
from skim.server.retrieval.requests import EmbeddingRequest, RerankRequest, SkimRequest
from skim.server.retrieval.rerank import post_rerank

_RERANK = "Rank documents for a query with a scorer of sparse prefill"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        "Mean last hidden states of texts, of length 1; the model is not trained to embed",
        post_embeddings,
        EmbeddingResponse,
        EmbeddingRequest,
        GENERATION_ERRORS,
    ),
    *(
        Endpoint("POST", path, _RERANK, post_rerank, RerankResponse, RerankRequest, GENERATION_ERRORS)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Endpoint(
        "POST",
        "/v1/skim",
        "Plan a conversation: the texts that a skimmed request would read",
        post_skim,
        SkimResponse,
        SkimRequest,
        GENERATION_ERRORS,
    ),
)
