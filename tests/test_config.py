"""Configurations and presets: the defaults are the paper's table, and nonsense is refused by name."""

import json

import pytest

from spr.config import Config, fields, from_dict, parse_override
from spr.errors import UserError
from spr.presets import PRESETS, preset_config

# The paper's table of hyper-parameters, with the names used here.
PAPER = {
    "augment.shift": 4,
    "augment.intensity": 0.05,
    "network.hidden": 256,
    "network.atoms": 51,
    "network.noise": 0.5,
    "network.dropout": 0,
    "replay.capacity": 100_000,
    "replay.batch": 32,
    "replay.n_step": 10,
    "replay.gamma": 0.99,
    "replay.exponent": 0.5,
    "replay.beta_start": 0.4,
    "replay.beta_end": 1,
    "learner.depth": 5,
    "learner.spr_weight": 2,
    "learner.tau": 0,
    "learner.learning_rate": 1e-4,
    "learner.adam_beta1": 0.9,
    "learner.adam_beta2": 0.999,
    "learner.adam_eps": 1.5e-4,
    "learner.clip": 10,
    "schedule.steps": 100_000,
    "schedule.random_steps": 2_000,
    "schedule.updates_per_step": 2,
    "evaluation.episodes": 100,
    "evaluation.epsilon": 0.001,
}
NO_AUGMENTATION = {"augment.shift": 0, "augment.intensity": 0}
NO_SPR = {"learner.spr_weight": 0, "learner.depth": 0}
DIFFERENCES = {
    "spr": {},
    "spr_noaug": NO_AUGMENTATION | {"network.dropout": 0.5, "learner.tau": 0.99},
    "rainbow": NO_SPR,
    "rainbow_noaug": NO_SPR | NO_AUGMENTATION,
    "spr_1step": {"learner.depth": 1},
}
DIFFERENCES |= {f"spr_k{k}": {"learner.depth": k} for k in (1, 2, 3, 4, 5, 6, 8, 10)}
for tau in ("0.999", "0.9976", "0.9944", "0.9867", "0.9684", "0.925", "0.8222", "0.5783", "0"):
    DIFFERENCES[f"spr_tau_{tau}"] = {"learner.tau": float(tau)}
    DIFFERENCES[f"spr_tau_{tau}_noaug"] = DIFFERENCES["spr_noaug"] | {"learner.tau": float(tau)}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_the_paper(name):
    config = preset_config(name)
    for field, value in (PAPER | DIFFERENCES[name]).items():
        assert config.value(field) == value, field


def test_there_are_no_presets_but_these():
    assert set(PRESETS) == set(DIFFERENCES)


def test_every_field_but_the_support_is_in_the_papers_table():
    assert {entry.name for entry in fields()} - set(PAPER) == {"network.v_min", "network.v_max"}
    assert all(entry.meaning for entry in fields())


def test_round_trip_through_json():
    config = preset_config("spr_noaug").override({"schedule.steps": 5000, "learner.tau": 0})
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner.dept": 3}, "unknown configuration field 'learner.dept'; did you mean 'learner.depth'"),
        ({"nonsense": 3}, "unknown configuration field 'nonsense'"),
        ({"learner.depth": 2.5}, "learner.depth takes a whole number"),
        ({"learner.depth": True}, "learner.depth takes a whole number"),
        ({"learner.tau": "0.9"}, "learner.tau takes a number"),
        ({"learner.tau": 1.5}, "learner.tau must be between 0 and 1, not 1.5"),
        ({"learner.tau": float("nan")}, "learner.tau must be between"),
        ({"schedule.steps": 0}, "schedule.steps must be between 1 and"),
        ({"schedule.steps": -5}, "schedule.steps must be between 1 and"),
        ({"schedule.steps": 2000}, "learning starts only after 2000 random steps"),
        ({"learner.depth": 0}, "learner.depth must be at least 1"),
        ({"network.v_min": 10.0}, "network.v_min must be smaller"),
        ({"replay.capacity": 40}, "to fill a first batch"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        Config().override(changes)


@pytest.mark.parametrize("text", ["learner.depth", "learner.depth=x", "learner.depht=3", "=3"])
def test_bad_override_texts(text):
    with pytest.raises(UserError):
        parse_override(text)


def test_override_texts_take_their_fields_type():
    assert parse_override("learner.tau=1") == ("learner.tau", 1.0)
    assert parse_override("learner.depth=3") == ("learner.depth", 3)
