"""Parts of a chat request: messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from skim.errors import shown
from skim.server.protocol import REFUSED, Body

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


# -- messages


class TextPart(Body):
    place: ClassVar[str] = "messages[].content[]"

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        """Read a refusal as text, and refuse images, audio and files in words."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "refusal":
            return {"type": "text", "text": value.get("refusal")}
        if isinstance(kind, str) and kind != "text":
            reason = PydanticCustomError(
                REFUSED, "{kind} parts cannot be read, only text", {"kind": shown(kind)}
            )
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=reason, loc=("type",), input=kind)]
            )
        return value


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class FunctionCall(Body):
    place: ClassVar[str] = "messages[].tool_calls[].function"

    name: str
    arguments: str


class ToolCall(Body):
    place: ClassVar[str] = "messages[].tool_calls[]"

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


class _Message(Body):
    place: ClassVar[str] = "messages[]"


class SystemMessage(_Message):
    role: Literal["system"]
    content: Content


class DeveloperMessage(_Message):
    role: Literal["developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


Reasoning = Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None)]
"""Text that earlier replies had; other values, which some clients have, are left out."""


class AssistantMessage(_Message):
    refused: ClassVar = {"audio": "a spoken reply has no text; send its transcript as content"}

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: Reasoning = None
    reasoning: Reasoning = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: FunctionCall | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


def _function_as_tool(message: Any) -> Any:
    """The result of a function, in OpenAI's older form, as the result of a tool."""
    if not isinstance(message, dict) or message.get("role") != "function":
        return message
    name, content = message.get("name"), message.get("content")
    named = {"tool_call_id": _call_id(name)} if isinstance(name, str) else {}
    return {"role": "tool", "content": content if content is not None else "", **named}


def _call_id(function: str) -> str:
    """The id of a call in the older form, which has none."""
    return f"call_{function}"


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
    BeforeValidator(_function_as_tool),
]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: they have the role `system`, not `developer`, and no refusals."""
    known = message.model_dump(exclude_none=True)
    if known["role"] == "developer":
        known["role"] = "system"
    refusal = known.pop("refusal", None)
    if refusal is not None and not known.get("content"):
        known["content"] = refusal
    thought = known.pop("reasoning", None)
    if thought is not None:
        known.setdefault("reasoning_content", thought)
    called = known.pop("function_call", None)
    if called is not None:
        known.setdefault("tool_calls", [{"id": _call_id(called["name"]), "function": called}])
    if not known.get("tool_calls", True):
        del known["tool_calls"]
    for call in known.get("tool_calls", ()):
        call["type"] = "function"
    return known


# -- tools


class FunctionDefinition(Body):
    place: ClassVar[str] = "tools[].function"

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    place: ClassVar[str] = "tools[]"

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    place: ClassVar[str] = "tool_choice.function"

    name: Name


class NamedToolChoice(Body):
    place: ClassVar[str] = "tool_choice"

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[list[Tool], Field(fail_fast=True)]
FunctionChoice = Literal["none", "auto"] | NamedFunction
Functions = Annotated[list[FunctionDefinition], Field(fail_fast=True)]
