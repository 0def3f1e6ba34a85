"""An engine for each KV format that modes compare, over the same weights."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from skim.measure.modes import Mode

if TYPE_CHECKING:
    from skim.llm import LLM


class Engines:
    """Opens an engine when the first mode needs it. The one that was given is not closed."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._others: dict[str, LLM] = {}

    def of(self, mode: Mode) -> LLM:
        """The engine that has the mode's KV format."""
        memory, wanted = self._llm.config.memory, mode.kv_cache_dtype
        if wanted is None or wanted == memory.kv_cache_dtype:
            return self._llm
        if wanted not in self._others:
            config = replace(self._llm.config, memory=replace(memory, kv_cache_dtype=wanted))
            self._others[wanted] = self._llm.with_settings(config)
        return self._others[wanted]

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for llm in self._others.values():
            llm.close()
