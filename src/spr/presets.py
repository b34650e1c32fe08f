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

PRESETS: Mapping[str, Preset] = {
    "spr": Preset("SPR with augmentation, the paper's main method", {}),
    "spr_noaug": Preset(
        "SPR without augmentation: dropout and an averaged target encoder instead",
        _NO_AUGMENTATION | {"network.dropout": 0.5, "learner.tau": 0.99},
    ),
    "rainbow": Preset("the controlled Rainbow baseline with augmentation, no SPR loss", _NO_SPR),
    "rainbow_noaug": Preset("the controlled Rainbow baseline without augmentation", _NO_SPR | _NO_AUGMENTATION),
}


def preset_config(name: str) -> Config:
    """Return the full configuration of a preset."""
    if name not in PRESETS:
        raise UserError(f"unknown preset '{name}'{did_you_mean(name, PRESETS) or '; there are ' + ', '.join(PRESETS)}")
    return Config().override(PRESETS[name].changes)
