"""What travels over the wire. Requests refuse what they do not know; replies are OpenAI's shapes.

These models are the only description of the wire: bodies are checked by them, `/openapi.json` is made of
them. Limits that are settings are not here, but in `limits.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from skim.registry import scorers

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _is_scorer(name: str) -> str:
    if name not in scorers():
        raise ValueError(f"must be one of {', '.join(scorers())}")
    return name


ScorerName = Annotated[
    str, AfterValidator(_is_scorer), WithJsonSchema({"type": "string", "enum": list(scorers())})
]


class Body(BaseModel):
    """A request, or a part of one: no unknown field, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


# -- what both kinds of completion take


class StreamOptions(Body):
    include_usage: bool | None = None


class SkimOptions(Body):
    """Per-request overrides of the engine's features."""

    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Share cached prefixes only with requests of the same salt."""
    use_prefix_cache: bool | None = None
    """False: neither read nor leave cached prefixes."""
    sparse_prefill: Literal["off", "auto", "always"] | None = None
    """The others override the server's settings of the same names, for this request."""
    min_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    scorer: ScorerName | None = None
    keep_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    keep_tokens: Annotated[int, Field(ge=1)] | None = None
    keep_mass: Annotated[float, Field(gt=0, le=1)] | None = None
    prefill_block_size: Annotated[int, Field(ge=1)] | None = None
    head_tokens: Annotated[int, Field(ge=0)] | None = None
    tail_tokens: Annotated[int, Field(ge=0)] | None = None
    min_scored_tokens: Annotated[int, Field(ge=1)] | None = None
    rescue_cap: Annotated[float, Field(ge=0, le=1)] | None = None
    neighbour_radius: Annotated[int, Field(ge=0)] | None = None
    positions: Literal["auto", "original", "compact"] | None = None
    follow_up: Literal["backfill", "replan", "reuse"] | None = None
    prefill_attention: Literal["dense", "blocksparse"] | None = None
    blocksparse_alpha: Annotated[float, Field(ge=0, le=1)] | None = None


class SamplingFields(Body):
    """The engine's sampling parameters, by OpenAI's names, and by vLLM's where OpenAI has none."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        dict[
            Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ]
        | None
    ) = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    skim: SkimOptions | None = None


# -- chat


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(Body):
    role: Literal["system"]
    content: Content


class DeveloperMessage(Body):
    role: Literal["developer"]
    content: Content


class UserMessage(Body):
    role: Literal["user"]
    content: Content


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FunctionDefinition(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: Name


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


# -- the small routes


class TokenizeRequest(Body):
    """A text, or messages as the chat template would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    prompt: str


class Reading(BaseModel):
    """Read off one of the engine's own dataclasses."""

    model_config = ConfigDict(from_attributes=True)


class PrefillReading(Reading):
    activations: int
    blocks_total: int
    blocks_kept: int
    below_threshold: int
    mostly_cached: int
    follow_ups: dict[str, int]
    fallbacks: dict[str, int]


class Health(BaseModel):
    status: Literal["ok", "loading", "draining", "dead"]
    prefill: PrefillReading | None
    """What sparse prefill has done; null while the model is loading."""


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


class PoolReading(Reading):
    capacity: int
    allocated: int
    live: int
    cold: int
    free: int
    block_bytes: int
    reserved_bytes: int
    used_bytes: int


class PrefixReading(Reading):
    queries: int
    hits: int
    misses: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    bypasses: dict[str, int]


class AttentionReading(Reading):
    """Blocks of keys that block-sparse prefill saw and read."""

    visible: int
    read: int
    chunks: dict[str, int]


class Stats(Reading):
    """The engine's counters; blocks and bytes of the pool, look-ups of the prefix tree."""

    running: int
    waiting: int
    steps: int
    tokens_computed: int
    tokens_generated: int
    preemptions: int
    outcomes: dict[str, int]
    paths: dict[str, int]
    pool: PoolReading
    prefix: PrefixReading
    prefill: PrefillReading
    attention: AttentionReading


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# -- replies


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SkimReport(BaseModel):
    """What was done for a request, and the milliseconds each phase took."""

    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    queue_ms: float
    scoring_ms: float
    prefill_ms: float
    decode_ms: float
    scorer: str | None
    fallback: str | None
    follow_up: str | None


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
    tool_calls: list[ReplyToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    skim: SkimReport


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    skim: SkimReport
