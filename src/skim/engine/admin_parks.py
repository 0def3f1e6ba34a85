"""An administrator's parks and unparks, asked for by any thread.

`parking.py` carries them out on the engine's thread. This side decides when requests are refused: a park
holds its models from the call on if it waits, and only once nothing runs if it does not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future

from skim.engine.inbox import Inbox
from skim.engine.parking import Park, Parking, States, busy
from skim.engine.residency import EngineResidency
from skim.engine.turns import ROLES, TARGET
from skim.errors import ParkedError, RequestError, shown
from skim.models.residency_state import Place, Standing


class AdminParks:
    """The parks and unparks of one engine. Called from any thread, except for what the inbox runs."""

    def __init__(self, inbox: Inbox, residency: EngineResidency, parking: Parking) -> None:
        self._inbox = inbox
        self._residency = residency
        self._parking = parking
        self._unparks: Counter[str] = Counter()  # under way, by role
        self._tries = 0  # parks in the inbox that do not wait

    @property
    def target_parked(self) -> bool:
        """True while an administrator has parked the target, or a park waits: requests are refused."""
        return self._residency.models[TARGET].by_admin

    @property
    def unparking(self) -> bool:
        """True while the target comes back for an administrator."""
        return self._unparks[TARGET] > 0 and not self._residency.models[TARGET].is_resident

    @property
    def standing(self) -> dict[str, Standing]:
        """Why each model is where it is, by role."""
        return {role: one.standing for role, one in self._residency.models.items()}

    def check_target(self) -> None:
        """Raise ParkedError while requests are refused."""
        if self.target_parked:
            raise ParkedError(
                "the model is being unparked; try again in a few seconds"
                if self.unparking
                else "the model was parked by an administrator; unpark it, or try again later",
                returning=self.unparking,
            )

    # -- park

    def park(
        self, models: Collection[str] = ROLES, *, to: str, wait: bool, timeout: float | None
    ) -> Future[States]:
        """As `Engine.park`, without blocking. Cancelling the result withdraws a park that still waits."""
        roles, place = self._roles(models, "park"), _place(to)
        deadline = None if timeout is None else time.monotonic() + timeout
        park = Park(roles, place, wait, deadline)
        with self._inbox.lock:
            self._inbox.check_running()
            if wait:
                self._hold(park)
            elif self._residency.in_use(roles):
                park.result.set_exception(busy())
            else:
                self._try_park(park)
        return park.result

    def _hold(self, park: Park) -> None:
        """Refuse requests for the park's models from now on, and park them. Called under the lock: every
        accepted request is in the inbox before the park."""
        for role in park.roles:
            self._residency.models[role].holds.add(park)
        self._inbox.put(lambda: self._parking.add(park))

    def _try_park(self, park: Park) -> None:
        """Queue a park that does not wait. Called under the lock."""
        self._tries += 1
        self._inbox.put(lambda: self._park_now(park))

    def _park_now(self, park: Park) -> None:
        """A park that does not wait: it holds only if no request runs, so that others notice nothing if it is
        refused. Called on the engine's thread."""
        with self._inbox.lock:
            self._tries -= 1
        if self._residency.in_use(park.roles):
            self._parking.refuse(park)
            return
        with self._inbox.lock:
            if self._inbox.qsize() <= self._tries or self._inbox.closed:  # nothing else is queued
                self._hold(park)
            else:  # requests that were accepted before it come first
                self._try_park(park)

    # -- unpark

    def unpark(self, models: Collection[str] = ROLES) -> Future[States]:
        """As `Engine.unpark`, without blocking."""
        roles = self._roles(models, "unpark")
        result: Future[States] = Future()
        with self._inbox.lock:
            self._inbox.check_running()
            self._unparks.update(roles)
            ended = {}
            for role in roles:
                residency = self._residency.models[role]
                ended[role] = frozenset(residency.holds)
                if not residency.kept_away:  # it only waited: requests that come now follow the unpark
                    residency.holds -= ended[role]
            self._inbox.put(lambda: self._parking.unpark(ended, result))
        result.add_done_callback(lambda _: self._end_unpark(roles))
        return result

    def _end_unpark(self, roles: Collection[str]) -> None:
        with self._inbox.lock:
            self._unparks.subtract(roles)

    def _roles(self, models: Collection[str], what: str) -> list[str]:
        """Checked names of models. The default names a drafter even if there is none."""
        for name in models:
            if name not in ROLES:
                raise RequestError(
                    f"models must be of {', '.join(ROLES)}, got {shown(name)}", fields="models"
                )
        roles = [role for role in ROLES if role in models and role in self._residency.models]
        if not roles:
            raise RequestError(f"this engine has no drafter to {what}; name the target", fields="models")
        return roles


def _place(to: str) -> Place:
    if to not in (Place.PARKED, Place.RELEASED):
        raise RequestError(f"to must be parked or released, got {shown(to)}", fields="to")
    return Place(to)
