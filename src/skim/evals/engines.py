"""An engine for the KV format and the decode settings of each mode, over the same weights."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from skim.measure.modes import Mode

if TYPE_CHECKING:
    from skim.config import EngineConfig
    from skim.llm import LLM


class Engines:
    """Opens an engine when the first mode needs it. The one that was given is not closed."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._others: dict[EngineConfig, LLM] = {}

    def of(self, mode: Mode) -> LLM:
        """The engine for a mode. Modes that need the same settings share one."""
        config = mode.engine(self._llm.config)
        if config == self._llm.config:
            return self._llm
        if config not in self._others:
            self._others[config] = self._llm.with_settings(config)
        return self._others[config]

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
