"""Owns what is different in files of versions before 0.16: old names, and how such files are read.

Whoever reads a file of a run asks here, and knows the formats of this version only.
"""

import json
import math
from collections.abc import Mapping
from typing import IO, Any

from spr.common.errors import UnusableError

# Configurations of 0.6 and 0.7: their fields, under the names of now.
_FIELDS = {
    "network.noise": "network.noisy_sigma0",
    "replay.batch": "replay.batch_size",
    "replay.exponent": "replay.priority_exponent",
    "learner.value": "learner.rl_loss",
    "learner.double": "learner.double_q",
    "learner.representation": "learner.aux_loss",
    "learner.spr_weight": "learner.aux_weight",
    "learner.tau": "learner.ema_decay",
    "learner.clip": "learner.max_grad_norm",
    "schedule.random_steps": "schedule.learning_starts",
}
_CROP, _SIDE = "augment.crop", 84  # a crop was given by its side, in frames of this size
# Presets up to 0.7: how the names of those in the figure of target encoders began, and begin now.
_TAU, _EMA = "spr_tau_", "spr_ema_"
# Runs up to 0.7: files of a run that has diverged, by what they are called now.
DIVERGED = {"diverged.json": "fault.json", "diverged.safetensors": "fault.spr"}
# Checkpoints up to 0.7: safetensors behind two lines of their own, with other names for some tensors.
CHECKPOINT_SUFFIX = ".spr"
_MAGIC = b"SPR checkpoint\n"
_TENSORS = {"averaged": "ema", "copied": "target", "watched": "metrics", "watched_updates": "metrics_updates"}


def current_field(name: str, value: Any) -> tuple[str, Any]:
    """Return a field of a file as it is now: its name and its value."""
    if name == _CROP and isinstance(value, int):
        return "augment.crop_margin", _SIDE - value
    return _FIELDS.get(name, name), value


def field_renamed(name: str) -> str | None:
    """Say what has become of a field that a user names as it was once called; None for any other."""
    if name == _CROP:
        return "augment.crop is given by augment.crop_margin now: how much smaller than a frame it is"
    return f"{name} is called {_FIELDS[name]} now" if name in _FIELDS else None


def current_preset(name: str) -> str:
    """Return the present name of a preset."""
    return name.replace(_TAU, _EMA, 1) if name.startswith(_TAU) else name


def current_tensor(name: str) -> str:
    """Return what a tensor of an old checkpoint is called now."""
    return _TENSORS.get(name, name)


def old_tensor(name: str) -> str:
    """Return what a tensor is called in an old checkpoint."""
    return next((old for old, now in _TENSORS.items() if now == name), name)


def checkpoint_checksum(file: IO[bytes]) -> str:
    """Skip the lines before the safetensors of an old checkpoint, and return the checksum they give."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise UnusableError("it is not a checkpoint")
    try:
        return str(json.loads(file.readline(4096))["sha256"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise UnusableError("its first lines are damaged") from error


def finite_or_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics with null for what is not finite: versions up to 0.10 wrote NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
