"""The models of one engine: which are on the device, and when they change places.

Everything but `states` runs on the engine's thread. Engines may share models (`LLM.with_settings`): a
model's lock is held while a step runs, and a model that another engine uses is not parked when idle.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from skim.engine.lifecycle import Lifecycle
from skim.engine.turns import (
    AUTO,
    BOTH,
    DRAFTER,
    KEEP_TARGET,
    ROLES,
    SWAP,
    TARGET,
    Demand,
    Sizes,
    Turn,
    decide_turn,
)
from skim.errors import EngineError, MoveError, ParkedError
from skim.models.load import LoadedModel
from skim.models.residency import Residency
from skim.models.residency_state import Place, ResidencyState
from skim.prefill.plan_queue import Entry, PlanQueue

log = logging.getLogger(__name__)


class EngineResidency:
    """Takes turns between target and drafter by the policy, and parks both when idle.

    `policy` is `both`, `keep-target` or `swap`; `auto` until the pool is sized. Without a drafter, or if it
    is the target itself, it is `both`. `clock` returns seconds.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel | None = None,
        policy: str = BOTH,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models: dict[str, Residency] = {TARGET: target.residency}
        if drafter is not None and drafter.module is not target.module:
            self.models[DRAFTER] = drafter.residency
        if policy in (KEEP_TARGET, SWAP) and DRAFTER not in self.models:
            log.warning(
                "residency %s has no effect without a drafter: the target stays on the device", policy
            )
        self.policy = policy if DRAFTER in self.models else BOTH
        self._lifecycle: Lifecycle | None = None
        self._finish: Callable[[], object] = lambda: None
        self._relocated: Callable[[], None] = lambda: None
        self._visits = False  # True while the drafter visits and rows pause
        self._visit: frozenset[int] = frozenset()  # keys of the plans that it serves
        self._clock = clock
        self._visit_began = 0.0
        self._rest_until = 0.0
        self._relocations = target.residency.relocations
        for role, residency in self.models.items():
            residency.role = role
            residency.users.add(self)

    def start(self) -> None:
        """Have all models on the device that the engine needs to start, wherever another one left them."""
        for role, residency in self.models.items():
            if residency.by_admin:
                raise ParkedError(f"the {role} was parked by an administrator; unpark it first")
        self.rest()

    def serve(
        self, lifecycle: Lifecycle, *, finish: Callable[[], object], relocated: Callable[[], None]
    ) -> None:
        """Take turns by what its plans and sequences need.

        `finish` ends the step in flight. `relocated` is called when the target's weights have come back to
        other addresses: captured graphs are then of no use.
        """
        self._lifecycle, self._finish, self._relocated = lifecycle, finish, relocated

    @property
    def _plans(self) -> PlanQueue:
        assert self._lifecycle is not None
        return self._lifecycle.plans

    # -- what is where

    def states(self) -> tuple[ResidencyState, ...]:
        """Each model at this moment. Called from any thread."""
        return tuple(residency.state(role) for role, residency in self.models.items())

    @property
    def sizes(self) -> Sizes:
        """Bytes of the weights, without those of steps and scoring."""
        target, drafter = self.models[TARGET], self.models.get(DRAFTER)
        return Sizes(target.size, 0 if drafter is None else drafter.size, target.table_bytes, 0, 0)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that are on the device now."""
        return sum(residency.device_bytes for residency in self.models.values())

    def choose(self, policy: str, why: str) -> None:
        """Take the policy that `auto` stands for."""
        self.policy = policy
        log.info("residency %s: %s", policy, why)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No other engine moves the models meanwhile."""
        with contextlib.ExitStack() as stack:
            for residency in self.models.values():
                stack.enter_context(residency.lock)
            yield

    @property
    def starts(self) -> bool:
        """True until the engine serves requests."""
        return self._lifecycle is None

    def uses(self, residency: Residency) -> bool:
        """True if unfinished work of this engine needs a model; of the drafter, work that runs on it."""
        if self.starts:
            return True
        if residency is self.models[TARGET]:
            return self.is_wanted
        return bool(self._plans.running(DRAFTER))

    @property
    def is_wanted(self) -> bool:
        """True if there is unfinished work."""
        return self._lifecycle is not None and bool(self._lifecycle.requests or len(self._plans))

    def in_use(self, roles: Collection[str]) -> bool:
        """True if an engine needs one of these models."""
        models = [self.models[role] for role in roles if role in self.models]
        return any(user.uses(one) for one in models for user in list(one.users))

    # -- moves

    def arrange(self, wanted: Collection[str]) -> None:
        """Have these models on the device and, if the policy is `keep-target` or `swap`, no other one, unless
        another engine starts.

        Raises ParkedError if an administrator parked one of them, EngineError if it cannot be brought.
        """
        for role, residency in self.models.items():
            if role in wanted and residency.kept_away and not residency.is_resident:
                raise ParkedError(f"the {role} was parked by an administrator; unpark it first")
        if self.policy == SWAP and TARGET not in wanted and self._may_leave(self.models[TARGET]):
            self.models[TARGET].park(keep_table=True)  # words are compared by their embeddings
        if self.policy in (KEEP_TARGET, SWAP) and DRAFTER not in wanted:
            self._park_drafter()
        for role, residency in self.models.items():
            if role in wanted:
                residency.unpark()

    def rest(self) -> None:
        """Have the models on the device that are there while no prompt is scored."""
        if self.policy != AUTO:
            self.arrange((TARGET,) if self.policy in (KEEP_TARGET, SWAP) else ROLES)
            return
        try:
            self.arrange((TARGET,))
        except EngineError:  # both do not fit together
            self.models[DRAFTER].park()
            self.arrange((TARGET,))

    def arrange_scoring(self) -> None:
        """Have the models on the device that are there while a prompt is scored."""
        if self.policy != AUTO:
            self.arrange((DRAFTER,) if self.policy == SWAP else ROLES)
            return
        try:
            self.arrange(ROLES)
        except EngineError:  # both do not fit together
            self.models[TARGET].park(keep_table=True)
            self.arrange((DRAFTER,))

    def bring_back(self, role: str) -> None:
        """Bring a model that an administrator unparks. The target stays away while the drafter visits in its
        place: its own turn brings it."""
        visited = self._visits and self.is_wanted
        if self.policy == SWAP and visited:
            return
        if self.policy != BOTH and not visited:
            self._park_drafter()  # left by a visit whose prompts were aborted
        self.models[role].unpark()

    def _park_drafter(self) -> None:
        drafter = self.models[DRAFTER]
        if drafter.is_resident and self._may_leave(drafter):
            drafter.park()

    def _may_leave(self, residency: Residency) -> bool:
        """False while another engine starts: it runs the module between steps, without the lock."""
        return not any(user.starts for user in list(residency.users) if user is not self)

    def park(self, roles: Collection[str], to: Place) -> None:
        """Move models off the device, and give its memory to other programs: all of them, or none.

        If one cannot be moved, those before it go back. Raises MoveError.
        """
        moved: list[tuple[Residency, Place]] = []
        try:
            for role in roles:
                if role in self.models:
                    before = self.models[role].place
                    self.models[role].park(to)
                    moved.append((self.models[role], before))
        except EngineError as error:
            raise _undone(error, moved) from error
        finally:
            torch.cuda.empty_cache()

    def park_idle(self) -> None:
        """Park models that are not released, unless an engine uses one. Raises MoveError: all stay."""
        if self.in_use(ROLES):
            return
        roles = [role for role, one in self.models.items() if one.place is not Place.RELEASED]
        leaving = [self.models[role] for role in roles if self.models[role].is_resident]
        self.park(roles, Place.PARKED)
        for one in leaving:
            one.is_idle = not one.kept_away
        log.info("idle: parked; the next request brings the models back")

    # -- turns

    def take_turn(self) -> Turn:
        """Have the models on the device that are needed next. Rows pause before the drafter visits.

        If the target cannot come, all open requests fail; if the drafter cannot, prompts are read densely.
        """
        if not self.is_wanted and not self._visits:
            return Turn(frozenset())
        turn = self._next_turn()
        if not turn.moves:
            return turn
        if turn.is_visit and not self._visits:
            self._finish()
        try:
            self.arrange(turn.resident)
        except EngineError as error:
            self._visits = False
            lacks_target = TARGET in turn.resident and not self.models[TARGET].is_resident
            if DRAFTER in turn.resident and not lacks_target:
                log.warning("prompts are read in full: %s", error)
                self._plans.refuse(self._plans.waiting_for(DRAFTER) | self._plans.running(DRAFTER), error)
            else:
                self._fail_open(error)
            return self.take_turn()
        if self._visits and not turn.is_visit:  # now as much time belongs to the target
            self._rest_until = 2 * self._clock() - self._visit_began
        self._visits = turn.is_visit
        if self._relocations != self.models[TARGET].relocations:
            self._relocations = self.models[TARGET].relocations
            self._relocated()
        drafter = self.models.get(DRAFTER)
        if self.policy == BOTH and drafter is not None and drafter.is_resident and not drafter.by_admin:
            return turn._replace(resident=turn.resident | {DRAFTER})  # the next plan need not wait a step
        return turn

    def _fail_open(self, error: EngineError) -> None:
        """Fail every open request and plan."""
        assert self._lifecycle is not None
        log.error("all open requests fail: %s", error)
        self._finish()
        for state in list(self._lifecycle.requests.values()):
            self._lifecycle.fail(state, error)
        self._plans.fail_all(error)

    def _next_turn(self) -> Turn:
        """Whose turn it is, by what waits now. A drafter that an administrator parked does not come."""
        assert self._lifecycle is not None
        plans, drafter = self._plans, self.models.get(DRAFTER)
        if drafter is not None and drafter.by_admin:
            error = ParkedError("the drafter was parked by an administrator; unpark it")
            plans.refuse(plans.waiting_for(DRAFTER) - plans.running(DRAFTER), error)
        waiting = frozenset() if drafter is None else plans.waiting_for(DRAFTER)
        self._visit &= waiting
        turn = decide_turn(
            self.policy,
            Demand(
                visitors=bool(waiting),
                visiting=bool(self._visit),
                undecided=plans.undecided,
                target=bool(self._lifecycle.sequences) or bool(plans.waiting_for(TARGET)),
                rested=self._clock() >= self._rest_until,
            ),
        )
        if turn.is_visit and not self._visit:
            self._visit, self._visit_began = waiting, self._clock()
            log.debug("the drafter comes to score %d prompts", len(waiting))
        if drafter is not None and drafter.by_admin and not waiting:
            return turn._replace(resident=turn.resident - {DRAFTER})
        return turn

    def may_run(self, turn: Turn) -> Callable[[Entry], bool]:
        """Which plans may run a slice in this turn: those whose model is there, and that the visit serves."""

        def may(entry: Entry) -> bool:
            if entry.wants in (None, "none"):
                return True
            role = entry.wants if entry.wants in self.models else TARGET
            return role in turn.resident and (turn.rows or entry.key in self._visit)

        return may


def _undone(error: EngineError, moved: Sequence[tuple[Residency, Place]]) -> MoveError:
    """Bring back models that were moved before another could not be. Returns the error to report."""
    words = [str(error)]
    for residency, before in moved:
        if residency.place is not before:
            try:
                residency.unpark() if before is Place.RESIDENT else residency.park(before)
            except EngineError as second:
                words.append(str(second))
    return MoveError("; ".join(words))
