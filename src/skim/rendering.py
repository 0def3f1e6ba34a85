"""Applies a model's chat template to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skim.control_tokens import find_controls, with_plain_marks
from skim.errors import RequestError, shown

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

_RESERVED = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Names that are no variables of a template: transformers takes them, or they have fields of their own."""


@dataclass(frozen=True)
class Rendering:
    """Options of a chat template. Names are those of vLLM and transformers."""

    add_generation_prompt: bool = True
    """End with the beginning of the assistant's message."""
    continue_final_message: bool = False
    """End inside the last message, so that the reply continues it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
                fields="continue_final_message",
            )
        for name in self.chat_template_kwargs:
            if name in _RESERVED:
                raise RequestError(
                    f"chat_template_kwargs cannot set {shown(name)}, which is no variable of the template",
                    fields="chat_template_kwargs",
                )


PLAIN = Rendering()


def render(
    tokenizer: Any, messages: Sequence[Message], tools: Tools, rendering: Rendering, mark: str | None = None
) -> str:
    """The text of a conversation. With a `mark`, control tokens in it and in variables are broken by it."""
    variables = rendering.chat_template_kwargs
    if mark is not None:
        controls = find_controls(tokenizer)
        messages, tools = controls.marked(messages, mark), controls.marked(tools, mark)
        variables = controls.marked(variables, mark)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
            **variables,
        )
    except Exception as error:
        raise RequestError(f"the chat template refused the messages: {error}", fields="messages") from error
    return str(text) if mark is None else with_plain_marks(str(text), mark)
