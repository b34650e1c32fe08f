"""Owns the methods by name: each is a difference from the default configuration, data and nothing else."""

from collections.abc import Mapping
from typing import NamedTuple

from spr.config import Config
from spr.errors import UserError, did_you_mean


class Preset(NamedTuple):
    """A named method: one line about it, and the fields in which it differs from `spr`."""

    summary: str
    changes: Mapping[str, int | float]


_NO_AUGMENTATION = {"augment.shift": 0, "augment.intensity": 0.0}
_NO_SPR = {"learner.spr_weight": 0.0, "learner.depth": 0}

_SPR_NOAUG = _NO_AUGMENTATION | {"network.dropout": 0.5, "learner.tau": 0.99}
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)
_TAUS = (0.999, 0.9976, 0.9944, 0.9867, 0.9684, 0.925, 0.8222, 0.5783, 0.0)

_METHODS: Mapping[str, Preset] = {
    "spr": Preset("SPR with augmentation, the paper's main method", {}),
    "spr_noaug": Preset("SPR without augmentation: dropout and an averaged target encoder instead", _SPR_NOAUG),
    "rainbow": Preset("the controlled Rainbow baseline with augmentation, no SPR loss", _NO_SPR),
    "rainbow_noaug": Preset("the controlled Rainbow baseline without augmentation", _NO_SPR | _NO_AUGMENTATION),
    "spr_1step": Preset("SPR that predicts a single step ahead", {"learner.depth": 1}),
}
_DEPTH_FIGURE = {
    f"spr_k{k}": Preset(f"depth figure: SPR that predicts {k} ahead", {"learner.depth": k}) for k in _DEPTHS
}
_EMA_FIGURE = {
    f"spr_tau_{tau:g}{suffix}": Preset(f"target-encoder figure: tau {tau:g}{words}", changes | {"learner.tau": tau})
    for suffix, words, changes in (("", "", {}), ("_noaug", ", without augmentation", _SPR_NOAUG))
    for tau in _TAUS
}

PRESETS: Mapping[str, Preset] = {**_METHODS, **_DEPTH_FIGURE, **_EMA_FIGURE}


def preset_config(name: str) -> Config:
    """Return the full configuration of a preset."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "; 'spr presets' lists them"
        raise UserError(f"unknown preset '{name}'{hint}")
    return Config().override(PRESETS[name].changes)
