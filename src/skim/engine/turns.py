"""Pure decisions about residency: the policy, the memory that it needs, and whose turn it is.

| Policy | At rest | While prompts are scored |
|---|---|---|
| both | target, drafter | target, drafter; rows go on. After an idle park, the drafter comes when needed |
| keep-target | target | target, drafter; rows pause |
| swap | target | drafter, and the target's table of embeddings; rows pause |

Rows pause because the drafter takes the memory that their steps would need. They keep their blocks: the KV
pool is not touched under any policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from skim.memory.budget import in_words

BOTH, KEEP_TARGET, SWAP = POLICIES = ("both", "keep-target", "swap")  # the more memory, the earlier
AUTO = "auto"
TARGET, DRAFTER = ROLES = ("target", "drafter")


@dataclass(frozen=True)
class Sizes:
    """Bytes on the device: weights, the target's table of embeddings, and the largest step and scoring."""

    target: int
    drafter: int
    table: int
    step: int
    scoring: int

    def kept(self, policy: str) -> int:
        """Weights that never leave the device."""
        return {BOTH: self.target + self.drafter, KEEP_TARGET: self.target, SWAP: 0}[policy]

    def peak(self, policy: str) -> int:
        """Most memory in use beside them."""
        return {
            BOTH: max(self.step, self.scoring),
            KEEP_TARGET: max(self.step, self.drafter + self.scoring),
            SWAP: max(self.target + self.step, self.table + self.drafter + self.scoring),
        }[policy]


def choose_policy(rooms: Mapping[str, int], wanted: int) -> tuple[str, str]:
    """The policy that `auto` takes, and why. `rooms` are the bytes that each leaves for keys and values.

    The first one with `wanted` bytes, those of one sequence as long as the context window, else the one with
    the most room. Policies are in the order of their speed.
    """
    fitting = [policy for policy, room in rooms.items() if room >= wanted]
    if fitting:
        chosen = fitting[0]
        why = f"it leaves {in_words(rooms[chosen])} for keys and values"
        why += f", and one sequence of the context window takes {in_words(wanted)}"
        before = [policy for policy in rooms if policy != chosen][: list(rooms).index(chosen)]
        return chosen, why + "".join(f"; {one} would leave {in_words(max(0, rooms[one]))}" for one in before)
    chosen = max(rooms, key=lambda policy: rooms[policy])
    return chosen, (
        f"no policy has room for one sequence of the context window, {in_words(wanted)}, and it leaves the "
        f"most for keys and values: {in_words(max(0, rooms[chosen]))}"
    )


@dataclass(frozen=True)
class Demand:
    """What waits for a model."""

    visitors: bool  # plans wait for the drafter
    visiting: bool  # plans of the present visit are not done
    undecided: bool  # plans may still turn out to need the drafter, or nothing
    target: bool  # rows or plans wait for the target
    rested: bool  # since the last visit, the target has had as much time as the visit took


class Turn(NamedTuple):
    """The models that must be on the device, and whether rows may run. Without `moves`, all models stay
    where they are."""

    resident: frozenset[str]
    rows: bool = True
    moves: bool = True

    @property
    def is_visit(self) -> bool:
        return self.moves and not self.rows


STAY = Turn(frozenset(), rows=False, moves=False)


def decide_turn(policy: str, demand: Demand) -> Turn:
    """Whose turn it is. A visit of the drafter lasts until all plans that waited for it are scored.

    It begins when all plans that arrived have said which model they need, so that one visit serves them all.
    Until then nothing is swapped, unless rows need the target: it might have to leave again at once. Under a
    steady load of prompts the target has at least half of the time.
    """
    if policy == BOTH:
        return Turn(frozenset(ROLES if demand.visitors else {TARGET}))
    begins = demand.visitors and not demand.undecided and (demand.rested or not demand.target)
    if not (demand.visiting or begins):
        waits = policy == SWAP and demand.undecided and not demand.target
        return STAY if waits else Turn(frozenset({TARGET}))
    return Turn(frozenset(ROLES if policy == KEEP_TARGET else {DRAFTER}), rows=False)
