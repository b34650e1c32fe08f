"""SPR: data-efficient reinforcement learning with self-predictive representations, in PyTorch.

From Python: `spr.train`, `spr.train_events`, `spr.load`, `spr.evaluate`, `spr.presets`, `spr.preset`, `spr.Config`, and
`spr.register_loss`, `register_encoder`, `register_preset`, `register_env` (docs/python.md).
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("spr")

if TYPE_CHECKING:
    from spr.agent import Agent, Observer, load
    from spr.api import Evaluation, TrainedRun, evaluate, presets, train, train_events
    from spr.aux_losses import register as register_loss
    from spr.config import Config
    from spr.encoders import register as register_encoder
    from spr.envs import register as register_env
    from spr.errors import UserError
    from spr.methods import preset_config as preset
    from spr.methods import register as register_preset

__all__ = [
    "Agent",
    "Config",
    "Evaluation",
    "Observer",
    "TrainedRun",
    "UserError",
    "evaluate",
    "load",
    "preset",
    "presets",
    "register_encoder",
    "register_env",
    "register_loss",
    "register_preset",
    "train",
    "train_events",
]

_HOMES = {
    "Agent": "spr.agent:Agent",
    "Observer": "spr.agent:Observer",
    "load": "spr.agent:load",
    "Evaluation": "spr.api:Evaluation",
    "TrainedRun": "spr.api:TrainedRun",
    "evaluate": "spr.api:evaluate",
    "presets": "spr.api:presets",
    "train": "spr.api:train",
    "train_events": "spr.api:train_events",
    "Config": "spr.config:Config",
    "UserError": "spr.errors:UserError",
    "preset": "spr.methods:preset_config",
    "register_preset": "spr.methods:register",
    "register_loss": "spr.aux_losses:register",
    "register_encoder": "spr.encoders:register",
    "register_env": "spr.envs:register",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: PyTorch alone takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'spr' has no attribute '{name}'")
    module, _, there = _HOMES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), there)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
