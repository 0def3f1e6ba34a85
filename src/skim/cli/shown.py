"""A plan with the texts of its prompt: the passages that it keeps, by file and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from skim.cli.documents import Source
from skim.cli.places import FileMap, Lines
from skim.prefill.kept import block_cuts
from skim.prefill.plan import Plan, Reason, Span

if TYPE_CHECKING:
    from skim.llm import LLM, Prepared

TEMPLATE = "(chat template)"
MOST_LABEL = 24  # characters of a row's label


@dataclass(frozen=True)
class Shown:
    """A plan, the texts of its prompt blocks, which together are the whole prompt, and its question."""

    plan: Plan
    texts: tuple[str, ...]
    question: str = ""
    files: FileMap = field(default_factory=FileMap)

    def lines(self, span: Span) -> list[Lines]:
        """The lines of files that a span has."""
        return self.lines_of(self._blocks(span))

    def lines_of(self, blocks: range) -> list[Lines]:
        return self.files.lines(self._starts[blocks.start], self._starts[blocks.stop])

    def place(self, span: Span) -> str:
        """The files and lines of a span. Tokens, if no file was found in the prompt."""
        return self.place_of(self._blocks(span))

    def place_of(self, blocks: range) -> str:
        if not self.files.sources:
            size = self.plan.block_size
            return f"tokens {blocks.start * size}-{min(blocks.stop * size, self.plan.prompt_tokens) - 1}"
        return ", ".join(map(str, self.lines_of(blocks))) or TEMPLATE

    def label(self, block: int) -> str:
        """The first line of a block: its number, with the file if there are several."""
        if not self.files.sources:
            return str(block * self.plan.block_size)
        found = self.lines_of(range(block, block + 1))
        if not found:
            return ""
        first = found[0]
        name = f"{first.file}:{first.first}" if len(self.files.sources) > 1 else str(first.first)
        return name if len(name) <= MOST_LABEL else f"...{name[3 - MOST_LABEL :]}"

    def text(self, span: Span) -> str:
        return "".join(self.texts[block] for block in self._blocks(span))

    def best(self, span: Span) -> Span | None:
        """The best-scoring block of a span; None if the span is pinned or has one block."""
        blocks = self._blocks(span)
        if span.reason == Reason.PINNED or self.plan.scores is None or len(blocks) == 1:
            return None
        start = max(blocks, key=self.plan.scores.__getitem__) * self.plan.block_size
        return Span(start, min(start + self.plan.block_size, span.end), span.reason)

    def _blocks(self, span: Span) -> range:
        return range(span.start // self.plan.block_size, -(-span.end // self.plan.block_size))

    @cached_property
    def _starts(self) -> list[int]:
        """The first character of each block, and the end of the prompt."""
        return list(accumulate(map(len, self.texts), initial=0))


def shown_of(llm: LLM, prompt: Prepared, plan: Plan, sources: Sequence[Source]) -> Shown:
    """A plan with the texts of its prompt, which has these sources in order."""
    asked = [llm.tokenizer.decode(prompt.tokens[start:end]).strip() for start, end in plan.asked]
    texts = block_texts(prompt, plan.block_size)
    return Shown(plan, texts, "\n".join(asked), FileMap("".join(texts), sources))


def block_texts(prompt: Prepared, block_size: int) -> tuple[str, ...]:
    """The prompt's text, cut at prompt blocks."""
    text = prompt.text or ""
    cuts = [0, len(text)] if prompt.offsets is None else block_cuts(text, prompt.offsets, block_size)
    return tuple(text[a:b] for a, b in pairwise(cuts))
