"""Owns the configuration of a run: every value with its range and meaning, and the presets."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Hand on what the module `spr.config` of versions up to 0.17 had, for plug-ins."""
    from importlib import import_module  # noqa: PLC0415 - the room's own modules import it first

    home = import_module("spr.config.config")
    if name.startswith("_") or not hasattr(home, name):
        raise AttributeError(f"module 'spr.config' has no attribute '{name}'")
    return getattr(home, name)
