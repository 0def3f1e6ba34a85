"""The calibration of a model: the heads that the attention scorer captures, and how much each counts.

Shipped for the default model, measured by `skim calibrate` for any other, and replaced by a default
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
from skim.prefill.scoring.features import Capture, Feature, Statistic, captures_of
from skim.prefill.scoring.scorer import ScoringModel

_FORMAT = "skim-calibration-6"
_WITHOUT_LIKELIHOOD = "skim-calibration-5"  # the format before a second look had a likelihood
_WITHOUT_SECOND = "skim-calibration-4"  # the format before there was a second look
FILE_NAME = "skim-calibration.json"  # beside a model's weights


@dataclass(frozen=True)
class Second:
    """Weights of the second look, which ranks the best blocks of the first one again (`second_look`).

    They are fitted to blocks that the first look ranks high. The logarithm of the odds of such a block is the
    sum of the features, of its first logarithm, of the scores of words and of the question's likelihood after
    the block, each by its weight.
    """

    features: tuple[Feature, ...]  # each once
    first: float  # weight of the first look's logarithm of the odds
    words: tuple[float, float]  # weights of shared and of similar words
    window: int  # prompt tokens of a scoring window
    likelihood: float = 0.0  # weight of the question's likelihood after a block; 0: it is not computed

    def __post_init__(self) -> None:
        _check_features(self.features)
        if not all(map(math.isfinite, (self.first, *self.words, self.likelihood))):
            raise ConfigError(
                "the weights of a second look must be finite, got "
                f"{shown((self.first, *self.words))} for the first look, shared and similar words, and "
                f"{shown(self.likelihood)} for the likelihood"
            )
        if not self.features or not _is_index(self.window) or not self.window:
            raise ConfigError(
                "a second look needs features and a window of at least 1 token, got "
                f"{len(self.features)} features and {shown(self.window)}"
            )

    def calibration(self) -> Calibration:
        """The features alone, for the attention scorer."""
        layers = tuple(sorted({feature.layer for feature in self.features}))
        return Calibration(layers, self.features, (0.0, 0.0))


@dataclass(frozen=True)
class Calibration:
    """The heads to capture, and the weights of their features. Layers above the last one are never run.

    Weights are fitted together: the logarithm of the odds that a block has evidence is the sum of the
    features and of the scores of words, each by its weight.
    """

    layers: tuple[int, ...]  # ascending
    features: tuple[Feature, ...] | None = None  # ordered, each once; None: all heads of `layers`, unweighted
    words: tuple[float, float] | None = None  # weights of shared and of similar words; None without features
    model: str = ""  # the model it was measured on; "" if it was not measured
    trials: int = 0  # prompts it was fitted to
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Held-out figures by kind of task: {"far": {"kept": 0.9, ...}}."""
    second: Second | None = None  # None: there is no second look

    def __post_init__(self) -> None:
        if not self.layers or any(not _is_index(layer) for layer in self.layers):
            raise ConfigError(
                f"a calibration's layers must be whole numbers of at least 0, got {shown(self.layers)}"
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"a calibration's layers must ascend, each once, got {shown(self.layers)}")
        if (self.features is None) != (self.words is None):
            raise ConfigError("a calibration has both features and weights of words, or neither")
        if self.features is None and self.second is not None:
            raise ConfigError("a calibration without features has no second look")
        if self.features is None or self.words is None:
            return
        if not all(map(math.isfinite, self.words)):
            raise ConfigError(
                f"a calibration's words must be two finite weights, of shared and of similar words, "
                f"got {shown(self.words)}"
            )
        _check_features(self.features)
        if sorted({feature.layer for feature in self.features}) != list(self.layers):
            raise ConfigError(f"a calibration's features must be of its layers {self.layers}, of each one")

    def captures(self) -> dict[int, Capture]:
        """The heads to capture, by layer, ascending."""
        if self.features is None:
            return {layer: Capture(most=None) for layer in self.layers}
        return captures_of(self.features)

    def check_fits(self, layers: int, heads: int) -> None:
        """Raise a ConfigError unless a model of this many layers and heads has all of these."""
        named = (*(self.features or ()), *(self.second.features if self.second else ()))
        last = max((self.layers[-1], *(feature.layer for feature in named)))
        highest = max((feature.head for feature in named), default=0)
        if last >= layers or highest >= heads:
            raise ConfigError(
                f"the calibration measured on {self.model or 'no model'} names layer {last} and "
                f"head {highest}, but the model has {layers} layers of {heads} heads; calibrate this model"
            )

    def to_json(self) -> str:
        lines = [
            f"  {json.dumps(name)}: {_indented(value)}"
            for name, value in {"format": _FORMAT, **asdict(self)}.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a calibration") -> Calibration:
        """Parse the output of `to_json`; anything else is a ConfigError that names `where`."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}; calibrate again") from error
        form = found.pop("format", None) if isinstance(found, dict) else None
        if form == _WITHOUT_SECOND:
            found["second"] = None
        elif form == _WITHOUT_LIKELIHOOD and isinstance(second := found.get("second"), dict):
            second.setdefault("likelihood", 0.0)
        elif form not in (_FORMAT, _WITHOUT_LIKELIHOOD):
            raise ConfigError(f"{where} is not of the format {_FORMAT}; calibrate again")
        known = {one.name for one in fields(cls)}
        if found.keys() != known:
            raise ConfigError(f"{where} must have the fields {', '.join(sorted(known))}; calibrate again")
        try:
            features, words, second = found["features"], found["words"], found["second"]
            return cls(
                layers=tuple(found["layers"]),
                features=None if features is None else tuple(map(_feature, features)),
                words=None if words is None else _pair(words),
                model=_of(str, found, "model"),
                trials=_of(int, found, "trials"),
                quality={
                    name: {key: float(value) for key, value in figures.items()}
                    for name, figures in found["quality"].items()
                },
                second=None if second is None else _second(second),
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


def _indented(value: Any, indent: str = "\n  ") -> str:
    """JSON; a list of lists and a dictionary have a line for each item."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lists = {key: isinstance(one, tuple) for key, one in value.items()}
        parts = [
            f"{json.dumps(key)}: {_indented(one, deeper) if lists[key] else json.dumps(one)}"
            for key, one in value.items()
        ]
        return "{" + deeper + f",{deeper}".join(parts) + indent + "}"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "[" + deeper + f",{deeper}".join(map(json.dumps, value)) + indent + "]"
    return json.dumps(value)


def _pair(found: Any) -> tuple[float, float]:
    first, second = found
    return float(first), float(second)


def _second(found: Any) -> Second:
    known = {one.name for one in fields(Second)}
    if not isinstance(found, dict) or found.keys() != known:
        raise TypeError(f"second must have the fields {', '.join(sorted(known))}")
    return Second(
        features=tuple(map(_feature, found["features"])),
        first=float(found["first"]),
        words=_pair(found["words"]),
        window=_of(int, found, "window"),
        likelihood=float(found["likelihood"]),
    )


def _check_features(features: tuple[Feature, ...]) -> None:
    for feature in features:
        if not (_is_index(feature.layer) and _is_index(feature.head) and math.isfinite(feature.weight)):
            raise ConfigError(
                "a calibration's features need a layer and a head of at least 0, and a finite weight; "
                f"got {shown(tuple(feature))}"
            )
    names = [feature[:3] for feature in features]
    if len(set(names)) < len(names):
        raise ConfigError("a calibration has each feature once")


def _feature(found: Any) -> Feature:
    statistic, layer, head, weight = found
    return Feature(Statistic(statistic), layer, head, float(weight))


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of(kind: type, found: dict[str, Any], name: str) -> Any:
    if not isinstance(found[name], kind) or isinstance(found[name], bool):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {shown(found[name])}")
    return found[name]
