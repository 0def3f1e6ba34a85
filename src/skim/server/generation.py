"""The requests of one HTTP call: submitted together, with their events on the event loop.

Everything runs on the event loop, except `Generation._submit` (a text thread) and `Generation._emit` (the
engine's thread).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from skim.config import DecodeConfig, PrefillConfig
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Event, Failed, RequestMetrics
from skim.engine.tracking import Progress, combined
from skim.errors import EngineError, SkimError
from skim.llm import LLM, Prepared
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams
from skim.server.errors import ApiError, from_skim, too_late
from skim.server.logs import RequestLog
from skim.server.options import PrefixCache
from skim.server.protocol.replies import SkimReport
from skim.server.report import Outcome, report, report_with_texts, size_of_texts

if TYPE_CHECKING:
    from skim.server.service import Service


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
            raise too_late(self._service.config.request_timeout) from None

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
            raise too_late(self._service.config.request_timeout)
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self._events.get()
        except TimeoutError:
            raise too_late(self._service.config.request_timeout) from None

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
