"""Owns the module paths of versions up to 0.17 that plug-ins import: each leads to the module that is in its place."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# `spr.envs` and `spr.config` are rooms now: their __init__ hands the old names on.
MOVED = {
    "spr.aux_losses": "spr.agent.auxiliary_losses",
    "spr.encoders": "spr.agent.encoders",
    "spr.environment": "spr.envs.base",
    "spr.errors": "spr.common.errors",
    "spr.events": "spr.experiments.events",
    "spr.methods": "spr.config.presets",
}


class _Finder(MetaPathFinder):
    """Answers for the old paths only."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader()) if fullname in MOVED else None


class _Loader(Loader):
    """Imports the new module, and gives it under the old name too: it exists once."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])


def install() -> None:
    """Have `import` know the old paths, from now on and once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
