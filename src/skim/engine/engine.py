"""The engine: requests come in on any thread, steps run in the engine's own, news goes out through queues."""

from __future__ import annotations

import itertools
import logging
import operator
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from skim.attention.step import Backend
from skim.config import EngineConfig, PrefillConfig
from skim.engine.core import EngineCore
from skim.engine.sequence import Delta, Event, Failed, Finished, Request
from skim.engine.stats import EngineStats
from skim.errors import EngineError, RequestError
from skim.models.load import LoadedModel
from skim.prefill.anatomy import Anatomy, UnmappableError
from skim.prefill.planner import Planned, SparseTask, namespace_of, policy_of
from skim.prefill.scoring.factory import check_scorer
from skim.sampling.params import SamplingParams

log = logging.getLogger(__name__)


class RequestHandle:
    """A submitted request: iterate it for its news, `abort()` it at any time."""

    def __init__(self, engine: Engine, request_id: int) -> None:
        self.id = request_id
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._engine = engine

    def abort(self) -> None:
        self._engine.abort(self.id)

    def __iter__(self) -> Iterator[Delta | Finished]:
        """Deltas as they come, then `Finished`; a failed request raises its error. Again: the end alone."""
        while True:
            event = self.events.get()
            if isinstance(event, (Failed, Finished)):
                self.events.put(event)
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return


class Engine:
    """An engine core with a thread of its own; `step()` is the loop body, for use without the thread."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        backend: Backend | None = None,
        drafter: LoadedModel | None = None,
    ) -> None:
        self.model = model
        self.config = config
        if config.prefill.sparse_prefill != "off":
            check_scorer(config.prefill.scorer, model, drafter)
        elif config.prefill.scorer != PrefillConfig.scorer:
            log.info("sparse_prefill is off: the scorer %s is for requests that ask", config.prefill.scorer)
        self.core = EngineCore(model, config, backend, drafter)
        self.dead: BaseException | None = None
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Run steps in the engine's own thread until `close()`."""
        self._thread = threading.Thread(target=self._loop, name="skim-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort what is unfinished and stop the thread. Calling it again only waits for that."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._inbox.put(None)  # after the flag: the thread sees the one or the other
        if self._thread is None:
            self._drain()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def submit(
        self,
        prompt_token_ids: list[int] | tuple[int, ...],
        params: SamplingParams,
        *,
        salt: str = "",
        use_prefix_cache: bool = True,
        prefill: PrefillConfig | None = None,
        anatomy: Anatomy | UnmappableError | None = None,
        emit: Callable[[Event], None] | None = None,
    ) -> RequestHandle:
        """Queue a prompt. Its news goes to `emit`, called on the engine's thread, or else to the handle.

        `prefill` overrides how the prompt is read. `anatomy` says what in it must be kept and what asks, or
        why that cannot be told; without one, the end of the prompt is the question.

        A prompt that can never be served is refused here with a RequestError, and so is a grammar that cannot
        be compiled, which may take a second.
        """
        try:
            prompt = tuple(map(operator.index, prompt_token_ids))
        except TypeError as error:
            raise RequestError(f"a prompt must be a text or a list of token ids: {error}") from error
        self.core.check_request(prompt, params)
        sparse = None
        chosen = self.prefill_of(prefill)
        if self.core.planner.wanted(chosen, len(prompt)):
            sparse = SparseTask(prompt, anatomy, chosen, salt, params.max_tokens, use_prefix_cache)
        else:
            self.core.room_for_reply(len(prompt), len(prompt), params)
        matcher = self.core.grammars.compile(params.grammar) if params.grammar is not None else None
        handle = RequestHandle(self, next(self._ids))
        request = Request(
            id=handle.id,
            prompt_token_ids=prompt,
            params=params,
            namespace=namespace_of(salt, chosen),
            policy=policy_of(chosen),
            sparse=sparse,
            emit=emit or handle.events.put,
            use_prefix_cache=use_prefix_cache,
            matcher=matcher,
        )
        self._send(lambda: self.core.add(request))
        return handle

    def prefill_of(self, given: PrefillConfig | None) -> PrefillConfig:
        """How a prompt is to be read, if it can be said for one request."""
        own = self.config.prefill
        if given is None:
            return own
        if not isinstance(given, PrefillConfig):
            raise RequestError(f"prefill must be a PrefillConfig of skim.config, got {given!r}")
        if given.drafter not in (None, own.drafter):
            raise RequestError(
                f"drafter {given.drafter!r} is not loaded: a drafter is one for all requests, set it at start"
            )
        return given

    def plan(
        self,
        prompt_token_ids: tuple[int, ...],
        *,
        prefill: PrefillConfig | None = None,
        anatomy: Anatomy | UnmappableError | None = None,
        max_tokens: int | None = None,
    ) -> Planned:
        """What would be read of a prompt, for a reply of `max_tokens`; nothing is generated."""
        told: Future[Planned] = Future()
        task = SparseTask(prompt_token_ids, anatomy, self.prefill_of(prefill), "", max_tokens)
        self._send(
            lambda: self.core.plans.add(task, lambda planned, _: told.set_result(planned), told.set_exception)
        )
        return told.result()

    def abort(self, request_id: int) -> None:
        """End a request; its blocks are free at the next step. Unknown and finished ids are ignored."""
        self._inbox.put(lambda: self.core.abort(request_id))

    def reset_prefix_cache(self) -> int:
        """Forget every prefix that no running request reads; the number of blocks that became free."""
        freed: Future[int] = Future()

        def evict() -> None:
            try:
                freed.set_result(self.core.memory.tree.evict(self.core.memory.pool.capacity))
            except BaseException as error:
                freed.set_exception(EngineError(f"the engine died: {error}"))
                raise

        self._send(evict)
        return freed.result()

    def _send(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step."""
        with self._lock:
            if self._closed or self.dead is not None:
                raise EngineError(f"the engine is not running: {self.dead or 'it was closed'}")
            self._inbox.put(command)

    def stats(self) -> EngineStats:
        return self.core.stats()

    def step(self) -> bool:
        """Take in what has arrived and run one forward; False if there was nothing to run."""
        self._take_inbox(block=False)
        return self.core.step()

    def _loop(self) -> None:
        try:
            while not self._closed:
                if not self.step() and not self._closed:  # else the call that would wake it is gone by now
                    self._take_inbox(block=True)
        except BaseException as error:
            log.critical("the engine died", exc_info=True)
            with self._lock:
                self.dead = error
        finally:
            self._drain()

    def _take_inbox(self, block: bool) -> None:
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return
            if command is not None:
                command()
            block = False

    def _drain(self) -> None:
        """Leave nobody waiting: what has not ended is aborted, or told why the engine died."""
        while not self._inbox.empty():
            try:
                self._take_inbox(block=False)
            except Exception:
                log.exception("a command was lost with the engine")
        reason = EngineError(
            "the engine was closed" if self.dead is None else f"the engine died: {self.dead}"
        )
        for request in list(self.core.requests.values()):
            try:
                if self.dead is None:
                    self.core.abort(request.id)
                else:
                    self.core.fail(request, reason)
            except Exception:
                # What killed the engine may have left memory in a state that cannot be given back.
                log.exception("request %d could not be cleaned up", request.id)
                self.core.tell(request, Failed(reason))
        self.core.plans.end(reason)
