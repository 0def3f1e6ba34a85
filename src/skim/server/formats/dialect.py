"""How the served model writes calls and reasoning: formats chosen by the chat template or by settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from skim.config import ServerConfig
from skim.models.load import LoadedModel
from skim.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserDeclaration,
    reasoning_parsers,
    tool_parsers,
)
from skim.sampling.grammar import Grammar
from skim.sampling.params import SamplingParams
from skim.server.formats.history import wants_text
from skim.server.formats.reasoning_format import ReasoningFormat, either
from skim.server.formats.reply import ReplyParser
from skim.server.formats.tags import TokenTags
from skim.server.formats.tool_format import Tool, ToolFormat
from skim.server.tools import prepare_messages

Message = dict[str, Any]
Template = str | Mapping[str, str] | None

DEFAULT = "hermes"


@dataclass(frozen=True)
class Dialect:
    """A model's formats, and the tokens that belong to them."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    template: Template
    tags: TokenTags
    arguments_as_text: bool = False
    """The chat template wants arguments of earlier calls as JSON text."""
    ends: frozenset[int] = frozenset()
    """Tokens that end every reply."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        tool_parser: str,
        reasoning_parser: str,
        *,
        ends: Collection[int] = (),
        vocab_size: int | None = None,
    ) -> Dialect:
        """The dialect of a tokenizer's chat template. `ends` are the model's end-of-sequence tokens."""
        template: Template = tokenizer.chat_template
        text = template_text(template)

        def render(messages: list[Message]) -> str:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))

        return cls(
            tool_format(tool_parser, text),
            reasoning_format(reasoning_parser, text),
            template,
            TokenTags(tokenizer, vocab_size),
            arguments_as_text="tool_calls" in text and wants_text(render),
            ends=frozenset(ends),
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages, tools) for the chat template."""
        prepared, shown = prepare_messages(
            messages, tools, self.template, self.tools, as_text=self.arguments_as_text
        )
        if self.reasoning is not None:
            prepared = [self.reasoning.history(message) for message in prepared]
        return prepared, shown

    def params(self, params: SamplingParams, *, calls: bool) -> SamplingParams:
        """The parameters of a request, with the tokens that its parsers need. `calls`: it has tools."""
        used = self._used(calls)
        shown = self.tags.special_ids(tag for one in used for tag in one.special)
        stops = self.stops(calls=calls)
        if not shown and not stops:
            return params
        known = sorted(stops.difference(params.stop_token_ids))
        return replace(
            params,
            shown_special_tokens=tuple(dict.fromkeys(shown)),
            stop_token_ids=(*params.stop_token_ids, *known),
        )

    def stops(self, *, calls: bool) -> frozenset[int]:
        """Tokens that end a reply in these formats, and that the model's settings do not have."""
        stops = self.tags.ids(tag for one in self._used(calls) for tag in one.stops)
        return frozenset(stops) - self.ends

    def _used(self, calls: bool) -> list[ToolFormat | ReasoningFormat]:
        used: list[ToolFormat | ReasoningFormat] = [self.tools] if calls else []
        return [*used, self.reasoning] if self.reasoning is not None else used

    def parser(self, tools: Sequence[Tool] | None, prompt: str) -> ReplyParser:
        """A parser for one reply. Without tools, calls are content."""
        reasoning = self.reasoning.parser(prompt) if self.reasoning is not None else None
        return ReplyParser(reasoning, self.tools.parser(tools) if tools is not None else None)

    def constrained(self, calls: Grammar | None, answer: Grammar | None, prompt: str) -> Grammar | None:
        """The grammar of a reply that is calls or an answer, after the reasoning that must come first."""
        if calls is None and answer is None:
            return None
        if self.reasoning is None:
            return either(calls, answer)
        return self.reasoning.constrained(calls, answer, prompt, self.tags)


def dialect_of(model: LoadedModel, config: ServerConfig) -> Dialect:
    """The dialect of a model, by its chat template and the server's settings."""
    return Dialect.of(
        model.tokenizer,
        config.tool_parser,
        config.reasoning_parser,
        ends=model.eos_token_ids,
        vocab_size=model.vocab_size,
    )


def template_text(template: Template) -> str:
    """The source of a chat template, or of all named ones."""
    if isinstance(template, Mapping):
        return "\n".join(template.values())
    return template or ""


def tool_format(name: str = "auto", template: str = "") -> ToolFormat:
    """The format of a name; `auto` chooses by the chat template."""
    chosen = _first(tool_parsers(), template) or DEFAULT if name == "auto" else name
    made: ToolFormat = import_module(f"{TOOL_PARSERS}.{chosen}").Format(template)
    return made


def reasoning_format(name: str = "auto", template: str = "") -> ReasoningFormat | None:
    """The format of a name; `auto` chooses by the chat template, `none` means none."""
    chosen = _first(reasoning_parsers(), template) if name == "auto" else None if name == "none" else name
    if chosen is None:
        return None
    made: ReasoningFormat = import_module(f"{REASONING_PARSERS}.{chosen}").Format(template)
    return made


def _first(parsers: Mapping[str, ParserDeclaration], template: str) -> str | None:
    return next((name for name, parser in parsers.items() if parser.fits(template)), None)
