"""Request bodies of the routes that generate nothing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skim.config import PrefillConfig
from skim.server.options import SkimOptions, overrides
from skim.server.protocol import AtMost, Body
from skim.server.protocol.messages import Messages, Tools
from skim.server.protocol.requests import TokenIds

MOST_GAP = 256


class RankOptions(overrides(PrefillConfig, only=("scorer", "scoring_budget"))):  # type: ignore[misc]
    """Options of a ranking. By default the scorer is the server's, and reads everything."""


class EmbeddingRequest(Body):
    """Texts, or token ids, to embed."""

    model: str | None = None
    input: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="The model's width, or left out: its vectors are not trained to be cut."
    )
    user: Annotated[str, Field(max_length=512)] | None = None


class TextDocument(Body):
    place: ClassVar[str] = "documents[]"

    text: str


class RerankRequest(Body):
    """A query and documents, by the names that Cohere and Jina use."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        list[str | TextDocument],
        Field(min_length=1, fail_fast=True),
        AtMost("max_documents", "documents"),
    ]
    top_n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Return this many of the best documents. Default: all."
    )
    return_documents: bool | None = Field(
        default=None, description="False leaves the documents' texts out of the reply."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Cut documents to this many tokens. Default: read them whole."
    )
    skim: RankOptions | None = None


class SkimRequest(Body):
    """A conversation to plan. Sparse prefill is `always` unless the options say `auto`."""

    model: str | None = None
    messages: Messages
    tools: Tools | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Tokens of the reply that the plan leaves room for."
    )
    gap: Annotated[str, Field(max_length=MOST_GAP)] | None = Field(
        default=None, description="Text in place of skipped text. Default: [...] on a separate line."
    )
    skim: SkimOptions | None = None


RETRIEVAL_FIELDS = (
    EmbeddingRequest.model_fields.keys() | RerankRequest.model_fields.keys() | SkimRequest.model_fields.keys()
)
"""Names that an error's `param` may begin with."""
