"""Replies, in OpenAI's shapes where OpenAI has them, and the bodies of the small routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenIds = Annotated[list[int] | None, Field(exclude_if=lambda value: value is None)]
"""Left out unless `return_token_ids` asks for it."""

# -- completions


class PromptToken(BaseModel):
    """A token that was likely at a place of the prompt, or the prompt's own. vLLM's shape."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = Annotated[
    list[dict[str, PromptToken] | None] | None, Field(exclude_if=lambda value: value is None)
]
"""For each prompt token, the tokens that were likely there, by id; null for the first. Left out unless
`prompt_logprobs` asks for it."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class KeptSpan(BaseModel):
    """Prompt tokens `start` to `end`, exclusive, that were read, the reason, and their text."""

    start: int
    end: int
    reason: str
    text: str


class StatsModel(BaseModel):
    """Filled from a dataclass of the engine with the same attributes."""

    model_config = ConfigDict(from_attributes=True)


class DecodeStats(StatsModel):
    """Decode steps under slow-fast decode, counted for each sequence, and the KV blocks that they read."""

    slow: int
    fast: int
    blocks: int
    blocks_read: int
    refreshes: dict[str, int]
    """Slow steps by reason."""
    mean_mass: float | None
    """Estimated share of attention mass in the blocks that fast steps read; null without fast steps."""
    drafted: int
    """With `slow_fast` exact, tokens that fast steps drafted."""
    accepted: int
    """Of these, the tokens that slow steps accepted."""


class SkimReport(BaseModel):
    """Account of one request: tokens of each kind, milliseconds of each phase, scorer and fallback.

    A skimmed prompt has the text of its question and, if requested, the spans that were read.
    """

    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    restored_tokens: int
    """Of the cached tokens, those that came from checkpoint files."""
    generated_tokens: int
    preemptions: int
    queue_ms: float
    scoring_ms: float
    prefill_ms: float
    decode_ms: float
    scorer: str | None
    fallback: str | None
    follow_up: str | None
    kv_format: str
    """Format of stored keys and values: a dtype, or a quantized format."""
    kv_bytes: int
    """Keys and values of the tokens read and generated."""
    decode: DecodeStats | None = None
    """Slow and fast steps; null if slow-fast decode did not apply."""
    question: str | None = None
    spans: list[KeptSpan] | None = None


class SkimProgress(BaseModel):
    """`skim.progress` of a stream's chunk: the phase, and the prompt tokens computed of those to compute."""

    phase: Literal["queued", "scoring", "reading", "generating"]
    computed_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ReplyToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same text: vLLM and OpenRouter call it so."""
    tool_calls: list[ReplyToolCall] | None = None
    function_call: Annotated[CalledFunction | None, Field(exclude_if=lambda value: value is None)] = None
    """The call, if the request has `functions` instead of `tools`."""


class ChatChoice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the reply; null for any other end. vLLM's name."""
    token_ids: TokenIds = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = None
    skim: SkimReport
    prompt_logprobs: PromptTokens = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: TokenIds = None
    prompt_token_ids: TokenIds = None
    prompt_logprobs: PromptTokens = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    skim: SkimReport


# -- the small routes


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Field(exclude_if=lambda value: value is None)] = None


class DetokenizeResponse(BaseModel):
    prompt: str


class AddedToken(BaseModel):
    content: str
    special: bool


class TokenizerInfo(BaseModel):
    """The tokenizer's settings, by the names of `tokenizer_config.json`."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[int, AddedToken]
    """Tokens that were added to the vocabulary, by their ids."""
    chat_template: str | dict[str, str] | None


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "skim"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ResetResponse(BaseModel):
    freed_blocks: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
