"""Owns the methods by name: each is a difference from the default configuration, data and nothing else."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from spr.common.errors import UserError, did_you_mean
from spr.common.old_formats import current_preset
from spr.config.config import Config, Value
from spr.envs.atari100k import game_names

Changes = dict[str, Value]


class Preset(NamedTuple):
    """A named method: one line about it, the fields in which it differs from `spr`, and what some games differ by."""

    summary: str
    changes: Changes
    by_game: Mapping[str, Changes] = {}
    figure: str = ""  # of the paper that it is a point of: "depth", "ema" or "ema_noaug"
    x: float = 0.0  # its place there


_NO_AUGMENTATION: Changes = {"augment.shift": 0, "augment.intensity": 0.0}
_NO_SPR: Changes = {"learner.aux_weight": 0.0, "learner.depth": 0}
_NO_STOP: Changes = {"learner.stop_gradient": False, "learner.ema_decay": 0.0}
_SPR_NOAUG: Changes = _NO_AUGMENTATION | {"network.dropout": 0.5, "learner.ema_decay": 0.99}
_AUTHORS: Changes = {"replay.ends": "first"}
_CONTRASTIVE: Changes = {"learner.aux_loss": "contrastive"}


def _ahead(depth: int) -> Changes:
    """Predict so many steps, which together weigh as much as the five of `spr`: a mean, as in the authors' code.

    Else "deeper is better" would partly mean "more weight is better".
    """
    return {"learner.depth": depth, "learner.aux_weight": 10 / max(depth, 1)}


_DER: Changes = (
    _NO_SPR
    | _NO_AUGMENTATION
    | {
        "network.encoder": "data_efficient",
        "network.noisy_sigma0": 0.1,
        "replay.n_step": 20,
        "learner.target_period": 2_000,
        "schedule.learning_starts": 1_600,
        "schedule.updates_per_step": 1,
    }
)
_OTRAINBOW: Changes = (
    _NO_SPR
    | _NO_AUGMENTATION
    | {
        "network.noisy": False,
        "network.dueling": False,
        "replay.n_step": 3,
        "learner.double_q": False,
        "learner.target_period": 500,
        "learner.learning_rate": 6.25e-5,
        "schedule.learning_starts": 20_000,
        "schedule.updates_per_step": 8,
        "schedule.epsilon_start": 1.0,
        "schedule.epsilon_end": 0.01,
        "schedule.epsilon_steps": 50_000,
    }
)
_DRQ: Changes = _NO_SPR | {
    "network.noisy": False,
    "replay.priority_exponent": 0.0,  # every priority is 1: uniform replay
    "learner.rl_loss": "huber",
    "schedule.learning_starts": 1_600,
    "schedule.updates_per_step": 1,
    "schedule.epsilon_start": 1.0,
    "schedule.epsilon_end": 0.1,
    "schedule.epsilon_steps": 5_000,
    "evaluation.epsilon": 0.05,
}
_CURL: Changes = _DER | {
    "augment.shift": 4,
    "augment.crop_margin": 4,
    "augment.rl": False,
    "network.projection": "mlp",
    "learner.aux_loss": "bilinear",
    "learner.aux_weight": 1.0,
    "learner.ema_decay": 0.999,
}
_SPR_RESETS: Changes = {"reset.every": 40_000}
_SR_SPR: Changes = {
    "network.hidden": 512,
    "network.shared_hidden": True,
    "network.noisy": False,
    "network.batch_norm": False,
    "network.initialisation": "xavier",
    "replay.beta_start": 0.5,
    "replay.beta_end": 0.5,
    "learner.average": 0.995,
    "learner.max_grad_norm": 0.0,
    "schedule.epsilon_start": 1.0,
    "schedule.epsilon_end": 0.0,
    "schedule.epsilon_steps": 2_001,
    "reset.every": 40_000,
    "reset.keep": 0.8,
    "reset.redraw": "head",
}
_BBF: Changes = {
    **_SR_SPR,
    "network.encoder": "impala",
    "network.width": 4,
    "network.hidden": 2_048,
    "replay.n_step_end": 3,
    "replay.gamma": 0.97,
    "replay.gamma_end": 0.997,
    "schedule.anneal_updates": 10_000,
    "learner.weight_decay": 0.1,
    "reset.keep": 0.5,
}
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)
_TAUS = (0.999, 0.9976, 0.9944, 0.9867, 0.9684, 0.925, 0.8222, 0.5783, 0.0)

_METHODS: Mapping[str, Preset] = {
    "spr": Preset("SPR with augmentation, the paper's main method", {}),
    "spr_authors": Preset("SPR with the released code's n-step target: hardly any end cuts it", _AUTHORS),
    "spr_noaug": Preset("SPR without augmentation: dropout and an averaged target encoder instead", _SPR_NOAUG),
    "rainbow": Preset("the controlled Rainbow baseline with augmentation, no SPR loss", _NO_SPR),
    "rainbow_noaug": Preset("the controlled Rainbow baseline without augmentation", _NO_SPR | _NO_AUGMENTATION),
    "der": Preset("Data-Efficient Rainbow (van Hasselt et al. 2019)", _DER),
    "otrainbow": Preset("Overtrained Rainbow (Kielak 2020)", _OTRAINBOW),
    "drq": Preset("DrQ: plain Q-learning on augmented images (Kostrikov et al. 2021)", _DRQ),
    "drq_eps": Preset(
        "DrQ with the lower epsilons of Agarwal et al. 2021",
        _DRQ | {"schedule.epsilon_end": 0.01, "evaluation.epsilon": 0.001},
    ),
    "curl": Preset(
        "CURL: Data-Efficient Rainbow with a contrastive loss between crops (Laskin et al. 2020)",
        _CURL,
        {game: {"learner.aux_weight": 0.01} for game in ("pong", "boxing", "private_eye", "freeway")},
    ),
    "spr_resets": Preset(
        "SPR whose output layers are re-initialised every 40,000 updates (Nikishin et al. 2022)", _SPR_RESETS
    ),
    "sr_spr": Preset(
        "SR-SPR: an averaged network that acts, and resets of everything (D'Oro et al. 2023); two updates per step",
        _SR_SPR,
    ),
    "bbf": Preset(
        "BBF: SR-SPR with a wide Impala encoder, and returns that shorten after each reset (Schwarzer et al. 2023)",
        _BBF,
    ),
    "bbf_rr8": Preset("BBF with eight updates per step", _BBF | {"schedule.updates_per_step": 8}),
    "spr_1step": Preset("SPR that predicts a single step ahead", _ahead(1)),
    "spr_nontemporal": Preset("SPR between two views of the same state, without a transition model", _ahead(0)),
    "spr_quadratic": Preset("SPR with squared distances instead of cosines", {"learner.aux_loss": "quadratic"}),
    "spr_noprojection": Preset(
        "SPR on the latents themselves: no projection, no predictor", {"network.projection": "none"}
    ),
    "spr_nostopgrad": Preset("SPR whose gradients flow into the targets", _NO_STOP),
    "spr_nostopgrad_noaug": Preset("the same without augmentation", _SPR_NOAUG | _NO_STOP),
    "contrastive_nontemporal": Preset(
        "InfoNCE between two views of the same state, instead of SPR", _CONTRASTIVE | _ahead(0)
    ),
    "contrastive_1step": Preset(
        "InfoNCE with the next state, without a transition model",
        _CONTRASTIVE | _ahead(1) | {"learner.model": False},
    ),
    "contrastive_5step": Preset("InfoNCE on the transition model's five predictions", _CONTRASTIVE),
    "spr_uniformity": Preset(
        "SPR with a loss that spreads projections over the sphere", {"learner.uniformity_weight": 5.0}
    ),
}
_DEPTH_FIGURE = {
    f"spr_k{k}": Preset(f"depth figure: SPR that predicts {k} ahead", _ahead(k), figure="depth", x=k) for k in _DEPTHS
}
_WITH_AND_WITHOUT: tuple[tuple[str, str, Changes], ...] = (
    ("", "", {}),
    ("_noaug", ", without augmentation", _SPR_NOAUG),
)
_EMA_FIGURE = {
    f"spr_ema_{tau:g}{suffix}": Preset(
        f"target-encoder figure: tau {tau:g}{words}",
        changes | {"learner.ema_decay": tau},
        figure=f"ema{suffix}",
        x=tau,
    )
    for suffix, words, changes in _WITH_AND_WITHOUT
    for tau in _TAUS
}

_presets = {**_METHODS, **_DEPTH_FIGURE, **_EMA_FIGURE}
PRESETS: Mapping[str, Preset] = _presets


def register(
    name: str, summary: str, changes: Changes, by_game: Mapping[str, Changes] | None = None, like: str = "spr"
) -> None:
    """Register a custom method as `--preset NAME`: the fields in which it differs from another one."""
    if name in _presets:
        raise UserError(f"a preset named '{name}' is there already: choose another name")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"a preset's name is made of letters, digits and . _ -, not '{name}'")
    whole = _known(like).changes | changes
    Config().override(whole)  # refuses what can't be
    _presets[name] = Preset(summary, whole, by_game or {})


def _known(name: str) -> Preset:
    if name not in PRESETS and current_preset(name) in PRESETS:
        raise UserError(f"preset '{name}' is called '{current_preset(name)}' now")
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "; 'spr presets' lists them"
        raise UserError(f"unknown preset '{name}'{hint}")
    return PRESETS[name]


def preset_config(name: str, game: str | None = None) -> Config:
    """Return the full configuration of a preset, as it is for most games or for the given one."""
    preset = _known(name)
    return Config().override({**preset.changes, **preset.by_game.get(game or "", {})})


# The benchmark's, not the method's.
PROTOCOL_FIELDS = ("schedule.steps", "evaluation.episodes", "evaluation.epsilon", "evaluation.max_steps")


def is_atari_100k(preset: str, game: str, config: Config) -> bool:
    """Say whether a configuration follows Atari 100k: its games, budget, observations and evaluation.

    A method may prescribe its own epsilon in evaluation, as DrQ does; any other difference is another protocol.
    """
    usual = preset_config(preset, game) if preset in PRESETS else Config()
    as_usual = all(config.value(name) == usual.value(name) for name in PROTOCOL_FIELDS)
    return as_usual and game in game_names() and config.observation == usual.observation
