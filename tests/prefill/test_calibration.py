"""Calibrations: valid values, files, and the search for retrieval heads."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.attention import hook
from skim.errors import ConfigError
from skim.prefill import calibrate as finding
from skim.prefill.calibrate import Trial, calibrate, choose, judge
from skim.prefill.needles import Wording, draw_needle, make_task
from skim.prefill.scoring.calibration import Calibration, default_calibration, shipped
from tests import tiny

TEXT = (resources.files("skim") / "data" / "moby-dick.txt").read_text(encoding="utf-8")


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_words(text: str) -> list[int]:
    return [sum(word.encode()) % 256 for word in text.split()]


# Values


def test_heads_by_layer() -> None:
    assert Calibration((3, 7), ((7, 4), (3, 1), (7, 0))).by_layer() == {3: (1,), 7: (0, 4)}
    assert Calibration((3, 7)).by_layer() == {3: None, 7: None}


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [
        ((), None, "whole numbers of at least 0"),
        ((-1,), None, "whole numbers of at least 0"),
        ((1.5,), None, "whole numbers of at least 0"),
        ((2, 1), None, "ascend"),
        ((1, 1), None, "ascend"),
        ((1,), ((2, 0),), "of its layers"),
        ((1, 2), ((2, 0),), "of its layers"),
        ((1,), ((1,),), "pairs"),
        ((1,), ((1, -2),), "pairs"),
        ((1,), ((1, 2), (1, 2)), "twice"),
    ],
)
def test_invalid_values_are_refused(layers: Any, heads: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Calibration(layers, heads)


def test_it_must_fit_the_model() -> None:
    calibration = Calibration((3, 15), ((3, 1), (15, 6)), model="some-model")
    calibration.check_fits(layers=16, heads=7)
    for layers, heads in ((15, 7), (16, 6)):
        with pytest.raises(ConfigError, match=r"some-model names layer 15 and head 6.*calibrate this model"):
            calibration.check_fits(layers, heads)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 24, 30, 80])
def test_the_default_is_at_most_three_layers_starting_at_the_middle(layers: int) -> None:
    calibration = default_calibration(layers)
    calibration.check_fits(layers, 1)
    assert calibration.heads is None
    assert calibration.layers[0] == layers // 2
    assert len(calibration.layers) <= 3


def test_a_saved_calibration_can_be_read(tmp_path: Path) -> None:
    calibration = Calibration((1, 2), ((1, 3), (2, 0)), "m", 64, {"chosen": {"rank1": 0.9}})
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
        lambda found: found.update(format="skim-calibration-0"),
        lambda found: found.pop("heads"),
        lambda found: found.update(more=1),
        lambda found: found.update(layers=7),
        lambda found: found.update(heads=[3]),
        lambda found: found.update(model=None),
        lambda found: found.update(trials="many"),
        lambda found: found.update(quality=[1]),
        lambda found: found.update(layers=["1"]),
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
    assert calibration.layers[-1] <= 17  # about half of the layers need not run
    quality = calibration.quality
    assert quality["chosen"]["top10"] > quality["max_over_all"]["top10"]
    for name in ("some-other-model", "../calibration/smollm2-135m", "", "org/name"):
        assert shipped(name) is None


# Needles


@pytest.mark.parametrize("wording", Wording)
@pytest.mark.parametrize("held_out", [False, True])
def test_the_answer_span_of_a_task_is_correct(wording: Wording, held_out: bool) -> None:
    for seed in range(5):
        needle = draw_needle(random.Random(seed), wording, held_out=held_out)
        task = make_task(random.Random(seed), TEXT, encode, 3000, wording, held_out=held_out)
        text = bytes(task.tokens).decode()
        assert bytes(task.tokens[task.answer.start : task.answer.stop]).decode() == " " + needle.answer
        assert needle.before.strip() + " " + needle.answer + needle.after in text
        assert task.question.stop == len(task.tokens)
        assert needle.question in bytes(task.tokens[task.question.start :]).decode()
        assert all(other in text for other in needle.others)
        assert len(needle.others) == (4 if wording is Wording.SIMILAR else 0)
        assert 2000 < task.question.start <= 3000


def test_held_out_facts_have_other_kinds() -> None:
    def seen(held_out: bool) -> set[str]:
        drawn = (
            draw_needle(random.Random(seed), wording, held_out=held_out)
            for seed in range(60)
            for wording in (Wording.PLAIN, Wording.DESCRIBED)
        )
        return {needle.question.split("Oslo")[0].split("Marta")[0] for needle in drawn}

    assert not seen(False) & seen(True)


# Finding heads


def planted(good: dict[tuple[int, int], float], trials: int = 24) -> list[Trial]:
    """Trials with random scores: 6 layers, 4 heads, 20 blocks. `good` has hit rates by (layer, head)."""
    rng = random.Random(1)
    made = []
    for index in range(trials):
        torch.manual_seed(index)
        scores = torch.rand(6, 4, 20)
        for (layer, head), often in good.items():
            if rng.random() < often:
                scores[layer, head, index % 20] = 2.0
        made.append(Trial(scores, (index % 20,)))
    return made


def test_the_head_that_retrieves_is_chosen() -> None:
    trials = planted({(3, 1): 1.0, (4, 2): 0.5})
    assert choose(trials) == ((3, 1),)
    quality = judge(trials, ((3, 1),))
    assert quality["chosen"] == {"rank1": 1.0, "top10": 1.0, "bits": 0.0, "trials": 24}
    assert quality["mean_over_all"]["rank1"] < 1.0


def test_of_equal_heads_the_one_in_the_earlier_layer_is_chosen() -> None:
    assert choose(planted({(1, 0): 1.0, (5, 3): 1.0})) == ((1, 0),)


def test_a_better_later_layer_is_worth_its_cost() -> None:
    assert choose(planted({(1, 0): 0.4, (5, 3): 1.0}))[-1] == (5, 3)


def test_an_answer_in_two_blocks_has_the_worse_rank() -> None:
    trial = Trial(torch.zeros(1, 1, 4), (1, 2))
    assert trial.ranks(torch.tensor([0.3, 0.9, 0.1, 0.2])).item() == 3.0
    assert trial.ranks(torch.tensor([0.0, 0.9, 0.8, 0.2])).item() == 1.0  # its other block does not count


def test_calibrating_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "LENGTH", 600)
    hook.register()
    module = tiny.build("llama")
    module.set_attn_implementation(hook.NAME)
    told: list[tuple[int, int]] = []
    one, two = (
        calibrate(
            module,
            encode_words,
            TEXT,
            model="tiny",
            trials=4,
            seed=3,
            progress=lambda *now: told.append(now),
        )
        for _ in range(2)
    )
    assert one == two
    one.check_fits(layers=4, heads=4)
    assert one.model == "tiny"
    assert one.trials == 4
    assert told[:6] == [(done, 6) for done in range(1, 7)]
    assert {"chosen", "max_over_all", "mean_over_all"} <= one.quality.keys()


def test_too_few_trials_or_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 trials and 20000 characters of text, got 2 and"):
        calibrate(None, encode, TEXT, model="m", trials=2)
    with pytest.raises(ConfigError, match="got 64 and 5"):
        calibrate(None, encode, "short", model="m")
