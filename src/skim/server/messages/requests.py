"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, by Anthropic's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from skim.server.options import SkimOptions
from skim.server.protocol import AtMost, Body
from skim.server.protocol.messages import Name
from skim.server.protocol.requests import Stop


class TextBlock(Body):
    type: Literal["text"]
    text: str


class TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class BlocksSource(Body):
    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]


class DocumentBlock(Body):
    """A document of plain text. Its title and context come before it."""

    type: Literal["document"]
    source: Annotated[TextSource | BlocksSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Accepted in histories and dropped: only its author can read it."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


ResultBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[list[Block], Field(min_length=1, fail_fast=True)]


class InputMessage(Body):
    place: ClassVar[str] = "messages[]"

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CustomTool(Body):
    place: ClassVar[str] = "tools[]"

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Turns the reasoning of models on or off whose chat template has `enable_thinking`."""

    place: ClassVar[str] = "thinking"

    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    format: SchemaFormat | None = None


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountTokensRequest(Body):
    """The part of a request that makes the prompt."""

    refused: ClassVar[Mapping[str, str]] = {"mcp_servers": "this server calls no MCP servers"}

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[
        Annotated[list[Stop], Field(fail_fast=True)] | None, AtMost("max_stop_strings", "strings")
    ] = None
    metadata: Metadata | None = None
    skim: SkimOptions | None = None
