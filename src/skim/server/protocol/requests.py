"""Request bodies, by OpenAI's names. The one place that decides which fields are used, refused or ignored.

Bodies are validated by these models and `/openapi.json` is generated from them. Every list fails at its first
wrong item, so a body has at most a few errors. `AtMost` checks a length before the items; other limits that
are settings of the server are in `limits.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from skim.sampling.params import MAX_LOGPROBS, MAX_PRIORITY
from skim.server.options import SkimOptions
from skim.server.protocol import AtMost, Body
from skim.server.protocol.constraints import ConstraintFields
from skim.server.protocol.messages import FunctionChoice, Functions, Messages, ToolChoice, Tools
from skim.server.protocol.templates import TemplateFields

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1)]
StopList = Annotated[list[Stop], Field(fail_fast=True)]
StopIds = Annotated[list[TokenId], Field(fail_fast=True)]
LogitBias = dict[
    Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
]


# -- fields of both kinds of completion


REFUSED = {
    "audio": "replies are text",
    "chat_template": "a request cannot replace the model's chat template",
    "documents": "put documents into messages",
    "images": "prompts are text",
    "logits_processors": "use logit_bias or a grammar",
    "prompt_embeds": "give prompt as text or token ids",
    "use_beam_search": "replies are sampled",
    "web_search_options": "this server does not search the web",
}
"""Fields that would change the answer, and that no request may have. The reason completes the message."""


class StreamOptions(Body):
    place: ClassVar[str] = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ConstraintFields):
    """The engine's sampling parameters. Parameters that OpenAI does not have go by vLLM's names."""

    refused: ClassVar = REFUSED

    model: str | None = None
    modalities: list[Literal["text"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[LogitBias | None, AtMost("max_logit_bias", "entries")] = None
    allowed_token_ids: Annotated[TokenIds | None, AtMost("max_logit_bias", "ids")] = None
    bad_words: Annotated[StopList | None, AtMost("max_logit_bias", "words")] = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[Stop | StopList | None, AtMost("max_stop_strings", "strings")] = None
    stop_token_ids: Annotated[StopIds | None, AtMost("max_stop_strings", "ids")] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    skim: SkimOptions | None = None


def usage_in_stream(request: SamplingFields) -> tuple[bool, bool]:
    """Whether the last chunk of a stream has `usage`, and whether every chunk has it."""
    options = request.stream_options
    wanted = bool(options and options.include_usage)
    return wanted, wanted and bool(options and options.continuous_usage_stats)


# -- chat


class ChatRequest(SamplingFields, TemplateFields):
    refused: ClassVar = REFUSED | {
        "best_of": "use n",
        "echo": "the reply has only new text",
        "suffix": "/v1/completions fills in the middle",
    }

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


# -- the small routes


class TokenizeRequest(TemplateFields):
    """A text, or messages to render with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


REQUEST_FIELDS = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
"""Names that an error's `param` may begin with."""
