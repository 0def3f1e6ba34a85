"""The calibration of a model: its retrieval heads, which the attention scorer captures.

Shipped for the default model, measured by `skim.prefill.calibrate` for any other, and replaced by a default
otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from skim.errors import ConfigError, shown
from skim.prefill.scoring.scorer import ScoringModel

_FORMAT = "skim-calibration-3"
FILE_NAME = "skim-calibration.json"  # beside a model's weights


@dataclass(frozen=True)
class Calibration:
    """The layers and heads to capture. Layers above the last one are never run."""

    layers: tuple[int, ...]  # ascending
    heads: tuple[tuple[int, int], ...] | None = None  # (layer, head), ascending; None: all heads of `layers`
    weights: tuple[float, ...] | None = None  # of each head's standardised log attention; None without heads
    model: str = ""  # the model it was measured on; "" if it was not measured
    trials: int = 0  # tasks it was measured with
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Held-out figures by kind of task: {"far": {"kept": 0.9, ...}}."""

    def __post_init__(self) -> None:
        if not self.layers or any(not _is_index(layer) for layer in self.layers):
            raise ConfigError(
                f"a calibration's layers must be whole numbers of at least 0, got {shown(self.layers)}"
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"a calibration's layers must ascend, each once, got {shown(self.layers)}")
        if (self.heads is None) != (self.weights is None):
            raise ConfigError("a calibration has both heads and weights, or neither")
        if self.heads is None or self.weights is None:
            return
        if len(self.weights) != len(self.heads) or not all(0 < w < math.inf for w in self.weights):
            raise ConfigError(
                f"a calibration of {len(self.heads)} heads needs as many weights above 0, "
                f"got {shown(self.weights)}"
            )
        if any(len(pair) != 2 or not all(map(_is_index, pair)) for pair in self.heads):
            raise ConfigError(f"a calibration's heads must be pairs (layer, head), got {shown(self.heads)}")
        if sorted({layer for layer, _ in self.heads}) != list(self.layers):
            raise ConfigError(
                f"a calibration's heads must be of its layers {self.layers}, of each at least one; "
                f"got {shown(self.heads)}"
            )
        if list(self.heads) != sorted(set(self.heads)):
            raise ConfigError(f"a calibration's heads must ascend, each once, got {shown(self.heads)}")

    def by_layer(self) -> dict[int, tuple[int, ...] | None]:
        """The heads of each layer, ascending; None for all."""
        if self.heads is None:
            return dict.fromkeys(self.layers)
        return {layer: tuple(sorted(h for at, h in self.heads if at == layer)) for layer in self.layers}

    def check_fits(self, layers: int, heads: int) -> None:
        """Raise a ConfigError unless a model of this many layers and heads has all of these."""
        highest = max((head for _, head in self.heads or ()), default=0)
        if self.layers[-1] >= layers or highest >= heads:
            raise ConfigError(
                f"the calibration measured on {self.model or 'no model'} names layer {self.layers[-1]} and "
                f"head {highest}, but the model has {layers} layers of {heads} heads; calibrate this model"
            )

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a calibration") -> Calibration:
        """Parse the output of `to_json`; anything else is a ConfigError that names `where`."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}; calibrate again") from error
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise ConfigError(f"{where} is not of the format {_FORMAT}; calibrate again")
        known = {one.name for one in fields(cls)}
        if found.keys() != known:
            raise ConfigError(f"{where} must have the fields {', '.join(sorted(known))}; calibrate again")
        try:
            heads = found["heads"]
            return cls(
                layers=tuple(found["layers"]),
                heads=None if heads is None else tuple(tuple(pair) for pair in heads),
                weights=None if found["weights"] is None else tuple(map(float, found["weights"])),
                model=_of(str, found, "model"),
                trials=_of(int, found, "trials"),
                quality={
                    name: {key: float(value) for key, value in figures.items()}
                    for name, figures in found["quality"].items()
                },
            )
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where}: {error}; calibrate again") from error

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the calibration {path}: {error}") from error
        return cls.from_json(text, f"the calibration {path}")


def default_calibration(num_layers: int) -> Calibration:
    """The default without a calibration: all heads of three layers that end a quarter of the way up.

    Models retrieve in some layers and not in their neighbours, so three are taken. Later layers retrieve
    better, but every layer costs time, and most of the evidence without a calibration comes from words.
    """
    last = max(0, -(-num_layers // 4) - 1)
    return Calibration(layers=tuple(range(max(0, last - 2), last + 1)))


def calibration_of(model: ScoringModel) -> Calibration:
    """The calibration beside the model, or the one shipped for it, or the default."""
    text = model.module.config.get_text_config()
    own = model.path / FILE_NAME
    if own.is_file():
        found = Calibration.load(own)
        try:
            found.check_fits(text.num_hidden_layers, text.num_attention_heads)
        except ConfigError as error:
            raise ConfigError(f"{own}: {error}") from error
        return found
    return shipped(model.name) or default_calibration(text.num_hidden_layers)


def shipped(name: str) -> Calibration | None:
    """The calibration shipped with Skim for the model `name`; None if there is none."""
    if not name or not all(char.isalnum() or char in "-_." for char in name):
        return None
    file = resources.files("skim") / "data" / "calibration" / f"{name}.json"
    if not file.is_file():
        return None
    return Calibration.from_json(file.read_text(encoding="utf-8"), f"the shipped calibration {name}")


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of(kind: type, found: dict[str, Any], name: str) -> Any:
    if not isinstance(found[name], kind) or isinstance(found[name], bool):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {shown(found[name])}")
    return found[name]
