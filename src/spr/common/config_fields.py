"""Owns how a value of a configuration is declared: its default, what it may be, and what it means."""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any


def value(default: float, low: float, high: float, meaning: str) -> Any:
    """Declare a number with its default, the range it may take, and what it means."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def flag(default: bool, meaning: str) -> Any:
    """Declare something that is on or off."""
    return field(default=default, metadata={"meaning": meaning})


def choice(default: str, names: Callable[[], Sequence[str]], meaning: str) -> Any:
    """Declare one of several names."""
    return field(default=default, metadata={"names": names, "meaning": meaning})


def name(default: str, meaning: str) -> Any:
    """Declare a name that is looked up where it is used."""
    return field(default=default, metadata={"meaning": meaning})
