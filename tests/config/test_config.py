"""Configurations and presets: the defaults are the paper's table, and nonsense is refused by name."""

import json

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from spr.agent.augmentation import view_indices, views_of
from spr.agent.auxiliary_losses import check_names
from spr.common.errors import UserError
from spr.common.old_formats import current_preset
from spr.config.config import Config, fields, from_dict, parse_override
from spr.config.presets import PRESETS, preset_config

# The paper's table of hyper-parameters, with the names used here, and what the specification says of the parts.
PAPER = {
    "observation.height": 84,
    "observation.width": 84,
    "observation.channels": 1,
    "observation.stack": 4,
    "augment.shift": 4,
    "augment.crop_margin": 0,
    "augment.intensity": 0.05,
    "augment.rl": True,
    "network.encoder": "standard",
    "network.hidden": 256,
    "network.dueling": True,
    "network.noisy": True,
    "network.noisy_sigma0": 0.5,
    "network.atoms": 51,
    "network.v_min": -10,
    "network.v_max": 10,
    "network.dropout": 0,
    "network.projection": "head",
    "replay.capacity": 100_000,
    "replay.batch_size": 32,
    "replay.n_step": 10,
    "replay.n_step_end": 0,
    "replay.gamma": 0.99,
    "replay.gamma_end": 0,
    "replay.ends": "all",
    "replay.priority": "kl",
    "replay.priority_exponent": 0.5,
    "replay.beta_start": 0.4,
    "replay.beta_end": 1,
    "learner.rl_loss": "categorical",
    "learner.double_q": True,
    "learner.target_period": 1,
    "learner.aux_loss": "spr",
    "learner.aux_weight": 2,
    "learner.uniformity_weight": 0,
    "learner.depth": 5,
    "learner.model": True,
    "learner.ema_decay": 0,
    "learner.average": 0,
    "learner.stop_gradient": True,
    "learner.learning_rate": 1e-4,
    "learner.learning_rate_end": 0,
    "learner.adam_beta1": 0.9,
    "learner.adam_beta2": 0.999,
    "learner.adam_eps": 1.5e-4,
    "learner.weight_decay": 0,
    "learner.max_grad_norm": 10,
    "schedule.steps": 100_000,
    "schedule.learning_starts": 2_000,
    "schedule.updates_per_step": 2,
    "schedule.anneal_updates": 0,
    "schedule.epsilon_start": 0,
    "schedule.epsilon_end": 0,
    "schedule.epsilon_steps": 1,
    "reset.every": 0,
    "reset.keep": 1,
    "reset.redraw": "outputs",
    "evaluation.episodes": 100,
    "evaluation.epsilon": 0.001,
}
NO_AUGMENTATION = {"augment.shift": 0, "augment.intensity": 0}
NO_SPR = {"learner.aux_weight": 0, "learner.depth": 0}
NOAUG = NO_AUGMENTATION | {"network.dropout": 0.5, "learner.ema_decay": 0.99}
FEW = {"schedule.updates_per_step": 1, "schedule.learning_starts": 1_600}
DER = NO_SPR | NO_AUGMENTATION | FEW
DER |= {"network.encoder": "data_efficient", "network.noisy_sigma0": 0.1, "replay.n_step": 20}
DER |= {"learner.target_period": 2_000}
DRQ = NO_SPR | FEW | {"learner.rl_loss": "huber", "network.noisy": False, "replay.priority_exponent": 0}
DRQ |= {"schedule.epsilon_start": 1, "schedule.epsilon_steps": 5_000}


def ahead(depth):
    """As many targets as there may be weigh 10 together: the authors' mean with weight 5 of squared distances."""
    return {"learner.depth": depth, "learner.aux_weight": pytest.approx(10 / max(depth, 1))}


# Section 7 of the specification, row by row.
SR_SPR = {
    **{"network.noisy": False, "network.hidden": 512, "network.shared_hidden": True, "network.batch_norm": False},
    **{"network.initialisation": "xavier", "replay.beta_start": 0.5, "replay.beta_end": 0.5, "learner.average": 0.995},
    **{"learner.max_grad_norm": 0, "reset.every": 40_000, "reset.keep": 0.8, "reset.redraw": "head"},
    **{"schedule.epsilon_start": 1, "schedule.epsilon_end": 0, "schedule.epsilon_steps": 2_001},
}
BBF = SR_SPR | {
    **{"network.encoder": "impala", "network.width": 4, "network.hidden": 2_048, "learner.weight_decay": 0.1},
    **{"replay.n_step_end": 3, "replay.gamma": 0.97, "replay.gamma_end": 0.997, "reset.keep": 0.5},
    "schedule.anneal_updates": 10_000,
}
DIFFERENCES = {
    "spr": {},
    "spr_authors": {"replay.ends": "first"},
    "spr_noaug": NOAUG,
    "rainbow": NO_SPR,
    "rainbow_noaug": NO_SPR | NO_AUGMENTATION,
    "spr_1step": ahead(1),
    "spr_nontemporal": ahead(0),
    "spr_quadratic": {"learner.aux_loss": "quadratic"},
    "spr_noprojection": {"network.projection": "none"},
    "spr_nostopgrad": {"learner.stop_gradient": False},
    "spr_nostopgrad_noaug": NOAUG | {"learner.stop_gradient": False, "learner.ema_decay": 0},
    "contrastive_nontemporal": {"learner.aux_loss": "contrastive"} | ahead(0),
    "contrastive_1step": {"learner.aux_loss": "contrastive", "learner.model": False} | ahead(1),
    "contrastive_5step": {"learner.aux_loss": "contrastive", "learner.depth": 5},
    "spr_uniformity": {"learner.uniformity_weight": 5},
    "der": DER,
    "otrainbow": NO_SPR
    | NO_AUGMENTATION
    | {"network.noisy": False, "network.dueling": False, "learner.double_q": False, "replay.n_step": 3}
    | {"schedule.updates_per_step": 8, "schedule.learning_starts": 20_000, "learner.target_period": 500}
    | {"schedule.epsilon_start": 1, "schedule.epsilon_end": 0.01, "schedule.epsilon_steps": 50_000}
    | {"learner.learning_rate": 6.25e-5},
    "drq": DRQ | {"schedule.epsilon_end": 0.1, "evaluation.epsilon": 0.05},
    "drq_eps": DRQ | {"schedule.epsilon_end": 0.01, "evaluation.epsilon": 0.001},
    "spr_resets": {"reset.every": 40_000},
    "sr_spr": SR_SPR,
    "bbf": BBF,
    "bbf_rr8": BBF | {"schedule.updates_per_step": 8},
    "curl": DER
    | {"augment.shift": 4, "augment.crop_margin": 4, "augment.rl": False, "network.projection": "mlp"}
    | {"learner.aux_loss": "bilinear", "learner.aux_weight": 1, "learner.ema_decay": 0.999},
}
DIFFERENCES |= {f"spr_k{k}": ahead(k) for k in (1, 2, 3, 4, 5, 6, 8, 10)}
for tau in ("0.999", "0.9976", "0.9944", "0.9867", "0.9684", "0.925", "0.8222", "0.5783", "0"):
    DIFFERENCES[f"spr_ema_{tau}"] = {"learner.ema_decay": float(tau)}
    DIFFERENCES[f"spr_ema_{tau}_noaug"] = DIFFERENCES["spr_noaug"] | {"learner.ema_decay": float(tau)}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_the_paper(name):
    config = preset_config(name)
    for field, value in (PAPER | DIFFERENCES[name]).items():
        assert config.value(field) == value, field


def test_presets_that_were_renamed_are_named():
    assert current_preset("spr_tau_0.999_noaug") == "spr_ema_0.999_noaug"
    assert current_preset("spr") == "spr"
    with pytest.raises(UserError, match=r"'spr_tau_0.5783' is called 'spr_ema_0.5783' now"):
        preset_config("spr_tau_0.5783")


def test_there_are_no_presets_but_these():
    assert set(PRESETS) == set(DIFFERENCES)


def test_every_field_says_what_it_means():
    assert all(entry.meaning for entry in fields())


def test_curl_weighs_its_loss_less_on_four_games():
    assert preset_config("curl", "breakout").learner.aux_weight == 1
    for game in ("pong", "boxing", "private_eye", "freeway"):
        assert preset_config("curl", game).learner.aux_weight == 0.01


def test_the_views_an_update_sees():
    def seen(name):
        return [(view.role, view.offset, view.augmented, view.needs_grad) for view in views_of(preset_config(name))]

    targets = [("target", k, True, False) for k in (1, 2, 3, 4, 5)]
    assert seen("spr") == [("obs", 0, True, True), *targets, ("bootstrap", 10, True, False)]
    assert seen("rainbow") == [("obs", 0, True, True), ("bootstrap", 10, True, False)]
    assert [view.needs_grad for view in views_of(preset_config("spr_nostopgrad"))] == [True] * 6 + [False]
    both = [("obs", 0, False, True), ("anchor", 0, True, True)]
    assert seen("curl") == [*both, ("target", 0, True, False), ("bootstrap", 20, False, False)]
    assert view_indices(preset_config("spr")) == (0, 0, slice(1, 6), 6, 1)
    assert view_indices(preset_config("curl")) == (0, 1, slice(2, 3), 3, 2)
    assert view_indices(preset_config("spr_nostopgrad")) == (0, 0, slice(1, 6), 6, 6)
    assert view_indices(preset_config("rainbow")) == (0, 0, slice(1, 1), 1, 1)


def test_files_of_earlier_versions_are_read_by_their_names():
    old = {
        "augment": {"shift": 4, "crop": 80, "intensity": 0.0, "rl": False},
        "network": {"noise": 0.1},
        "replay": {"batch": 16, "exponent": 0.25},
        "learner": {"value": "huber", "double": False, "representation": "bilinear", "spr_weight": 1.0}
        | {"tau": 0.999, "clip": 5.0, "depth": 0},
        "schedule": {"random_steps": 1_600},
    }
    config = from_dict(old)
    names = ["network.noisy_sigma0", "replay.batch_size", "replay.priority_exponent", "learner.rl_loss"]
    names += ["learner.double_q", "learner.aux_loss", "learner.aux_weight", "learner.ema_decay"]
    names += ["learner.max_grad_norm", "schedule.learning_starts", "augment.crop_margin"]
    expected = [0.1, 16, 0.25, "huber", False, "bilinear", 1.0, 0.999, 5.0, 1_600, 4]
    assert [config.value(name) for name in names] == expected
    with pytest.raises(UserError, match=r"replay.batch_size twice"):
        from_dict({"replay": {"batch": 16, "batch_size": 16}})


def test_every_result_in_this_repository_is_read_as_its_preset():
    files = sorted((ROOT / "results" / "earlier" / "spr").rglob("result.json"))
    assert len(files) >= 40
    for file in files:
        data = json.loads(file.read_text())
        assert from_dict(data["config"]) == preset_config(data["preset"], data["game"]), file


def test_round_trip_through_json():
    config = preset_config("curl").override({"schedule.steps": 5000, "learner.ema_decay": 0})
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner.dept": 3}, "unknown configuration field 'learner.dept'; did you mean 'learner.depth'"),
        ({"nonsense": 3}, "unknown configuration field 'nonsense'; 'spr presets spr' lists them all"),
        ({"learner.depth": 2.5}, "learner.depth takes a whole number"),
        ({"learner.depth": True}, "learner.depth takes a whole number"),
        ({"learner.ema_decay": "0.9"}, "learner.ema_decay takes a number"),
        ({"learner.ema_decay": 1.5}, "learner.ema_decay must be between 0 and 1, not 1.5"),
        ({"learner.ema_decay": float("nan")}, "learner.ema_decay must be between"),
        ({"schedule.steps": 0}, "schedule.steps must be between 1 and"),
        ({"schedule.steps": -5}, "schedule.steps must be between 1 and"),
        ({"schedule.steps": 2000}, "learning starts only after 2000 random steps"),
        ({"network.dueling": 1}, "network.dueling takes true or false"),
        ({"network.encoder": 3}, "network.encoder takes a name"),
        (
            {"learner.aux_loss": "contrastive", "learner.model": False},
            "learner.depth above 1 needs a transition model",
        ),
        ({"learner.stop_gradient": False, "learner.ema_decay": 0.9}, "set learner.ema_decay=0"),
        ({"learner.stop_gradient": False, "learner.average": 0.9}, "set learner.average=0"),
        ({"learner.average": 0.995, "learner.ema_decay": 0.9}, "set learner.ema_decay=0"),
        ({"learner.average": 0.995, "learner.target_period": 9}, "set learner.target_period=1"),
        ({"augment.rl": False}, "set learner.depth=0"),
        ({"reset.every": 1}, "reset.every=1 is less than one environment step's 2 updates: set it to 2 or more"),
        ({"reset.every": 9, "schedule.updates_per_step": 0}, "set schedule.updates_per_step above 0"),
        ({"reset.keep": 1.5}, "reset.keep must be between 0 and 1, not 1.5"),
        ({"reset.redraw": "all"}, "reset.redraw must be one of outputs, head, not 'all'"),
        ({"learner.rl_loss": "huber", "replay.priority": "cross_entropy"}, "set replay.priority=kl"),
        ({"learner.aux_weight": 0, "learner.uniformity_weight": 1}, "set learner.aux_weight above 0"),
        ({"augment.crop_margin": 9}, "set augment.shift to at least 5"),
        ({"observation.height": 40, "augment.shift": 40}, "smaller than a frame's side, 40"),
        ({"observation.height": 30}, "too small for this encoder"),
        ({"learner.tau": 0.5}, "learner.tau is called learner.ema_decay now"),
        ({"network.v_min": 10.0}, "network.v_min must be smaller"),
        ({"replay.capacity": 40}, "to fill a first batch"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        check_names(Config().override(changes))


@pytest.mark.parametrize(
    "text", ["learner.depth", "learner.depth=x", "learner.depht=3", "=3", "network.noisy=perhaps", "learner.depth=true"]
)
def test_bad_override_texts(text):
    with pytest.raises(UserError):
        parse_override(text)


def test_override_texts_take_their_fields_type():
    assert parse_override("learner.ema_decay=1") == ("learner.ema_decay", 1.0)
    assert parse_override("learner.depth=3") == ("learner.depth", 3)
    assert parse_override("network.noisy=off") == ("network.noisy", False)
    assert parse_override("network.encoder=data_efficient") == ("network.encoder", "data_efficient")


def values(entry):
    """Everything that a field may be."""
    if entry.kind is bool:
        return st.booleans()
    if entry.kind is str:
        return st.sampled_from(entry.names() or ("spr", "my own"))
    if entry.kind is int:
        return st.integers(int(entry.low), int(entry.high))
    return st.floats(entry.low, entry.high)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_configuration_that_is_valid_survives_saving_and_loading(data):
    chosen = data.draw(st.lists(st.sampled_from(fields()), unique=True, max_size=8))
    changes = {entry.name: data.draw(values(entry), label=entry.name) for entry in chosen}
    try:
        config = Config().override(changes)
    except UserError:
        return  # an impossible combination
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
