"""An engine for the KV format and the decode settings of each mode, over the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from skim.config import DecodeConfig
from skim.measure.modes import Mode

if TYPE_CHECKING:
    from skim.config import EngineConfig
    from skim.llm import LLM


class Engines:
    """Opens an engine when the first mode needs it. The one that was given is not closed.

    Modes that need the same settings share an engine. Modes of `shared_by` do so too if they differ in their
    decode settings alone, so that they can share cached prompts.
    """

    def __init__(self, llm: LLM, shared_by: Sequence[Mode] = ()) -> None:
        self._llm = llm
        plain = llm.config.decode.slow_fast == "off"
        self._spelled_out = plain and any(mode.decode is not None for mode in shared_by)
        self._others: dict[EngineConfig, LLM] = {}

    def of(self, mode: Mode) -> LLM:
        """The engine for a mode."""
        config = self.asked(mode).engine(self._llm.config)
        if config == self._llm.config:
            return self._llm
        if config not in self._others:
            self._others[config] = self._llm.with_settings(config)
        return self._others[config]

    def asked(self, mode: Mode) -> Mode:
        """The mode as its engine is asked: in a shared engine, dense decode is a setting of the request."""
        if mode.decode is None and self._spelled_out:
            return dataclasses.replace(mode, decode=DecodeConfig())
        return mode

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
