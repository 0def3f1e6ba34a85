"""The engine as the routes see it: readiness, admission, and the events of each request.

Everything runs on the event loop, except `Generation._submit` (a text thread) and `Generation._emit` (the
engine's thread).
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from skim.config import DecodeConfig, PrefillConfig, ServerConfig, parse_bytes
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Event, Failed, RequestMetrics
from skim.engine.stats import EngineStats
from skim.engine.tracking import Progress, combined
from skim.errors import EngineError, PromptTooLongError, SkimError, shown
from skim.llm import LLM, Prepared
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams
from skim.server.body import SMALL_BODY
from skim.server.capacity import Capacity, default_queued_tokens
from skim.server.errors import ApiError, from_skim
from skim.server.formats.dialect import dialect_of
from skim.server.logs import RequestLog
from skim.server.metrics import Metrics
from skim.server.options import PrefixCache
from skim.server.protocol.replies import SkimReport
from skim.server.report import Outcome, report, report_with_texts, size_of_texts
from skim.server.responses.store import ResponseStore
from skim.server.text_queue import TextQueue
from skim.server.tokens import TokenTexts

T = TypeVar("T")

Status = Literal["ok", "loading", "draining", "stalled", "dead"]


class State(enum.Enum):
    """The states of a server, in order."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


def requests_of(
    prompts: Sequence[Prepared],
    params: SamplingParams,
    cache: PrefixCache,
    prefill: PrefillConfig,
    decode: DecodeConfig | None,
) -> list[Request]:
    """One request per prompt of an HTTP call, all with the same parameters and options."""
    return [
        Request(one.tokens, params, prefill, one.anatomy, cache.salt, cache.used, decode) for one in prompts
    ]


class Running(Protocol):
    """A call in progress: its reserved sequences, and a way to end it with an error."""

    @property
    def sequences(self) -> int: ...
    def interrupt(self, error: ApiError) -> None: ...


def too_late(config: ServerConfig) -> ApiError:
    return ApiError(
        408,
        f"the request took longer than {config.request_timeout:g} seconds (--request-timeout)",
        code="timeout",
        reason="timeout",
    )


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
        """The server's status. If the engine is dead or stalled, also the reason and the remedy."""
        if self._llm is not None:
            engine, limit = self._llm.engine, self.config.step_timeout
            if engine.dead is not None:
                return "dead", f"the engine died: {engine.dead}; restart the server"
            if (seconds := engine.step_seconds) > limit:
                return "stalled", (
                    f"the engine's present step began {seconds:.0f} s ago, and step_timeout is {limit:g} s; "
                    "restart the server if the step does not end"
                )
        return "ok" if self.state is State.READY else self.state.value, None  # type: ignore[return-value]

    @property
    def llm(self) -> LLM:
        """The model. Raises `ApiError` unless requests may use it now."""
        status, problem = self.condition
        if self._llm is None or status == "loading":
            raise ApiError(503, "the model is still loading; try again", reason="loading", retry_after=5)
        if problem is not None:
            raise ApiError(503, problem, reason=status)
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


class Generation:
    """The submitted requests of one HTTP call. Iterate for deltas. Leaving `async with` aborts the rest."""

    def __init__(self, service: Service, sequences: int, log: RequestLog) -> None:
        self.sequences = sequences
        self._finished: dict[int, Outcome] = {}  # by prompt, in order of completion
        self.log = log
        self._service = service
        self._capacity = service.capacity
        self._tokens = 0  # of all prompts
        self._waiting: dict[int, int] = {}  # prompt tokens to release, by prompt; each is popped once
        self._loop = asyncio.get_running_loop()
        used = time.perf_counter() - log.started_at
        self.deadline = self._loop.time() + service.config.request_timeout - used
        self._params = SamplingParams()
        self._prompts: list[Sequence[int]] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._handles: list[RequestHandle] = []
        self._ended = False
        self._last_token: dict[int, float] = {}

    async def start(self, llm: LLM, make: Callable[[], Sequence[Request]]) -> None:
        self._decode = llm.tokenizer.decode
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._service.off_loop(lambda: self._submit(llm, make), self.log.size)
        except TimeoutError:
            raise too_late(self._service.config) from None

    def _submit(self, llm: LLM, make: Callable[[], Sequence[Request]]) -> None:
        """Submit the requests, in a text thread. If one is refused, none runs."""
        if self._ended:
            return
        requests = make()
        self._params, self._prompts = requests[0].params, [one.prompt_token_ids for one in requests]
        lengths = {index: len(prompt) for index, prompt in enumerate(self._prompts)}
        self._tokens = sum(lengths.values())
        self._capacity.take_tokens(self._tokens)
        self._waiting = lengths
        try:
            for index, request in enumerate(requests):
                if self._ended:
                    break
                self._handles.append(llm.engine.submit(request, emit=partial(self._emit, index)))
        except SkimError:
            self._abort()
            raise
        finally:
            if self._ended:  # `end` may have run before all of this was there
                self._abort()
                self._release_tokens(*lengths)

    def _emit(self, prompt: int, event: Event) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (prompt, event))

    def interrupt(self, error: ApiError) -> None:
        """Abort the requests and end the reply with `error`."""
        self._abort()
        self._events.put_nowait((0, Failed(Interrupted(error))))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas as they arrive. Indices count the sequences of all prompts: prompt * n + sequence."""
        observe = self._service.metrics
        reasons: dict[int, list[str]] = {}
        while len(self._finished) < len(self._prompts):
            prompt, event = await self._next()
            if isinstance(event, Failed):
                error = event.error
                raise error.error if isinstance(error, Interrupted) else from_skim(error)
            if isinstance(event, Delta):
                index = prompt * self._params.n + event.index
                if event.finish_reason == "abort":
                    raise from_skim(EngineError("the request was aborted"))
                self._release_tokens(prompt)
                if event.token_ids:
                    now = time.perf_counter()
                    observe.token(
                        now - self._last_token.get(index, self.log.started_at), index in self._last_token
                    )
                    self._last_token[index] = now
                if event.finish_reason is not None:
                    reasons.setdefault(prompt, []).append(event.finish_reason)
                yield replace(event, index=index)
            else:
                self._finished[prompt] = Outcome(self._prompts[prompt], event.metrics, event.plan)
                observe.finished(event.metrics, self._params, reasons[prompt])
        self.log.fields.update(report(self.metrics).model_dump(exclude={"question", "spans"}))
        self.log.fields["finish_reason"] = [reason for each in reasons.values() for reason in each]

    @property
    def progress(self) -> Progress:
        """Progress of all prompts together."""
        return combined([handle.progress for handle in self._handles])

    def prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a sequence."""
        return list(self._prompts[index // self._params.n])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self._tokens

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Metrics of the finished prompts, in prompt order."""
        return [self._finished[prompt].metrics for prompt in sorted(self._finished)]

    async def report(self, *, spans: bool) -> SkimReport:
        """The report of the finished prompts. Long texts are decoded off the event loop."""
        each = [self._finished[prompt] for prompt in sorted(self._finished)]
        work = partial(report_with_texts, each, self._decode, spans=spans)
        return await self._service.off_loop(work, size_of_texts(each), admitted=True) if spans else work()

    async def _next(self) -> tuple[int, Event]:
        if self._loop.time() > self.deadline:
            raise too_late(self._service.config)
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self._events.get()
        except TimeoutError:
            raise too_late(self._service.config) from None

    def end(self) -> None:
        """Abort the requests that still run. Idempotent."""
        if not self._ended:
            self._ended = True
            self._abort()
            self._release_tokens(*list(self._waiting))
            self._service.release(self)

    def _release_tokens(self, *prompts: int) -> None:
        """Stop counting these prompts as waiting. On any thread; idempotent."""
        for prompt in prompts:
            if tokens := self._waiting.pop(prompt, 0):
                self._capacity.release_tokens(tokens, of=self._tokens)

    def _abort(self) -> None:
        for handle in self._handles:
            handle.abort()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Interrupted(SkimError):
    """Carries the client's error through the queue of events."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error
