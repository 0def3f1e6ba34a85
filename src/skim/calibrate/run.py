"""Calibrates a model: draws prompts, reads them, fits weights and judges them on held-out pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skim.calibrate.capture import Reader, Trial
from skim.calibrate.fit import fit
from skim.calibrate.judge import judge
from skim.calibrate.trials import Prompts, judged_orders, orders
from skim.errors import ConfigError
from skim.prefill.pairs import Kind
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.features import Feature, Name
from skim.prefill.scoring.scorer import ScoringModel

LEAST_TEXT = 20_000


def calibrate(
    model: ScoringModel,
    text: str,
    *,
    name: str,
    rounds: int = 1,
    trials: int | None = None,
    layers: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Calibration:
    """Fit the weights of the model's features to calibration pairs; judge them on held-out pairs.

    `text` is natural text to hide facts in. Each pair is hidden in `rounds` texts; `trials` limits the
    prompts of either half. `layers` are read, None for the first half of the model and one more: later
    layers find more, and every layer costs time. The same arguments give the same calibration. `progress` is
    called with (done, total).
    """
    if (trials is not None and trials < len(Kind)) or rounds < 1 or len(text) < LEAST_TEXT:
        raise ConfigError(
            f"calibration needs at least {len(Kind)} trials, one of each kind, 1 round and {LEAST_TEXT} "
            f"characters of text; got {trials}, {rounds} and {len(text)}"
        )
    count = int(model.module.config.get_text_config().num_hidden_layers)
    if layers is not None and not 1 <= layers <= count:
        raise ConfigError(f"--layers must be 1 to {count}, the layers of the model, got {layers}")
    prompts = Prompts(model.tokenizer, text, seed)
    fitted, judged = orders(rounds, prompts.has_template, trials), judged_orders(prompts.has_template, trials)
    reader = Reader(model, layers or count // 2 + 1)
    read: list[Trial] = []
    for order in (*fitted, *judged):
        read.append(reader.read(prompts.draw(order)))
        progress(len(read), len(fitted) + len(judged))
    found = fit(read[: len(fitted)], model.module.device, seed)
    shared, similar = found.given
    features = features_of(reader.names, found.weights)
    if not features:
        raise ConfigError(
            f"no head of the first {layers or count // 2 + 1} layers helps to find evidence; raise --layers "
            "or --rounds, or use the model without a calibration"
        )
    return Calibration(
        layers=tuple(sorted({feature.layer for feature in features})),
        features=features,
        words=(shared, similar),
        model=name,
        trials=len(fitted),
        quality=judge(read[len(fitted) :], found.weights, found.given),
    )


def features_of(names: Sequence[Name], weights: Sequence[float]) -> tuple[Feature, ...]:
    """The features whose weights are not 0."""
    return tuple(Feature(*name, weight) for name, weight in zip(names, weights, strict=True) if weight)
