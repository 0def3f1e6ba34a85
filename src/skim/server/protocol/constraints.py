"""Fields that constrain the form of a reply: OpenAI's, vLLM's and llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from skim.server.protocol import Body
from skim.server.protocol.messages import Name

Schema = dict[str, Any]
SchemaOrText = Schema | Annotated[str, Field(min_length=1)]
Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


# -- response_format


class JsonSchema(Body):
    place: ClassVar[str] = "response_format.json_schema"

    name: Name | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class _Format(Body):
    place: ClassVar[str] = "response_format"


class TextFormat(_Format):
    type: Literal["text"]


class JsonObjectFormat(_Format):
    """Any JSON object, or, as llama.cpp has it, one that follows `schema`."""

    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class JsonSchemaFormat(_Format):
    """JSON that follows `json_schema.schema`, or, as llama.cpp has it, `schema`."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


# -- other fields


class StructuredOutputs(Body):
    """vLLM's object. Exactly one of its fields says what the reply must be."""

    place: ClassVar[str] = "structured_outputs"
    refused: ClassVar = {"structural_tag": "use tools, or a grammar"}

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None


class ConstraintFields(Body):
    """At most one of these may constrain the reply; `server/constraints.py` decides."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
