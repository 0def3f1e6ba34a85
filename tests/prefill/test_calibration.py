"""Calibrations: valid values and files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skim.errors import ConfigError
from skim.prefill.pairs import Kind
from skim.prefill.scoring.calibration import Calibration, Second, default_calibration, shipped
from skim.prefill.scoring.features import Capture, Feature, Statistic, captures_of, names_of, weights_of

MAX, MEAN, ZMAX, ZMEAN, ZCUBE = Statistic


def features(*heads: tuple[int, int], weight: float = 1.0) -> tuple[Feature, ...]:
    return tuple(Feature(MAX, layer, head, weight) for layer, head in heads)


def test_heads_to_capture_by_layer() -> None:
    calibration = Calibration(
        (3, 7),
        (
            Feature(ZMEAN, 7, 4, 0.3),
            Feature(MAX, 3, 1, 1.0),
            Feature(ZMAX, 7, 4, 0.3),
            Feature(MAX, 7, 4, -0.3),
            Feature(MEAN, 7, 0, 0.6),
            Feature(ZCUBE, 7, 2, 0.6),
        ),
        (0.1, 0.2),
    )
    captures = calibration.captures()
    assert captures == {3: Capture(most=(1,)), 7: Capture(most=(4,), mean=(0,), each=(2, 4))}
    assert captures[7].heads == (0, 2, 4)
    assert Calibration((3, 7)).captures() == {3: Capture(None), 7: Capture(None)}


def test_every_captured_statistic_has_its_weight_and_others_have_none() -> None:
    chosen = (Feature(ZMEAN, 7, 4, 0.3), Feature(MAX, 3, 1, -1.0))
    captures = captures_of(chosen)
    found = dict(zip(names_of(captures), weights_of(chosen, captures), strict=True))
    assert found == {(MAX, 3, 1): -1.0, (ZMAX, 7, 4): 0.0, (ZMEAN, 7, 4): 0.3, (ZCUBE, 7, 4): 0.0}


@pytest.mark.parametrize(
    ("layers", "chosen", "words", "message"),
    [
        ((), None, None, "layers must be whole numbers of at least 0"),
        ((-1,), None, None, "layers must be whole numbers of at least 0"),
        ((1.5,), None, None, "layers must be whole numbers of at least 0"),
        ((2, 1), None, None, "layers must ascend"),
        ((1, 1), None, None, "layers must ascend"),
        ((1,), features((2, 0)), (0.1, 0.2), "of its layers"),
        ((1, 2), features((2, 0)), (0.1, 0.2), "of its layers"),
        ((1,), features((1, -2)), (0.1, 0.2), "a layer and a head of at least 0"),
        ((1,), features((1, 2), (1, 2)), (0.1, 0.2), "each feature once"),
        ((1,), features((1, 2)), None, "both features and weights of words"),
        ((1,), None, (0.1, 0.2), "both features and weights of words"),
        ((1,), features((1, 2), weight=math.nan), (0.1, 0.2), "a finite weight"),
        ((1,), features((1, 2), weight=math.inf), (0.1, 0.2), "a finite weight"),
        ((1,), features((1, 2)), (0.1, math.nan), "two finite weights"),
    ],
)
def test_invalid_values_are_refused(layers: Any, chosen: Any, words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Calibration(layers, chosen, words)


def test_it_must_fit_the_model() -> None:
    calibration = Calibration((3, 15), features((3, 1), (15, 6)), (0.1, 0.2), model="some-model")
    calibration.check_fits(layers=16, heads=7)
    for layers, heads in ((15, 7), (16, 6)):
        with pytest.raises(ConfigError, match=r"some-model names layer 15 and head 6.*calibrate this model"):
            calibration.check_fits(layers, heads)


def test_the_second_look_must_fit_the_model_too() -> None:
    second = Second(features((20, 8)), 1.0, (0.0, 0.0), 128)
    calibration = Calibration((3,), features((3, 1)), (0.1, 0.2), "some-model", second=second)
    calibration.check_fits(layers=21, heads=9)
    for layers, heads in ((20, 9), (21, 8)):
        with pytest.raises(ConfigError, match=r"some-model names layer 20 and head 8.*calibrate this model"):
            calibration.check_fits(layers, heads)


@pytest.mark.parametrize(
    ("chosen", "first", "words", "window", "message"),
    [
        ((), 1.0, (0.0, 0.0), 128, "needs features and a window of at least 1 token, got 0 features and 128"),
        (features((1, 2)), 1.0, (0.0, 0.0), 0, "got 1 features and 0"),
        (features((1, 2)), math.nan, (0.0, 0.0), 128, "weights of a second look must be finite, got"),
        (features((1, 2)), 1.0, (0.0, math.inf), 128, "weights of a second look must be finite, got"),
        (features((1, 2), (1, 2)), 1.0, (0.0, 0.0), 128, "each feature once"),
        (features((1, 2), weight=math.nan), 1.0, (0.0, 0.0), 128, "a finite weight"),
    ],
)
def test_invalid_second_looks_are_refused(
    chosen: Any, first: float, words: Any, window: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Second(chosen, first, words, window)


def test_no_second_look_without_a_first_one() -> None:
    with pytest.raises(ConfigError, match="without features has no second look"):
        Calibration((1,), second=Second(features((1, 2)), 1.0, (0.0, 0.0), 128))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 24, 30, 80])
def test_the_default_is_at_most_three_layers_that_end_a_quarter_of_the_way_up(layers: int) -> None:
    calibration = default_calibration(layers)
    calibration.check_fits(layers, 1)
    assert calibration.features is None
    ran = calibration.layers[-1] + 1
    assert ran == math.ceil(layers / 4)
    assert calibration.layers == tuple(range(ran))[-3:]


def test_a_saved_calibration_can_be_read(tmp_path: Path) -> None:
    chosen = (Feature(ZCUBE, 1, 3, 0.36), Feature(MAX, 2, 0, -1.2))
    calibration = Calibration((1, 2), chosen, (-0.1, 0.2), "m", 64, {"far": {"kept": 0.9}})
    calibration.save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == calibration
    again = Second((Feature(MEAN, 9, 3, 0.25), Feature(MAX, 0, 0, -1.2)), 0.9, (-0.3, 0.4), 128)
    both = replace(calibration, second=again)
    both.save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == both
    Calibration((1,)).save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == Calibration((1,))
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*nothing.json"):
        Calibration.load(tmp_path / "nothing.json")


def test_a_file_of_the_format_before_second_looks_can_be_read() -> None:
    calibration = Calibration((1,), features((1, 2)), (0.1, 0.2), "m", 64, {"far": {"kept": 0.9}})
    found = json.loads(calibration.to_json())
    assert found["format"] == "skim-calibration-6"
    del found["second"]
    found["format"] = "skim-calibration-4"
    assert Calibration.from_json(json.dumps(found)) == calibration


@pytest.mark.parametrize("second", [None, Second(features((1, 2)), 1.0, (0.0, 0.0), 128)])
def test_a_file_of_the_format_before_likelihoods_can_be_read(second: Second | None) -> None:
    calibration = Calibration((1,), features((1, 2)), (0.1, 0.2), "m", 64, second=second)
    found = json.loads(calibration.to_json())
    if second is not None:
        del found["second"]["likelihood"]
    found["format"] = "skim-calibration-5"
    assert Calibration.from_json(json.dumps(found)) == calibration


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("format"),
        lambda found: found.update(format="skim-calibration-3"),
        lambda found: found.pop("features"),
        lambda found: found.update(more=1),
        lambda found: found.update(layers=7),
        lambda found: found.update(features=[3]),
        lambda found: found.update(features=[["max", 1, 0]]),
        lambda found: found.update(features=[["best", 1, 0, 1.0]]),
        lambda found: found.update(features=[["max", 1, 0, "much"]]),
        lambda found: found.update(features=[["max", 1, 0.5, 1.0]]),
        lambda found: found.update(features=[]),
        lambda found: found.update(words=[0.1]),
        lambda found: found.update(words=None),
        lambda found: found.update(words=["much", 1.0]),
        lambda found: found.update(model=None),
        lambda found: found.update(trials="many"),
        lambda found: found.update(quality=[1]),
        lambda found: found.update(second=7),
        lambda found: found.update(second={"features": [["max", 1, 1, 1.0]], "first": 1.0}),
        lambda found: found.update(layers=["1"]),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    found = json.loads(Calibration((1,), features((1, 0)), (0.1, 0.2)).to_json())
    change(found)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"damaged.json|a calibration"):
        Calibration.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"damaged.json is not JSON.*calibrate again"):
        Calibration.load(path)


def test_the_shipped_calibration() -> None:
    calibration = shipped("smollm2-135m")
    assert calibration is not None
    calibration.check_fits(layers=30, heads=9)
    assert calibration.model == "smollm2-135m"
    assert calibration.features is not None
    assert calibration.layers[-1] <= 15  # about half of the layers need not run
    assert any(feature.weight < 0 for feature in calibration.features)
    assert calibration.second is not None
    assert calibration.trials > 0
    assert calibration.quality.keys() > set(Kind)
    for figures in calibration.quality.values():
        assert figures["kept"] > 0.3  # a random tenth of the blocks has all evidence in a tenth of the trials
    for name in ("some-other-model", "../calibration/smollm2-135m", "", "org/name"):
        assert shipped(name) is None
