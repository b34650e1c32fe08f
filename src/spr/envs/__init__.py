"""Owns environments and the games of the benchmark: Atari, catch, Gymnasium, ROMs, published scores."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Hand on what the module `spr.envs` of versions up to 0.17 had, for plug-ins."""
    from importlib import import_module  # noqa: PLC0415 - the room's own modules import it first

    home = import_module("spr.envs.registry")
    if name.startswith("_") or not hasattr(home, name):
        raise AttributeError(f"module 'spr.envs' has no attribute '{name}'")
    return getattr(home, name)
