"""Calibrates a model: draws prompts, reads them, fits both looks and judges them on unseen facts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from skim.calibrate.capture import BLOCK, Reader
from skim.calibrate.fit import fit
from skim.calibrate.judge import judge
from skim.calibrate.looks import WINDOW, Twice, features_of, fit_second, judge_looks, second_of
from skim.calibrate.trials import Prompts, judged_orders, orders
from skim.errors import ConfigError
from skim.prefill.pairs import Kind
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.scorer import ScoringModel
from skim.prefill.scoring.second_look import count_of

LEAST_TEXT = 20_000

T = TypeVar("T")


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

    Prompts to fit to that are long enough are read again with all layers, and a second look is fitted to
    them. It is left out if facts that it has not seen do not become likelier.
    """
    if trials is not None and trials < len(Kind):
        raise ConfigError(
            f"trials must be at least {len(Kind)}, one of each kind, got {trials}", fields="trials"
        )
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}", fields="rounds")
    if len(text) < LEAST_TEXT:
        raise ConfigError(
            f"text must have at least {LEAST_TEXT:,} characters, got {len(text):,}; give a longer one",
            fields="text",
        )
    count = int(model.module.config.get_text_config().num_hidden_layers)
    if layers is not None and not 1 <= layers <= count:
        raise ConfigError(f"--layers must be 1 to {count}, the layers of the model, got {layers}")
    prompts = Prompts(model.tokenizer, text, seed)
    fitted, judged = orders(rounds, prompts.has_template, trials), judged_orders(prompts.has_template, trials)
    device = model.module.device
    reader, again = Reader(model, layers or count // 2 + 1), Reader(model, count, WINDOW)
    long = [count_of(order.context // BLOCK) > 0 for order in fitted]
    steps = itertools.count(1)

    def done(result: T) -> T:
        progress(next(steps), len(fitted) + len(judged) + sum(long))
        return result

    drawn = [prompts.draw(order) for order in fitted]
    firsts = [done(reader.read(prompt)) for prompt in drawn]
    unseen = [done(reader.read(prompts.draw(order))) for order in judged]
    found = fit(firsts, device, seed)
    features = features_of(reader.names, found.weights)
    if not features:
        raise ConfigError(
            f"no head of the first {layers or count // 2 + 1} layers helps to find evidence; raise --layers "
            "or --rounds, or use the model without a calibration"
        )
    twice: list[Twice] = []
    for prompt, trial in itertools.compress(zip(drawn, firsts, strict=True), long):
        logits = found.unseen_logits(trial)
        if (second := done(again.read_again(prompt, trial, logits))) is not None:
            twice.append(Twice(trial, logits, second))
    quality = judge(unseen, found.weights, found.given)
    best = fit_second(twice, device, seed)
    if best is not None:
        for kind, figures in judge_looks(twice, best).items():
            quality.setdefault(kind, {}).update(figures)
    return Calibration(
        layers=tuple(sorted({feature.layer for feature in features})),
        features=features,
        words=(found.given[0], found.given[1]),
        model=name,
        trials=len(fitted),
        quality=quality,
        second=None if best is None else second_of(again.names, best),
    )
