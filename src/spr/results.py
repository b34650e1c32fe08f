"""Owns what a report knows of finished runs: their files found, checked and sorted by method and protocol.

A file that can't be used is named in a line and left out; nothing is guessed.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spr.config import Config, fields, from_dict
from spr.errors import UnusableError, UserError
from spr.games import normalised, published_rom, unlike_published
from spr.methods import PRESETS, PROTOCOL_FIELDS, current_name, is_atari_100k, preset_config

_LARGEST = 2**24  # bytes of a file that is read; real ones have a few thousand
_NUMBERS = ("train_seconds", "eval_seconds", "agents_together", "steps")
_SHOWN_AS = {"agents_together": "fleet_size"}  # its name in files
_TEXTS = ("preset", "game", "version", "device", "precision")


class Record(NamedTuple):
    """One finished run."""

    path: Path
    preset: str
    method: str  # the preset, and what was changed of it
    game: str
    seed: int
    episodes: tuple[float, ...]
    score: float
    protocol: str  # a name for people: the same for runs that may be compared
    rules: dict[str, Any]  # the protocol in full
    config: Config
    about: dict[str, Any]  # version, device, precision, seconds, fleet size
    curve: tuple[tuple[int, float], ...]  # (step, recent score while learning)
    published_roms: bool  # whether the game differs in ale-py's ROM, and was played with the one of published scores

    @property
    def human(self) -> float | None:
        """The human-normalised score; None outside the 26 games."""
        return normalised(self.game, self.score)


BENCHMARK = "Atari 100k"
PUBLISHED_ROMS = " (published ROMs)"


class Reading(NamedTuple):
    """What was found."""

    records: list[Record]
    left_out: list[str]  # a line for each thing that is in no table
    notes: list[str]  # a line for each thing that is in the tables, and has to be known


def read(paths: Sequence[Path]) -> Reading:
    """Read every result below the given folders."""
    records: list[Record] = []
    left_out: list[str] = []
    for path in paths:
        found = sorted(path.rglob("result.json")) if path.is_dir() else [path] if path.is_file() else []
        if not found:
            left_out.append(f"{path}: {'no finished run in it' if path.exists() else 'there is no such folder'}")
        for file in found:
            try:
                records.append(_record(file))
            except UnusableError as problem:
                left_out.append(f"{file}: {problem}")
    if not records:
        raise UserError("no finished runs: " + "; ".join(left_out[:3]) + ("; ..." if len(left_out) > 3 else ""))
    named, notes = _protocols(records)
    kept, doubled = _without_doubles(named)
    return Reading(kept, left_out + doubled, notes + _unlike(kept))


def _record(file: Path) -> Record:
    data = _json(file)
    for name in _TEXTS:
        if not isinstance(data.get(name), str):
            raise UnusableError(f"its '{name}' is not a string")
    for name in (*_NUMBERS, "score"):
        if not _number(data.get(name)):
            raise UnusableError(f"its '{name}' is not a finite number")
    if type(data.get("seed")) is not int or not isinstance(data.get("protocol"), dict):
        raise UnusableError("its seed is not a whole number, or its protocol is missing")
    episodes = data.get("episodes")
    if not isinstance(episodes, list) or not episodes or not all(map(_number, episodes)):
        raise UnusableError("its episodes are not all finite numbers")
    mean = sum(episodes) / len(episodes)
    if not math.isclose(mean, data["score"], rel_tol=1e-9, abs_tol=1e-9):
        raise UnusableError(f"its score {data['score']} is not the mean of its episodes, {mean}")
    try:
        config = from_dict(data["config"])
    except (UserError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnusableError(f"its configuration can't be read: {' '.join(str(error).split())}") from error
    preset = current_name(data["preset"])
    published = _with_published_rom(data["game"], data["protocol"].get("rom"))
    return Record(
        path=file.parent,
        preset=preset,
        method=_method(preset, data["game"], config) + (PUBLISHED_ROMS if published else ""),
        game=data["game"],
        seed=data["seed"],
        episodes=tuple(map(float, episodes)),
        score=float(data["score"]),
        protocol="",
        rules=data["protocol"],
        config=config,
        about={_SHOWN_AS.get(name, name): data[name] for name in ("version", "device", "precision", *_NUMBERS)},
        published_roms=published,
        curve=_curve(file.with_name("metrics.jsonl")),
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST:
            raise UnusableError("it is too large to be a result")
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableError(f"it can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UnusableError("it is not a result file")
    return data


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _method(preset: str, game: str, config: Config) -> str:
    """Name a method: a preset, or one with changes, which is another method."""
    if preset not in PRESETS:
        return f"{preset} (not a preset here)"
    usual = preset_config(preset, game)
    changed = [
        f"{entry.name}={config.value(entry.name)}"
        for entry in fields()
        if entry.name not in PROTOCOL_FIELDS and config.value(entry.name) != usual.value(entry.name)
    ]
    return f"{preset} [{', '.join(changed)}]" if changed else preset


def _with_published_rom(game: str, rom: str | None) -> bool:
    """Say whether a game was played with the ROM of published scores where that differs from ale-py's."""
    published = published_rom(game)
    return published is not None and bool(published.different) and rom == published.md5


def with_equal_games(records: Sequence[Record]) -> list[Record]:
    """Count games that are the same in ale-py's and in the published ROMs for both, where there are runs of both."""
    marked = {record.method for record in records if record.published_roms}
    both = [
        record._replace(method=record.method + PUBLISHED_ROMS)
        for record in records
        if record.method + PUBLISHED_ROMS in marked and not unlike_published(record.game, record.rules.get("rom"))
    ]
    return [*records, *both]


def _curve(file: Path) -> tuple[tuple[int, float], ...]:
    """Return (step, score) of the metrics beside a result; results without them are fine."""
    rows = []
    try:
        if file.stat().st_size > _LARGEST:
            return ()
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if _number(row.get("score")) and _number(row.get("step")):
                rows.append((int(row["step"]), float(row["score"])))
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(rows)


def _protocols(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Give each run the name of its protocol; runs with the same name may be compared."""
    rules: dict[str, str] = {}
    named, notes = [], dict[str, None]()
    for record in records:
        config = record.config
        played = record.rules.get("name") in ("atari-100k", "atari")
        benchmark = played and is_atari_100k(record.preset, record.game, config)
        # Every game has a ROM of its own; a published one makes another method (see `_method`).
        free = ("rom", *(("name", "evaluation_epsilon") if benchmark else ()))
        own = {name: value for name, value in record.rules.items() if name not in free}
        key = json.dumps([benchmark, own], sort_keys=True)
        if key not in rules:
            rules[key] = _protocol_name(record, benchmark, set(rules.values()))
        if benchmark and (unlike := unlike_published(record.game, record.rules.get("rom"))):
            notes[f"{record.game}: ale-py's ROM differs from that of published scores in its {unlike}"] = None
        if benchmark and config.evaluation != Config().evaluation:
            epsilon = config.evaluation.epsilon
            notes[f"{record.method} is evaluated with epsilon {epsilon}, as that method prescribes"] = None
        named.append(record._replace(protocol=rules[key]))
    if len(rules) > 1:
        notes[f"runs by {len(rules)} protocols, which are never put together: {'; '.join(rules.values())}"] = None
    return named, list(notes)


def _protocol_name(record: Record, benchmark: bool, taken: set[str]) -> str:
    rules = record.rules
    steps, games, epsilon = (record.config.value(name) for name in PROTOCOL_FIELDS)
    name = f"{rules.get('name', 'unknown')}, {steps:,} steps, {games} games, epsilon {epsilon}"
    name = BENCHMARK if benchmark else name
    versions = (f"{name}, variant {number}" for number in range(2, 1000))
    return name if name not in taken else next(other for other in versions if other not in taken)


def _unlike(records: Sequence[Record]) -> list[str]:
    """Say where runs of one method were made by different versions or precisions: they are counted together."""
    notes = []
    for protocol, method in dict.fromkeys((record.protocol, record.method) for record in records):
        together = [record for record in records if (record.protocol, record.method) == (protocol, method)]
        for what in ("precision", "version"):
            found = sorted({record.about[what] for record in together})
            if len(found) > 1:
                notes.append(f"{method}: runs of {what} {' and '.join(found)} are counted together")
    return notes


def _without_doubles(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Keep one of each run; another one with the same name is left out, with a note if it differs."""
    kept: dict[tuple[str, str, str, int], Record] = {}
    left_out = []
    for record in records:
        key = (record.protocol, record.method, record.game, record.seed)
        first = kept.setdefault(key, record)
        if first is not record:
            same = "the same run" if first.episodes == record.episodes else "another result of the same method and seed"
            left_out.append(f"{record.path}: {same} is in {first.path}")
    return list(kept.values()), left_out
