"""The engine: requests arrive on any thread, steps run on the engine's thread, events go to callbacks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from skim.attention.backend import Backend
from skim.config import EngineConfig
from skim.engine.admin_parks import AdminParks
from skim.engine.admission import check_drafter
from skim.engine.core import EngineCore
from skim.engine.handle import RequestHandle
from skim.engine.inbox import Command, Inbox
from skim.engine.keeper import Keeper
from skim.engine.parking import Parking, States
from skim.engine.sequence import Event, Failed
from skim.engine.stats import EngineStats
from skim.engine.turns import ROLES, TARGET
from skim.errors import EngineError, RequestError, SkimError
from skim.memory.checkpoint import Named
from skim.memory.prefix import Namespace
from skim.models.load import LoadedModel
from skim.models.residency_state import Place
from skim.prefill.plan_queue import Fail, Finish, PlanQueue
from skim.prefill.rank import Ranking
from skim.prefill.reading import Planned
from skim.prefill.request import Request
from skim.registry import scorers

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """An engine core and its thread. Without `start()`, the caller runs the loop body, `step()`."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        backend: Backend | None = None,
        drafter: LoadedModel | None = None,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.config = config
        self.core = EngineCore(model, config, backend, drafter)
        self._inbox = Inbox()
        self._parking = Parking(self.core.residency, self.core.finish, config.residency.idle_park)
        self.parks = AdminParks(self._inbox, self.core.residency, self._parking)
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None

    def start(self) -> None:
        """Run steps on the engine's thread until `close()`."""
        self._thread = threading.Thread(target=self._loop, name="skim-engine", daemon=True)
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """Abort unfinished requests and stop the thread; False if it still runs after `timeout` seconds.

        A second call only waits for that. A thread cannot be ended by force: if a step hangs, the process
        must be.
        """
        self._inbox.close()
        if self._thread is None:
            self._drain()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    @property
    def dead(self) -> BaseException | None:
        """The error that ended the engine's thread."""
        return self._inbox.dead

    @property
    def step_seconds(self) -> float:
        """Seconds since the present step began, its planning and its commands included; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stack(self) -> str:
        """The Python stack of the engine's thread, to show where a step hangs."""
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def submit(self, request: Request, emit: Callable[[Event], None] | None = None) -> RequestHandle:
        """Queue a request. Its events go to `emit`, called on the engine's thread, or else to the handle.

        Raises RequestError if it can never be served or its grammar does not compile, and ParkedError while
        an administrator has parked the target. Compiling may take a second.
        """
        handle = RequestHandle(next(self._ids), self.abort)
        state = self.core.intake.open(handle.id, request, emit or handle.events.put)
        handle.tracker = state.tracker
        self._send(lambda: self.core.lifecycle.add(state), needs_target=True)
        return handle

    def plan(self, request: Request) -> Future[Planned]:
        """Plan a prompt; nothing is generated. Cancelling the result ends the work."""
        check_drafter(request, self.config.prefill.drafter)
        return self._in_slices(lambda key, finish, fail: self._plans.add(key, request, finish, fail))

    def rank(self, ranking: Ranking) -> Future[list[float]]:
        """The relevances of documents. Cancelling the result ends the work."""
        work, tokens = self.core.planner.rank(ranking), len(ranking.task.tokens)
        declared = scorers().get(ranking.scorer)
        wants = "none" if declared is None else declared.model
        return self._in_slices(
            lambda key, finish, fail: self._plans.add_work(
                key, work, finish, fail, tokens=tokens, scorer=ranking.scorer, wants=wants
            )
        )

    def embed(self, texts: Sequence[tuple[int, ...]]) -> Future[list[np.ndarray]]:
        """A unit vector for each text, given as token ids. Cancelling the result ends the work."""
        work = self.core.planner.embed(self.model.module, self.model.layers, texts)
        tokens = sum(map(len, texts))
        return self._in_slices(
            lambda key, finish, fail: self._plans.add_work(
                key, work, finish, fail, tokens=tokens, wants=TARGET
            )
        )

    @property
    def _plans(self) -> PlanQueue:
        return self.core.lifecycle.plans

    def _in_slices(self, add: Callable[[int, Finish, Fail], None]) -> Future[Any]:
        """Have work added to the queue of plans, under a new key. It runs in slices between steps."""
        result: Future[Any] = Future()
        key = next(self._ids)

        def finish(value: Any, _: float) -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(value)

        def fail(error: SkimError) -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)

        self._send(lambda: add(key, finish, fail), needs_target=True)
        result.add_done_callback(
            lambda done: self._inbox.put(lambda: self._plans.drop(key)) if done.cancelled() else None
        )
        return result

    def abort(self, request_id: int) -> None:
        """End a request; its blocks are free at the next step. Unknown and finished ids are ignored."""
        self._inbox.put(lambda: self.core.abort(request_id))

    def reset_prefix_cache(self) -> int:
        """Evict every prefix that no running request uses; returns the number of freed blocks."""

        def evict(freed: Future[int]) -> None:
            self.core.planner.forget()
            freed.set_result(self.core.memory.tree.evict(self.core.memory.pool.capacity))

        return self._ask(evict)

    def save_checkpoint(self, name: str, keys: Sequence[int], namespace: Namespace) -> Named:
        """Write the cached prefix of these prefix-tree keys to the checkpoint directory, under a name."""
        keeper = self.keeper
        return self._ask(lambda result: keeper.save(name, keys, namespace, result))

    def load_checkpoint(self, name: str, salt: str = "") -> int:
        """Restore a named prefix; returns the number of its tokens that are cached then."""
        keeper = self.keeper
        return self._ask(lambda result: keeper.load(name, salt, result))

    # -- residency

    def park(
        self,
        models: Collection[str] = ROLES,
        *,
        to: str = Place.PARKED,
        wait: bool = True,
        timeout: float | None = None,
    ) -> States:
        """Move models off the device until `unpark`: to host memory (`parked`), or to disk (`released`).

        Meanwhile requests are refused with ParkedError if the target is among them; without its drafter,
        prompts are read densely. Running requests end first: for at most `timeout` seconds. Without `wait`,
        and after that time, BusyError is raised and nothing has changed. The KV pool is not touched.
        """
        return self.parks.park(models, to=to, wait=wait, timeout=timeout).result()

    def unpark(self, models: Collection[str] = ROLES) -> States:
        """Bring models back that were parked, as far as the policy keeps them on the device at rest."""
        return self.parks.unpark(models).result()

    @property
    def keeper(self) -> Keeper:
        """Checkpoints of this engine. Raises RequestError if it has no directory."""
        if self.core.keeper is None:
            raise RequestError(
                "there is no checkpoint directory; start with checkpoint_dir (--checkpoint-dir)"
            )
        return self.core.keeper

    def _ask(self, work: Callable[[Future[T]], None]) -> T:
        """Run `work` on the engine's thread and wait until it has set the result, then or later."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                work(result)
            except BaseException as error:
                result.set_exception(EngineError(f"the engine died: {error}"))
                raise

        self._send(run)
        return result.result()

    def _send(self, command: Command, *, needs_target: bool = False) -> None:
        """Run a command on the engine's thread before its next step."""
        with self._inbox.lock:
            self._inbox.check_running()
            if needs_target:
                self.parks.check_target()
            self._inbox.put(command)

    def stats(self) -> EngineStats:
        weights = tuple(one.weights for one in (self.model, self.drafter) if one is not None)
        return replace(self.core.stats(), step_seconds=self.step_seconds, weights=weights)

    def step(self) -> bool:
        """Run the queued commands and one step of the core; False if there was nothing to run."""
        with self._busy():
            self._inbox.run()
            self._parking.advance()
            ran = self.core.step()
            self._parking.note(ran=ran)
        return ran

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def _loop(self) -> None:
        try:
            while not self._inbox.closed:
                if not self.step() and not self._inbox.closed:  # if closed, nothing would wake it again
                    command = self._next_command()
                    with self._busy():
                        command()
        except BaseException as error:
            log.critical("the engine died", exc_info=True)
            with self._inbox.lock:
                self._inbox.dead = error
        finally:
            self._drain()

    def _next_command(self) -> Command:
        """Wait for a command. Meanwhile cached prefixes are written to the checkpoint directory, and weights
        are parked."""
        keeper, parking = self.core.keeper, self._parking
        waits = [parking.idle_seconds, keeper.idle_seconds if keeper is not None else None]
        timeout = min((one for one in waits if one is not None), default=None)
        return self._inbox.wait(timeout) or self._when_idle

    def _when_idle(self) -> None:
        self._parking.when_idle()
        if self.core.keeper is not None and self.core.keeper.idle_seconds is not None:
            self.core.keeper.write_back()

    def _drain(self) -> None:
        """End every open request and plan: abort them, or fail them if the engine died."""
        while not self._inbox.empty():
            try:
                self._inbox.run()
            except Exception:
                log.exception("a command was lost with the engine")
        reason = EngineError(
            "the engine was closed" if self.dead is None else f"the engine died: {self.dead}"
        )
        lifecycle = self.core.lifecycle
        for state in list(lifecycle.requests.values()):
            try:
                if self.dead is None:
                    self.core.abort(state.id)
                else:
                    lifecycle.fail(state, reason)
            except Exception:
                # The error that killed the engine may have left memory inconsistent.
                log.exception("request %d could not be cleaned up", state.id)
                lifecycle.emit(state, Failed(reason))
        lifecycle.plans.fail_all(reason)
        self._parking.fail_all(reason)
        if self.core.keeper is not None:
            self.core.keeper.close(reason, write_back=self.dead is None)
