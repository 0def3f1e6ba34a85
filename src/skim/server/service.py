"""The engine as the routes see it: its readiness, and the admission of requests.

Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from skim.config import PrefillConfig, ServerConfig, parse_bytes
from skim.engine.engine import Engine
from skim.engine.stats import EngineStats
from skim.engine.turns import DRAFTER, TARGET
from skim.errors import PromptTooLongError, shown
from skim.llm import LLM
from skim.models.residency_state import Standing
from skim.prefill.request import Request
from skim.server.body import SMALL_BODY
from skim.server.capacity import Capacity, default_queued_tokens
from skim.server.errors import ApiError
from skim.server.formats.dialect import dialect_of
from skim.server.generation import Generation
from skim.server.logs import RequestLog
from skim.server.metrics.registry import Metrics
from skim.server.responses.store import ResponseStore
from skim.server.text_queue import TextQueue
from skim.server.tokens import TokenTexts

T = TypeVar("T")

Status = Literal["ok", "parking", "parked", "loading", "draining", "stalled", "dead"]


PARKED = "an administrator parked the model; POST /admin/unpark or `skim unpark` brings it back"
RETURNING = "an administrator parked the model; it is being brought back"
PARKING = (
    "an administrator's park waits for running requests, and new ones are refused; POST /admin/unpark or "
    "`skim unpark` ends it"
)
IDLE = "the models were parked after some time without work; the next request brings them back"
DRAFTER_HELD = (
    "an administrator parked the drafter: prompts are read in full; POST /admin/unpark or `skim unpark` "
    "brings it back"
)


class State(enum.Enum):
    """The states of a server, in order."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Running(Protocol):
    """A call in progress: its reserved sequences, and a way to end it with an error."""

    @property
    def sequences(self) -> int: ...
    def interrupt(self, error: ApiError) -> None: ...


class Service:
    """The model that is served, and the requests in flight."""

    def __init__(self, config: ServerConfig, model_name: str) -> None:
        self.config = config
        self.model_name = model_name
        self.started_at = int(time.time())
        self.state = State.LOADING
        self.metrics = Metrics(model_name)
        self._llm: LLM | None = None
        self._running: set[Running] = set()
        self._cut_off = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.responses = ResponseStore(
            config.max_stored_responses, parse_bytes("max_stored_bytes", config.max_stored_bytes)
        )
        self._text_queue = TextQueue(parse_bytes("max_queued_text", config.max_queued_text))

    def ready(self, llm: LLM) -> None:
        self._llm = llm
        self.texts = TokenTexts(llm.tokenizer)
        self.dialect = dialect_of(llm.engine.model, self.config)
        self._window, limit = llm.engine.core.max_model_len, self.config.max_queued_tokens
        self.capacity = Capacity(
            sequences=llm.config.scheduler.max_num_seqs + self.config.max_queued_requests,
            tokens=limit if limit is not None else default_queued_tokens(self._window),
        )
        self.metrics.watch(llm.engine.stats, self.capacity, llm.config.memory)
        if self.state is State.LOADING:
            self.state = State.READY

    def stats(self) -> EngineStats | None:
        """The engine's counters. None while the model is loading."""
        return self._llm.engine.stats() if self._llm is not None else None

    @property
    def condition(self) -> tuple[Status, str | None]:
        """The server's status. If the engine is dead, stalled or parked, also the reason and the remedy. If
        models are parked and it serves, the reason says what brings them back."""
        if self._llm is not None:
            engine, limit = self._llm.engine, self.config.step_timeout
            if engine.dead is not None:
                return "dead", f"the engine died: {engine.dead}; restart the server"
            if (seconds := engine.step_seconds) > limit:
                return "stalled", (
                    f"the engine's present step began {seconds:.0f} s ago, and step_timeout is {limit:g} s; "
                    "restart the server if the step does not end"
                )
            if self.state is State.READY:
                return _parked(engine)
        return "ok" if self.state is State.READY else self.state.value, None  # type: ignore[return-value]

    @property
    def llm(self) -> LLM:
        """The model. Raises `ApiError` unless requests may use it now."""
        status, problem = self.condition
        if self._llm is None or status == "loading":
            raise ApiError(503, "the model is still loading; try again", reason="loading", retry_after=5)
        if status in ("dead", "stalled"):
            raise ApiError(503, problem or status, reason=status)
        if status == "draining":
            raise ApiError(503, "the server is shutting down", reason="draining", retry_after=5)
        return self._llm

    async def off_loop(self, work: Callable[[], T], size: int, *, admitted: bool = False) -> T:
        """Run `work` on a text of `size` bytes in a text thread: tokenizers may take long.

        Work for a request that was `admitted` is never refused.
        """
        return await self._text_queue.run(work, size, admitted=admitted)

    async def on_text(self, work: Callable[[], T], size: int, *, admitted: bool = False) -> T:
        """Run `work` at once on a small text, and in a text thread on a large one."""
        return work() if size <= SMALL_BODY else await self.off_loop(work, size, admitted=admitted)

    def check_length(self, text: str, prefill: PrefillConfig) -> None:
        """Refuse a text that cannot fit the context window, before the slow work of encoding it.

        Every text that is to be generated from goes through this check as it will be encoded: rendered, with
        tools and calls. A text that is skimmed need not fit. It has at most as many tokens as bytes. The
        check is part of admitted work, so it must not depend on the server's state.
        """
        window = self._window
        if len(text) > window * self.texts.longest and not prefill.skims(
            len(text.encode("utf-8", "replace"))
        ):
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, far more than the context window of {window} "
                "tokens can hold; shorten it, or enable sparse_prefill"
            )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {shown(name)} is not served here; this server serves {self.model_name!r}",
                param="model",
                code="model_not_found",
                reason="unknown_model",
            )

    async def admit(
        self, sequences: int, log: RequestLog, make: Callable[[], Sequence[Request]]
    ) -> Generation:
        """Reserve capacity for `sequences`, make the requests off the event loop, and submit them.

        Use the result in `async with`: leaving it aborts unfinished requests. Reserved sequences count
        against the queue limit, and a drain waits for them. Prompt tokens count once they are known, until
        the first generated token.
        """
        llm = self.llm
        generation = Generation(self, sequences, log)
        self.enter(generation)
        try:
            await generation.start(llm, make)
        except BaseException:
            generation.end()
            raise
        return generation

    def enter(self, call: Running) -> None:
        """Reserve the capacity of a call, or raise `ApiError`."""
        self.capacity.take_sequences(call.sequences)
        self._running.add(call)
        self._idle.clear()

    def release(self, call: Running) -> None:
        """Release the capacity of a call that finished, failed or was aborted."""
        if call in self._running:
            self._running.remove(call)
            self.capacity.release_sequences(call.sequences)
            if not self._running:
                self._idle.set()

    async def drain(self) -> bool:
        """Refuse new requests and wait for running ones. True if all finished within the drain timeout."""
        self.state = State.DRAINING
        try:
            if not self._idle.is_set():
                await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout)
            return not self._cut_off
        except TimeoutError:
            self.cut_off()
            return False

    def cut_off(self) -> None:
        """End the requests that still run, with an error."""
        self._cut_off = self._cut_off or bool(self._running)
        for call in list(self._running):
            call.interrupt(
                ApiError(503, "the server shut down before the reply was complete", reason="draining")
            )

    def close(self, timeout: float) -> str | None:
        """Stop the engine. If its step still runs after `timeout` seconds, return the stack of its thread."""
        self._text_queue.close()
        if self._llm is None or self._llm.engine.close(timeout):
            return None
        return self._llm.engine.stack()


def _parked(engine: Engine) -> tuple[Status, str | None]:
    """The status of an engine that serves, or whose target an administrator parked."""
    standing = engine.parks.standing
    target, drafter = standing[TARGET], standing.get(DRAFTER)
    if target is Standing.HELD:
        return "parked", RETURNING if engine.parks.unparking else PARKED
    if target is Standing.PARK_WAITS:
        return "parking", PARKING
    if target is Standing.IDLE:
        return "ok", IDLE
    return "ok", DRAFTER_HELD if drafter is Standing.HELD else None
