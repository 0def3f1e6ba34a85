"""Calibrations: valid values, files, and the search for retrieval heads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from skim.errors import ConfigError
from skim.prefill import calibrate as finding
from skim.prefill.calibrate import Trial, calibrate, choose, hide, judge
from skim.prefill.pairs import Kind, load_pairs
from skim.prefill.scoring.calibration import Calibration, default_calibration, shipped
from tests import paths, tiny

TEXT = paths.BOOK


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_words(text: str) -> list[int]:
    return [sum(word.encode()) % 256 for word in text.split()]


def decode_words(runs: Sequence[np.ndarray]) -> list[str]:
    return [" ".join(f"w{token}" for token in run) for run in runs]


# Values


def test_heads_by_layer() -> None:
    calibration = Calibration((3, 7), ((3, 1), (7, 0), (7, 4)), (1.0, 0.3, 0.6))
    assert calibration.by_layer() == {3: (1,), 7: (0, 4)}
    assert Calibration((3, 7)).by_layer() == {3: None, 7: None}


@pytest.mark.parametrize(
    ("layers", "heads", "weights", "message"),
    [
        ((), None, None, "layers must be whole numbers of at least 0"),
        ((-1,), None, None, "layers must be whole numbers of at least 0"),
        ((1.5,), None, None, "layers must be whole numbers of at least 0"),
        ((2, 1), None, None, "layers must ascend"),
        ((1, 1), None, None, "layers must ascend"),
        ((1,), ((2, 0),), (1.0,), "of its layers"),
        ((1, 2), ((2, 0),), (1.0,), "of its layers"),
        ((1,), ((1,),), (1.0,), "pairs"),
        ((1,), ((1, -2),), (1.0,), "pairs"),
        ((1,), ((1, 2), (1, 2)), (1.0, 1.0), "heads must ascend, each once"),
        ((1,), ((1, 2), (1, 0)), (1.0, 1.0), "heads must ascend, each once"),  # weights are in their order
        ((1,), ((1, 2),), None, "both heads and weights"),
        ((1,), None, (1.0,), "both heads and weights"),
        ((1,), ((1, 2),), (1.0, 1.0), r"1 heads needs as many weights above 0, got \(1.0, 1.0\)"),
        ((1,), ((1, 2),), (0.0,), "as many weights above 0"),
        ((1,), ((1, 2),), (math.nan,), "as many weights above 0"),
        ((1,), ((1, 2),), (math.inf,), "as many weights above 0"),
    ],
)
def test_invalid_values_are_refused(layers: Any, heads: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Calibration(layers, heads, weights)


def test_it_must_fit_the_model() -> None:
    calibration = Calibration((3, 15), ((3, 1), (15, 6)), (1.0, 0.5), model="some-model")
    calibration.check_fits(layers=16, heads=7)
    for layers, heads in ((15, 7), (16, 6)):
        with pytest.raises(ConfigError, match=r"some-model names layer 15 and head 6.*calibrate this model"):
            calibration.check_fits(layers, heads)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 24, 30, 80])
def test_the_default_is_at_most_three_layers_that_end_a_quarter_of_the_way_up(layers: int) -> None:
    calibration = default_calibration(layers)
    calibration.check_fits(layers, 1)
    assert calibration.heads is None
    ran = calibration.layers[-1] + 1
    assert ran == math.ceil(layers / 4)
    assert calibration.layers == tuple(range(ran))[-3:]


def test_a_saved_calibration_can_be_read(tmp_path: Path) -> None:
    calibration = Calibration((1, 2), ((1, 3), (2, 0)), (0.36, 1.2), "m", 64, {"far": {"kept": 0.9}})
    calibration.save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == calibration
    Calibration((1,)).save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == Calibration((1,))
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*nothing.json"):
        Calibration.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("format"),
        lambda found: found.update(format="skim-calibration-1"),
        lambda found: found.pop("heads"),
        lambda found: found.update(more=1),
        lambda found: found.update(layers=7),
        lambda found: found.update(heads=[3]),
        lambda found: found.update(model=None),
        lambda found: found.update(trials="many"),
        lambda found: found.update(quality=[1]),
        lambda found: found.update(layers=["1"]),
        lambda found: found.update(weights=["much"]),
        lambda found: found.update(weights=[1.0]),
        lambda found: found.update(heads=[[1, 0]], weights=[-1.0]),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    found = json.loads(Calibration((1,)).to_json())
    change(found)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError):
        Calibration.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"damaged.json is not JSON.*calibrate again"):
        Calibration.load(path)


def test_the_shipped_calibration() -> None:
    calibration = shipped("smollm2-135m")
    assert calibration is not None
    calibration.check_fits(layers=30, heads=9)
    assert calibration.model == "smollm2-135m"
    assert calibration.heads is not None
    assert calibration.layers[-1] <= 17  # about half of the layers need not run
    assert calibration.trials > 0
    assert calibration.quality.keys() == set(Kind)
    for figures in calibration.quality.values():
        assert figures["kept"] > 0.3  # a random tenth of the blocks has all evidence in a tenth of the trials
    for name in ("some-other-model", "../calibration/smollm2-135m", "", "org/name"):
        assert shipped(name) is None


# Hiding facts


def test_facts_are_hidden_whole_and_their_evidence_is_where_it_is_said_to_be() -> None:
    for index, pair in enumerate(load_pairs()):
        tokens, question, evidence = hide(random.Random(index), TEXT, encode, 6000, pair)
        text = bytes(tokens).decode()
        assert question.stop == len(tokens)
        assert bytes(tokens[question.start :]).decode() == "\n\n" + pair.question
        assert 4000 < question.start <= 6000 + 4 * len(pair.passages)
        assert all(text.count(passage) == 1 for passage in pair.passages)
        for own, expected in zip(evidence, pair.evidence, strict=True):
            assert bytes(tokens[own.start : own.stop]).decode().strip() == expected.strip()


def test_a_passage_of_several_lines_is_a_paragraph() -> None:
    [pair] = [pair for pair in load_pairs() if pair.kind is Kind.CODE][:1]
    tokens, _, _ = hide(random.Random(0), TEXT, encode, 6000, pair)
    assert f"\n\n{pair.passages[0]}\n\n" in bytes(tokens).decode()


# Finding heads


HEADS = 4


def planted(
    good: dict[tuple[int, int], dict[Kind, float]],
    trials: int = 24,
    found_by_words: Mapping[Kind, float] = MappingProxyType({}),
) -> list[Trial]:
    """Trials of two kinds with random scores: 6 layers, 4 heads, 40 blocks.

    `good` has hit rates of heads, `found_by_words` the words' score of the evidence.
    """
    rng, made = random.Random(1), []
    for index in range(trials):
        kind = (Kind.SHARED, Kind.FAR)[index % 2]
        logs = np.random.default_rng(index).normal(size=(6 * HEADS, 40)).astype(np.float32)
        for (layer, head), often in good.items():
            if rng.random() < often.get(kind, 0.0):
                logs[layer * HEADS + head, index % 40] = 6.0
        words = np.zeros(40)
        words[index % 40] = found_by_words.get(kind, 0.0)
        made.append(Trial(kind, logs, words, ((index % 40,),)))
    return made


BOTH = {Kind.SHARED: 1.0, Kind.FAR: 1.0}


def test_the_head_that_retrieves_is_chosen() -> None:
    trials = planted({(3, 1): BOTH, (4, 2): {Kind.SHARED: 0.5, Kind.FAR: 0.5}})
    chosen = choose(trials, HEADS)
    assert chosen.keys() == {(3, 1)}
    assert judge(trials, HEADS, chosen) == {
        str(kind): {"kept": 1.0, "first": 1.0, "bits": 0.0, "trials": 12} for kind in (Kind.SHARED, Kind.FAR)
    }


def test_the_head_that_serves_the_worst_kind_is_preferred() -> None:
    """One head always finds repeated words and nothing else. The other is good at both kinds."""
    one_sided, fair = (2, 0), (4, 3)
    trials = planted({one_sided: {Kind.SHARED: 1.0}, fair: {Kind.SHARED: 0.8, Kind.FAR: 0.8}}, trials=60)
    weights = choose(trials, HEADS)
    assert fair in weights
    assert weights[fair] == max(weights.values())
    alone = judge(trials, HEADS, {one_sided: 1.0})
    assert min(figures["kept"] for figures in judge(trials, HEADS, weights).values()) > alone["far"]["kept"]


def test_heads_that_find_different_kinds_are_combined() -> None:
    trials = planted({(1, 0): {Kind.SHARED: 1.0}, (2, 2): {Kind.FAR: 1.0}})
    chosen = choose(trials, HEADS)
    assert {(1, 0), (2, 2)} <= chosen.keys()
    assert len(chosen) <= finding.MOST_HEADS
    assert list(chosen) == sorted(chosen)
    assert all(weight > 0 for weight in chosen.values())
    assert all(figures["kept"] == 1.0 for figures in judge(trials, HEADS, chosen).values())


def test_a_head_that_only_finds_the_words_of_the_question_is_not_chosen() -> None:
    repeated, other = (1, 0), (2, 2)
    trials = planted(
        {repeated: {Kind.SHARED: 1.0}, other: {Kind.FAR: 1.0}}, found_by_words={Kind.SHARED: 9.0}
    )
    assert choose(trials, HEADS).keys() == {other}


def test_of_equal_heads_the_one_in_the_earlier_layer_is_chosen() -> None:
    assert choose(planted({(1, 0): BOTH, (5, 3): BOTH}), HEADS).keys() == {(1, 0)}


def test_a_better_later_layer_is_worth_its_cost() -> None:
    some = {Kind.SHARED: 0.4, Kind.FAR: 0.4}
    assert (5, 3) in choose(planted({(1, 0): some, (5, 3): BOTH}), HEADS)


def test_the_scale_of_the_weights_says_how_certain_a_head_is() -> None:
    """The exponential of the weighted sum is a chance, so a head that is often wrong counts less."""
    [sure] = choose(planted({(3, 1): BOTH}, trials=60), HEADS).values()
    often = {Kind.SHARED: 0.7, Kind.FAR: 0.7}
    unsure = max(choose(planted({(3, 1): often}, trials=60), HEADS).values())
    assert unsure < sure


def test_the_same_trials_give_the_same_choice() -> None:
    often = {Kind.SHARED: 0.6, Kind.FAR: 0.3}
    trials = planted({(1, 0): often, (2, 2): often, (3, 3): often})
    assert choose(trials, HEADS) == choose(trials, HEADS)


def test_evidence_in_two_passages_has_the_rank_of_the_worse() -> None:
    trial = Trial(Kind.TWO, np.zeros((1, 4)), np.zeros(4), ((1,), (2,)))
    assert trial.ranks(np.array([0.3, 0.9, 0.1, 0.2])) == 3
    assert trial.ranks(np.array([[0.0, 0.9, 0.8, 0.2], [0.9, 0.5, 0.5, 0.1]])).tolist() == [1, 1]


def test_a_passage_of_two_blocks_has_the_rank_of_the_better() -> None:
    trial = Trial(Kind.CODE, np.zeros((1, 4)), np.zeros(4), ((1, 2),))
    assert trial.ranks(np.array([0.3, 0.9, 0.1, 0.2])) == 0


def test_evidence_in_two_passages_is_first_if_no_other_block_is_before_it() -> None:
    logs = np.array([[0.1, 0.9, 0.8, 0.2], [0.85, 0.9, 0.8, 0.2]])
    trial = Trial(Kind.TWO, logs, np.zeros(4), ((1,), (2,)))
    assert judge([trial], 2, {(0, 0): 1.0})["two"]["first"] == 1.0
    assert judge([trial], 2, {(0, 1): 1.0})["two"]["first"] == 0.0


def test_calibrating_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "LENGTH", 600)
    module = tiny.with_our_attention("llama")
    told: list[tuple[int, int]] = []
    one, two = (
        calibrate(
            module,
            encode_words,
            decode_words,
            TEXT,
            model="tiny",
            trials=len(Kind),
            seed=3,
            progress=lambda *now: told.append(now),
        )
        for _ in range(2)
    )
    assert one == two
    one.check_fits(layers=4, heads=4)
    assert one.model == "tiny"
    assert one.trials == len(Kind)
    assert told[:14] == [(done, 14) for done in range(1, 15)]
    assert one.quality.keys() == set(Kind)
    assert all(figures.keys() == {"kept", "first", "bits", "trials"} for figures in one.quality.values())


def test_too_few_trials_or_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 7 trials, one of each kind.* got 6 and"):
        calibrate(None, encode, decode_words, TEXT, model="m", trials=6)
    with pytest.raises(ConfigError, match="got None and 5"):
        calibrate(None, encode, decode_words, "short", model="m")
