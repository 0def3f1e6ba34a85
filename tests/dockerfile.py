"""A Dockerfile as data: stages, and the instructions that a target runs, those of its ancestors first."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

_INSTRUCTIONS = frozenset(
    [
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN"),
        *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    ]
)


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str

    def words(self) -> list[str]:
        """The value of the exec form, a JSON list."""
        found = json.loads(self.value)
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise ValueError(f"{self.name} has no exec form: {self.value}")
        return found


@dataclass
class Stage:
    name: str
    base: str  # an image, or an earlier stage
    instructions: list[Instruction] = field(default_factory=list)


def stages_of(path: Path) -> dict[str, Stage]:
    """The stages by name, in order. Raises ValueError for an unknown instruction or an unnamed stage."""
    found: dict[str, Stage] = {}
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        if name not in _INSTRUCTIONS:
            raise ValueError(f"unknown instruction: {line}")
        if name == "FROM":
            if (match := re.fullmatch(r"(\S+) AS (\S+)", value)) is None:
                raise ValueError(f"a stage without a name: {line}")
            found[match[2]] = Stage(match[2], match[1])
        else:
            list(found.values())[-1].instructions.append(Instruction(name, value.strip()))
    return found


def lineage(stages: dict[str, Stage], target: str) -> list[Stage]:
    """The stages that a target is built on by FROM, the first one first."""
    own = stages[target]
    return [*(lineage(stages, own.base) if own.base in stages else []), own]


def instructions_of(stages: dict[str, Stage], target: str) -> list[Instruction]:
    return [one for stage in lineage(stages, target) for one in stage.instructions]
