"""Body of `/v1/responses`, by OpenAI's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from skim.server.options import SkimOptions
from skim.server.protocol import Body
from skim.server.protocol.messages import Name
from skim.server.protocol.requests import StreamOptions

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class Item(Body):
    """An item of a conversation. Items of a reply may be sent back as they came."""

    place: ClassVar[str] = "input[]"

    id: str | None = None
    status: Status | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True)]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None
    encrypted_content: str | None = None


class ItemReference(Body):
    type: Literal["item_reference"]
    id: str


InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference,
    Field(discriminator="type"),
]


def _with_types(value: Any) -> Any:
    """Items without a type are messages."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item
        for item in value
    ]


class FunctionTool(Body):
    place: ClassVar[str] = "tools[]"

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: Name


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, fail_fast=True)]


ChoiceObject = Annotated[NamedChoice | AllowedTools, Field(discriminator="type")]


class PlainFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class TextConfig(Body):
    place: ClassVar[str] = "text"
    repeated: ClassVar = ("verbosity",)

    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class Reasoning(Body):
    place: ClassVar[str] = "reasoning"
    repeated: ClassVar = ("effort", "summary")

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Body):
    refused: ClassVar[Mapping[str, str]] = {
        "background": "replies are not made in the background; leave it out, or stream the reply",
        "conversation": "conversations are not stored; use previous_response_id",
        "prompt": "prompt templates are not stored; send the input itself",
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), BeforeValidator(_with_types)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    skim: SkimOptions | None = None
