"""Parks between steps: an administrator's, which wait until nothing needs the models, and those when idle.

An administrator's park holds until an administrator unparks; after an idle park, the next request brings the
models back. All methods run on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

from skim.engine.residency import EngineResidency
from skim.engine.turns import BOTH, TARGET
from skim.errors import BusyError, EngineError, SkimError, first_line
from skim.models.residency_state import Place, ResidencyState

MOST_RETRY_SECONDS = 3600.0  # between two idle parks that fail: each failure doubles the time
POLL_SECONDS = 0.01  # between two looks, while another engine uses a shared model

log = logging.getLogger(__name__)

States = tuple[ResidencyState, ...]


@dataclass(eq=False)
class Park:
    """An administrator's park. It is among the `holds` of its models before it waits, so that no request
    arrives meanwhile."""

    roles: Collection[str]
    to: Place
    wait: bool = True
    deadline: float | None = None  # by `time.monotonic`
    result: Future[States] = field(default_factory=Future)


class Parking:
    """The parks that wait. `finish` ends the step in flight, if there is one. Models that were idle for
    `idle_park` seconds are parked; 0 turns that off."""

    def __init__(
        self, residency: EngineResidency, finish: Callable[[], object], idle_park: float = 0.0
    ) -> None:
        self._residency = residency
        self._finish = finish
        self._idle_park = idle_park
        self._idle_since: float | None = None
        self._idle_failures = 0  # since the last success
        self._waiting: list[Park] = []

    # -- idle

    def note(self, *, ran: bool) -> None:
        """Called after each step: it ran something, or there was nothing to run."""
        if ran:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    @property
    def idle_seconds(self) -> float | None:
        """Seconds of idleness after which to call `when_idle`; None if there is nothing to do then."""
        if self._waiting:
            return POLL_SECONDS
        resident = any(one.is_resident for one in self._residency.models.values())
        if not self._idle_park or self._idle_since is None or not resident:
            return None
        longest = max(self._idle_park, MOST_RETRY_SECONDS)
        pause = min(longest, self._idle_park * 2.0 ** min(self._idle_failures, 40))
        return max(0.0, self._idle_since + pause - time.monotonic())

    def when_idle(self) -> None:
        """Run the parks that can run, and park what was idle for long."""
        self.advance()
        if self.idle_seconds == 0:
            self._finish()
            try:
                self._residency.park_idle()
                self._idle_failures = 0
            except EngineError as error:
                self._idle_failures += 1
                level = logging.WARNING if self._idle_failures == 1 else logging.DEBUG
                log.log(level, "idle, but %s; it is tried again, at longer intervals", error)
            self._idle_since = time.monotonic()

    # -- an administrator's

    def add(self, park: Park) -> None:
        """Park now, or when the models are not in use. Without `wait`, refuse if they are."""
        self._waiting.append(park)
        self.advance()

    def advance(self) -> None:
        """Run the parks that can run now; refuse those that do not wait or have waited too long."""
        for park in list(self._waiting):
            if park.result.cancelled():
                self._forget(park)
            elif not self._residency.in_use(park.roles):
                self._run(park)
            elif not park.wait:
                self._refuse(park, busy())
            elif park.deadline is not None and time.monotonic() >= park.deadline:
                self._refuse(park, BusyError("requests still run, and the time to wait for them is over"))

    def unpark(self, ended: Mapping[str, Set[Park]], result: Future[States]) -> None:
        """Bring models back as far as the policy has them on the device at rest. Ends these parks of each;
        a later one is still to come."""
        for park in list(self._waiting):
            if any(park in parks for parks in ended.values()):
                self._refuse(park, BusyError("the park was ended by an unpark"))
        if not result.set_running_or_notify_cancel():
            return
        self._idle_since = None  # an administrator wants them here: their idleness begins now
        models = self._residency.models
        try:
            for role, parks in ended.items():
                if role == TARGET or self._residency.policy == BOTH:
                    self._residency.bring_back(role)
                models[role].kept_away = False
                models[role].holds -= parks
            states = self._residency.states()
        except EngineError as error:
            for role, parks in ended.items():
                if models[role].kept_away:
                    models[role].holds |= parks
            result.set_exception(error)
        except BaseException as error:
            result.set_exception(_died(error))
            raise
        else:
            result.set_result(states)

    def refuse(self, park: Park) -> None:
        """Answer a park that does not wait, while requests run."""
        if park.result.set_running_or_notify_cancel():
            park.result.set_exception(busy())

    def fail_all(self, error: SkimError) -> None:
        """The engine ends."""
        for park in list(self._waiting):
            self._refuse(park, error)

    def _run(self, park: Park) -> None:
        if not park.result.set_running_or_notify_cancel():
            return self._forget(park)
        try:
            self._finish()
            self._residency.park(park.roles, park.to)
            states = self._residency.states()
        except EngineError as error:
            self._forget(park)
            park.result.set_exception(error)
        except BaseException as error:
            self._forget(park)
            park.result.set_exception(_died(error))
            raise
        else:
            self._waiting.remove(park)
            for role in park.roles:
                self._residency.models[role].kept_away = True
            park.result.set_result(states)

    def _refuse(self, park: Park, error: SkimError) -> None:
        self._forget(park)
        if park.result.set_running_or_notify_cancel():
            park.result.set_exception(error)

    def _forget(self, park: Park) -> None:
        """The park does not happen: its models serve requests again."""
        self._waiting.remove(park)
        for role in park.roles:
            self._residency.models[role].holds.discard(park)


def busy() -> BusyError:
    return BusyError("requests are running; let it wait for them, or try again later")


def _died(error: BaseException) -> EngineError:
    """The error that callers get when the engine dies of `error`."""
    return EngineError(f"the engine died: {first_line(error)}")
