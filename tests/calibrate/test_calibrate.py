"""Calibrating: prompts with hidden facts, the fit of weights, and its judgement."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim.calibrate import fit as fitting
from skim.calibrate import looks
from skim.calibrate import trials as drawing
from skim.calibrate.capture import Trial
from skim.calibrate.fit import Data, Fitted, fit, minimise, surprise
from skim.calibrate.judge import judge, rank_of
from skim.calibrate.run import calibrate
from skim.calibrate.trials import AGENT, LENGTHS, Order, Prompts, judged_orders, orders
from skim.cli.calibrate import summary
from skim.errors import ConfigError
from skim.evals.tasks.transcript import FORMS
from skim.prefill.pairs import Kind, calibration, held_out
from skim.prefill.scoring import second_look
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.combine import WORDS
from tests import paths, tiny

TEXT = paths.BOOK
CPU = torch.device("cpu")
HEADS = 12


# Prompts


def tokenizer(template: bool) -> Any:
    found = tiny.tokenizer()
    if not template:
        found.chat_template = None
    return found


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("kind", list(Kind))
def test_facts_are_hidden_whole_and_evidence_and_question_are_where_they_are_said_to_be(
    kind: Kind, template: bool
) -> None:
    own = tokenizer(template)
    prompts = Prompts(own, TEXT, seed=0)
    for number in range(0, len(calibration(kind)), 5):
        order = Order(kind, number, 6000, distractors=number % 2)
        prompt, pair = prompts.draw(order), order.pair
        assert pair is calibration(kind)[number]
        assert 5900 < len(prompt.tokens) <= 6000
        text = own.decode(prompt.tokens.tolist())
        assert all(text.count(passage) == 1 for passage in pair.passages)
        spans, expected = (prompt.question, *prompt.evidence), (pair.question, *pair.evidence)
        assert [own.decode(prompt.tokens[one.start : one.stop].tolist()) for one in spans] == [*expected]


def test_transcripts_have_the_fact_in_a_tool_result() -> None:
    own = tokenizer(template=True)
    prompts = Prompts(own, TEXT, seed=0)
    for number in range(4):
        order = Order(AGENT, number, 6000)
        prompt = prompts.draw(order)
        [evidence] = prompt.evidence
        assert own.decode(prompt.tokens[evidence.start : evidence.stop].tolist()) == order.pair.evidence[0]
        assert evidence.stop < prompt.question.start


def test_a_prompt_depends_on_its_order_and_the_seed_alone() -> None:
    order = Order(Kind.FAR, 3, 4000, distractors=2)
    one, other = (Prompts(tokenizer(True), TEXT, seed) for seed in (0, 1))
    first = one.draw(order)
    one.draw(Order(Kind.CODE, 1, 4000))
    assert one.draw(order).tokens.tolist() == first.tokens.tolist()
    assert other.draw(order).tokens.tolist() != first.tokens.tolist()
    assert one.draw(Order(Kind.FAR, 3, 4000, turn=1, distractors=2)).tokens.tolist() != first.tokens.tolist()


@pytest.mark.parametrize("agents", [True, False])
def test_every_pair_is_used_in_every_round_and_the_halves_are_disjoint(agents: bool) -> None:
    rounds = 2 * len(LENGTHS)
    fitted, judged = orders(rounds, agents, None), judged_orders(agents, None)
    pairs = [order.pair for order in fitted if order.kind != AGENT]
    assert all(pairs.count(pair) == rounds for kind in Kind for pair in calibration(kind))
    far = [order for order in fitted if (order.kind, order.number) == (Kind.FAR, 4)]
    assert sorted(order.context for order in far) == sorted(2 * LENGTHS)
    assert len({(order.context, order.distractors) for order in far}) == rounds
    assert {order.pair for order in judged} == {pair for kind in Kind for pair in held_out(kind)}
    hidden = [order.pair for order in fitted if order.kind == AGENT]
    expected = [pair for form in FORMS for pair in calibration(form.facts)] if agents else []
    assert Counter(hidden) == dict.fromkeys(expected, rounds)
    few = orders(1, agents, len(Kind) + agents)
    assert len({order.kind for order in few}) == len(Kind) + agents


# The fit


def planted(
    heads: dict[int, float],
    trials: int = 80,
    *,
    shared: float = 0.0,
    passages: int = 1,
    kinds: tuple[Kind, ...] = (Kind.SHARED, Kind.FAR),
    seed: int = 0,
) -> list[Trial]:
    """Trials of 40 blocks with random features, which at the evidence are raised by the heads' numbers."""
    made = []
    for index in range(trials):
        rng = np.random.default_rng([seed, index])
        features = rng.normal(size=(HEADS, 40)).astype(np.float32)
        words = np.abs(rng.normal(size=(2, 40))).astype(np.float32)
        evidence = [int(block) for block in rng.permutation(40)[:passages]]
        for block in evidence:
            for head, raised in heads.items():
                features[head, block] += raised
            words[0, block] += shared
        kind = kinds[index % len(kinds)]
        passages_at = tuple((one,) for one in evidence)
        made.append(Trial(kind, f"pair {index // 2}", features, words, passages_at, np.arange(40)))
    return made


def test_the_head_that_retrieves_gets_the_largest_weight_and_noise_gets_little() -> None:
    weights = fit(planted({5: 3.0}), CPU).weights
    assert weights[5] > 1
    assert all(abs(weight) < 0.3 * weights[5] for index, weight in enumerate(weights) if index != 5)
    assert all(weight == 0 or abs(weight) >= fitting.LEAST for weight in weights)


def test_a_head_that_points_away_from_evidence_counts_against_it() -> None:
    weights = fit(planted({5: 2.0, 7: -2.0}), CPU).weights
    assert weights[5] > 0.5
    assert weights[7] < -0.5
    both = planted({5: 2.0, 7: -2.0}, seed=1)
    without = [weight if index != 7 else 0.0 for index, weight in enumerate(weights)]
    figures, alone = (judge(both, one, (0.0, 0.0)) for one in (weights, without))
    assert all(figures[kind]["bits"] < alone[kind]["bits"] for kind in figures)


def test_weights_of_words_are_fitted_with_those_of_heads() -> None:
    useful, useless = (fit(planted({5: 2.0}, shared=raised), CPU).given for raised in (4.0, 0.0))
    assert useful[0] > 2 * WORDS[0]
    assert useless[0] < useful[0] / 2


def test_weights_are_logarithms_of_odds() -> None:
    """Of normal features with variance 1, raised by d at the evidence, the log odds are d times the value."""
    weights = fit(planted({5: 2.0}, trials=400), CPU).weights
    assert weights[5] == pytest.approx(2.0, abs=0.4)


def test_a_stronger_penalty_gives_smaller_weights() -> None:
    data = Data.of(planted({5: 2.0, 6: 1.0}), CPU)
    use = torch.ones(2, len(data.pair))
    weak, strong = minimise(data, use, torch.tensor([0.001, 0.1])).abs().sum(dim=1).tolist()
    assert strong < 0.8 * weak


def test_unseen_logits_do_not_depend_on_the_pair_they_are_for() -> None:
    trials = planted({5: 2.0}, trials=20)
    before = fit(trials, CPU)
    own = [index for index, trial in enumerate(trials) if before.fold_of[trial.pair] == 1]
    rng = np.random.default_rng(0)
    for index in own:
        other = rng.normal(size=trials[index].features.shape).astype(np.float32)
        trials[index] = replace(trials[index], features=other)
    after = fit(trials, CPU)
    assert after.fold_of == before.fold_of
    assert len(set(before.fold_of.values())) == fitting.FOLDS
    if after.penalty == before.penalty:
        assert np.array_equal(after.folds[1], before.folds[1])
    assert not np.array_equal(after.folds[0], before.folds[0])
    trial = trials[own[0]]
    expected = after.folds[1] @ np.concatenate([trial.features, trial.given])
    assert np.array_equal(after.unseen_logits(trial), expected)


@pytest.mark.parametrize("seed", range(5))
def test_a_thinned_trial_keeps_evidence_and_the_best_and_the_rest_stand_for_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    [trial] = planted({5: 1.0}, trials=1, passages=2, seed=seed)
    trial = replace(trial, blocks=np.arange(100, 140))
    logits = rng.normal(size=40)
    thin = trial.thinned(logits, best=5, others=7, seed=seed)
    chosen = thin.blocks - 100
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(np.argsort(-logits)[:5].tolist()) <= set(chosen.tolist())
    assert [[int(chosen[one]) for one in own] for own in thin.evidence] == [[*own] for own in trial.evidence]
    assert np.array_equal(thin.features, trial.features[:, chosen])
    assert np.array_equal(thin.given, trial.given[:, chosen])
    assert thin.total == trial.total == 40
    assert thin.thinned(logits[chosen], best=20, others=20, seed=0) is thin


def test_a_thinned_trial_has_the_loss_of_the_whole_on_average() -> None:
    [trial] = planted({5: 1.0}, trials=1)
    weights = torch.zeros(1, HEADS + 2)
    weights[0, 5] = 1.0
    whole = float(surprise(Data.of([trial], CPU), weights).exp())
    thin = [trial.thinned(trial.features[5], best=4, others=9, seed=seed) for seed in range(300)]
    assert float(surprise(Data.of(thin, CPU), weights).exp().mean()) == pytest.approx(whole, rel=0.02)


@given(st.integers(0, 1000), st.integers(1, 3))
def test_the_loss_equals_a_plain_softmax(seed: int, passages: int) -> None:
    """A prompt's other passages are left out, and so is padding."""
    trials = planted({2: 1.0}, trials=3, passages=passages, seed=seed)
    short = trials[1]
    keep = sorted({block for own in short.evidence for block in own} | set(range(0, 40, 3)))
    trials[1] = Trial(
        short.kind,
        short.pair,
        short.features[:, keep],
        short.given[:, keep],
        tuple(tuple(keep.index(block) for block in own) for own in short.evidence),
        np.array(keep),
    )
    weights = np.random.default_rng(seed).normal(size=HEADS + 2)
    found = surprise(Data.of(trials, CPU), torch.tensor(weights[None], dtype=torch.float32))[0].tolist()
    expected = []
    for trial in trials:
        logits = weights @ np.concatenate([trial.features, trial.given]) + np.array(WORDS) @ trial.given
        for own in trial.evidence:
            others = {block for other in trial.evidence if other != own for block in other}
            rest = [block for block in range(len(logits)) if block not in others]
            expected.append(math.log(sum(math.exp(logits[block]) for block in rest)) - logits[own[0]])
    assert found == pytest.approx(expected, abs=1e-4)


def test_kinds_count_alike_whatever_their_number_and_far_facts_twice() -> None:
    data = Data.of(planted({}, kinds=(Kind.SHARED, Kind.SHARED, Kind.SHARED, Kind.FAR)), CPU)
    far = [index % 4 == 3 for index in range(80)]
    share = data.weight / data.weight.sum()
    assert float(share[torch.tensor(far)].sum()) == pytest.approx(2 / 3)


def test_the_same_trials_give_the_same_weights() -> None:
    trials = planted({1: 1.0, 2: -1.0}, trials=20)
    one, other = fit(trials, CPU), fit(trials, CPU)
    assert (one.weights, one.given, one.loss) == (other.weights, other.given, other.loss)
    assert np.array_equal(one.folds, other.folds)


# Judging


def test_evidence_in_two_passages_has_the_rank_of_the_worse() -> None:
    trial = Trial(Kind.TWO, "", np.zeros((1, 4)), np.zeros((2, 4)), ((1,), (2,)), np.arange(4))
    assert rank_of(trial, np.array([0.3, 0.9, 0.1, 0.2])) == 3
    assert rank_of(trial, np.array([0.0, 0.9, 0.8, 0.2])) == 1


def test_a_passage_of_two_blocks_has_the_rank_of_the_better() -> None:
    trial = Trial(Kind.CODE, "", np.zeros((1, 4)), np.zeros((2, 4)), ((1, 2),), np.arange(4))
    assert rank_of(trial, np.array([0.3, 0.9, 0.1, 0.2])) == 0


def test_evidence_in_two_passages_is_first_if_no_other_block_is_before_it() -> None:
    logs = np.array([[0.1, 0.9, 0.8, 0.2], [0.85, 0.9, 0.8, 0.2]])
    trial = Trial(Kind.TWO, "", logs, np.zeros((2, 4)), ((1,), (2,)), np.arange(4))
    assert judge([trial], (1.0, 0.0), (0.0, 0.0))["two"]["first"] == 1.0
    assert judge([trial], (0.0, 1.0), (0.0, 0.0))["two"]["first"] == 0.0


# All together


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random model, and prompts that are short enough for it."""
    monkeypatch.setattr(drawing, "LENGTHS", (2000,))
    monkeypatch.setattr(drawing, "JUDGED", 2000)
    monkeypatch.setattr(fitting, "STEPS", 30)
    own = tokenizer(template=False)
    return SimpleNamespace(
        name="tiny", path=Path(), module=tiny.with_our_attention("llama"), tokenizer=own, layers=()
    )


def test_calibrating_is_reproducible(small: Any) -> None:
    told: list[tuple[int, int]] = []
    one, two = (
        calibrate(small, TEXT, name="tiny", trials=len(Kind), seed=3, progress=lambda *now: told.append(now))
        for _ in range(2)
    )
    assert one == two
    one.check_fits(layers=4, heads=4)
    assert one.model == "tiny"
    assert one.trials == len(Kind)
    assert one.layers[-1] <= 2  # half of four layers and one
    assert told[:14] == [(done, 14) for done in range(1, 15)]
    assert one.quality.keys() == set(Kind)
    assert all(figures.keys() == {"kept", "first", "bits", "trials"} for figures in one.quality.values())


def test_a_second_look_is_fitted_to_long_prompts_if_unseen_facts_become_likelier(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    monkeypatch.setattr(looks, "LEAST_PROMPTS", 5)
    told: list[tuple[int, int]] = []
    arguments = {"name": "tiny", "trials": len(Kind), "seed": 3}
    fits: list[Fitted] = []

    def kept(*given: Any) -> Fitted:
        fits.append(replace(fit(*given), before=before))
        return fits[-1]

    monkeypatch.setattr(looks, "fit", kept)
    before = math.inf  # whatever a random model finds, it is better
    found = calibrate(small, TEXT, **arguments, progress=lambda *now: told.append(now))
    assert told == [(done, 21) for done in range(1, 22)]
    assert found.second is not None
    found.check_fits(layers=4, heads=4)
    assert found.second.window == looks.WINDOW
    assert [one.weight for one in found.second.features] == [one for one in fits[0].weights if one]
    assert (found.second.first, *found.second.words, found.second.likelihood) == fits[0].given
    assert sum(figures["long"] for figures in found.quality.values()) == len(Kind)
    assert Calibration.from_json(found.to_json()) == found
    shown = "\n".join(summary(found))
    assert f"second look: {len(found.second.features)} features of" in shown
    assert "once, twice: all evidence in the best 24 blocks" in shown

    before = 0.0
    without = calibrate(small, TEXT, **arguments)
    assert without == replace(found, second=None, quality=without.quality)
    assert all("twice" not in figures for figures in without.quality.values())
    assert "second look: none" in "\n".join(summary(without))


def test_a_second_look_needs_enough_prompts() -> None:
    trial = planted({0: 3.0}, trials=1)[0]
    assert looks.fit_second([looks.Twice(trial, np.zeros(trial.columns), trial)] * 19, CPU) is None


def test_looks_are_judged_by_weights_that_have_not_seen_the_fact() -> None:
    columns = 40
    given = np.zeros((3, columns), dtype=np.float32)
    evidence = Trial(
        Kind.FAR, "a", np.eye(1, columns, 30, dtype=np.float32), given, ((30,),), np.arange(columns)
    )
    lost = replace(evidence, evidence=((),))
    logits = -np.arange(columns, dtype=float)  # evidence is the 31st block
    folds = np.array([[9.0, 0, 0, 0], [-9.0, 0, 0, 0]])
    fitted = Fitted([9.0], (0.0, 0.0, 0.0), 0.0, 1.0, 0.01, folds, {"a": 0, "b": 1})
    read = [
        looks.Twice(evidence, logits, evidence),
        looks.Twice(evidence, -logits, replace(evidence, pair="b")),
        looks.Twice(evidence, logits, lost),
    ]
    found = looks.judge_looks(read, fitted)
    assert found == {Kind.FAR: {"once": 0.333, "twice": 0.333, "long": 3}}


def test_the_loss_before_a_fit_is_that_of_the_prior_weights() -> None:
    trials = planted({1: 3.0}, trials=40)
    data = Data.of(trials, CPU)
    loss = surprise(data, torch.zeros(1, len(data.features)))[0].numpy()
    found = fit(trials, CPU)
    assert found.loss < found.before
    fold = np.array([found.fold_of[pair] for pair in data.pair])
    means = [np.average(loss[fold == one], weights=data.weight[fold == one]) for one in set(fold.tolist())]
    assert found.before == pytest.approx(np.mean(means), rel=1e-5)


def test_arguments_that_make_no_sense_are_refused(small: Any) -> None:
    with pytest.raises(ConfigError, match=r"^trials must be at least 7, one of each kind, got 6$"):
        calibrate(small, TEXT, name="m", trials=6)
    with pytest.raises(
        ConfigError, match=r"^text must have at least 20,000 characters, got 5; give a longer one$"
    ):
        calibrate(small, "short", name="m")
    with pytest.raises(ConfigError, match=r"^rounds must be at least 1, got 0$"):
        calibrate(small, TEXT, name="m", rounds=0)
    with pytest.raises(ConfigError, match="--layers must be 1 to 4, the layers of the model, got 5"):
        calibrate(small, TEXT, name="m", layers=5)
