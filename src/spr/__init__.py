"""SPR: data-efficient reinforcement learning with self-predictive representations, in PyTorch.

From Python: `spr.train`, `spr.train_events`, `spr.load`, `spr.evaluate`, `spr.presets`, `spr.preset`, `spr.Config`, and
`spr.register_loss`, `register_encoder`, `register_preset`, `register_env` (docs/guide/python.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spr.common import old_paths, threads
from spr.common.version import __version__ as __version__

old_paths.install()
threads.set_wait_policy()

if TYPE_CHECKING:
    from spr.agent.auxiliary_losses import register as register_loss
    from spr.agent.encoders import register as register_encoder
    from spr.api import Evaluation, TrainedRun, evaluate, presets, train, train_events
    from spr.common.errors import UserError
    from spr.config.config import Config
    from spr.config.presets import preset_config as preset
    from spr.config.presets import register as register_preset
    from spr.envs.registry import register as register_env
    from spr.trained_agent import Agent, Observer, load

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
    "Agent": "spr.trained_agent:Agent",
    "Observer": "spr.trained_agent:Observer",
    "load": "spr.trained_agent:load",
    "Evaluation": "spr.api:Evaluation",
    "TrainedRun": "spr.api:TrainedRun",
    "evaluate": "spr.api:evaluate",
    "presets": "spr.api:presets",
    "train": "spr.api:train",
    "train_events": "spr.api:train_events",
    "Config": "spr.config.config:Config",
    "UserError": "spr.common.errors:UserError",
    "preset": "spr.config.presets:preset_config",
    "register_preset": "spr.config.presets:register",
    "register_loss": "spr.agent.auxiliary_losses:register",
    "register_encoder": "spr.agent.encoders:register",
    "register_env": "spr.envs.registry:register",
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
