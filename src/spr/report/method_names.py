"""Owns what methods are called in a report: short names, and the changes of a preset that each name stands for."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from spr.common.old_formats import current_preset
from spr.config.config import Config, fields
from spr.config.presets import PRESETS, PROTOCOL_FIELDS, preset_config

_MOST_CHANGES = 2  # that a name spells out
# A folder's name that fits beside a curve, and that no name made here can equal.
_FOLDER = re.compile(r"[^\W_][\w.+=-]{0,39}")


class Change(NamedTuple):
    """A field in which a method differs from its preset."""

    field: str
    value: str
    usual: str

    def brief(self) -> str:
        """Return it as part of a name."""
        return f"{self.field.split('.')[-1]} {self.value}"


class Kind(NamedTuple):
    """What makes two runs the same method: the preset, and the values (by field) that were changed."""

    preset: str
    changed: tuple[tuple[str, str], ...]


def changes_of(preset: str, game: str, config: Config) -> tuple[Change, ...]:
    """Return in what a configuration differs from its preset; what belongs to the protocol is not the method's."""
    if preset not in PRESETS:
        return ()
    usual = preset_config(preset, game)
    pairs = {entry.name: (config.value(entry.name), usual.value(entry.name)) for entry in fields()}
    return tuple(
        Change(name, _text(value), _text(before))
        for name, (value, before) in pairs.items()
        if name not in PROTOCOL_FIELDS and value != before
    )


def kind_of(preset: str, changes: Collection[Change]) -> Kind:
    """Return what a run is compared by: usual values differ between games, so they are no part of it."""
    return Kind(preset, tuple((change.field, change.value) for change in changes))


def short_names(found: Mapping[Kind, Collection[str]]) -> dict[Kind, str]:
    """Name methods, given the folders that the runs of each lie in.

    A changed preset is called by its folder if that is its own, by up to two changes, or by a number.
    """
    wanted = {kind: _given(kind, folders) for kind, folders in found.items()}
    taken = Counter(wanted.values())
    names, numbers = dict[Kind, str](), Counter[str]()
    for kind, given in wanted.items():
        if kind.preset not in PRESETS:
            names[kind] = f"{kind.preset} (not a preset here)"
        elif not kind.changed:
            names[kind] = kind.preset
        elif given and taken[given] == 1:
            names[kind] = given
        elif len(kind.changed) <= _MOST_CHANGES:
            changes = ", ".join(Change(field, value, "").brief() for field, value in kind.changed)
            names[kind] = f"{kind.preset} ({changes})"
        else:
            numbers[kind.preset] += 1
            names[kind] = f"{kind.preset}, variant {numbers[kind.preset] + 1}"
    return names


def _given(kind: Kind, folders: Collection[str]) -> str:
    """Return the --name of a changed preset: the only folder that holds its runs."""
    if len(set(folders)) != 1 or not kind.changed:
        return ""
    (name,) = set(folders)
    return name if _FOLDER.fullmatch(name) and current_preset(name) not in PRESETS else ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
