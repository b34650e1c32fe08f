"""Owns what a report knows of finished runs: their files found, checked and sorted by method and protocol.

A file that can't be used is named in a line and left out; nothing is guessed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from spr.common import json_files
from spr.common.errors import UnusableError, UserError, plural, visible
from spr.common.old_formats import current_preset
from spr.config.config import Config, from_dict
from spr.config.presets import PROTOCOL_FIELDS, is_atari_100k
from spr.envs.atari100k import normalised, published_rom, unlike_published
from spr.report.method_names import Change, Kind, changes_of, kind_of, short_names
from spr.runs import run_files, run_folder

_SHOWN_AS = {"agents_together": "fleet_size"}  # its name in files


class Record(NamedTuple):
    """One finished run."""

    path: Path
    preset: str
    method: str  # a short name: the same for runs of one preset with the same changes
    changes: tuple[Change, ...]  # of the preset
    game: str
    seed: int
    episodes: tuple[float, ...]
    score: float
    random_score: float | None  # a random agent's, measured beside the run where none is published
    protocol: str  # its name in a report: the same for runs that may be compared
    rules: dict[str, Any]  # the protocol in full
    config: Config
    about: dict[str, Any]  # version, device, precision, seconds, fleet size
    curve: tuple[tuple[int, float], ...]  # (step, recent score while learning)
    published_roms: bool  # whether the game differs in ale-py's ROM, and was played with the one of published scores
    lost: str = ""  # what of its curve was lost; empty: nothing

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
    for path in {path.resolve(): path for path in paths}.values():
        found = sorted(path.rglob("result.json")) if path.is_dir() else [path] if path.is_file() else []
        if not found:
            left_out.append(
                f"{visible(path)}: {'no finished run in it' if path.exists() else 'there is no such folder'}"
            )
        for file in found:
            try:
                records.append(_record(file))
            except UnusableError as problem:
                left_out.append(visible(f"{file}: {problem}"))
        left_out += _unfinished(path)
    if not records:
        raise UserError("no finished runs: " + "; ".join(left_out[:3]) + ("; ..." if len(left_out) > 3 else ""))
    named, notes = _protocols(_named(records))
    kept, doubled = _without_doubles(named)
    lost = [f"{visible(record.path)}: {record.lost}" for record in kept if record.lost]
    return Reading(kept, left_out + doubled, notes + _unlike(kept) + lost)


def _unfinished(path: Path) -> list[str]:
    """Say which runs have begun and have no result, a line for each game."""
    begun: dict[Path, list[str]] = {}
    for folder in sorted(file.parent for file in path.rglob("config.json")):
        if not (folder / "result.json").exists() and (folder / "metrics.jsonl").exists():
            begun.setdefault(folder.parent, []).append(folder.name)
    return [
        visible(f"{game}: no result yet (unfinished or diverged): {', '.join(names)}") for game, names in begun.items()
    ]


def _named(records: Sequence[Record]) -> list[Record]:
    """Give each run the name of its method."""
    kinds = [kind_of(record.preset, record.changes) for record in records]
    folders: dict[Kind, set[str]] = {}
    for kind, record in zip(kinds, records, strict=True):
        folders.setdefault(kind, set()).add(_folder_name(record))
    names = short_names(folders)
    return [
        record._replace(method=names[kind] + (PUBLISHED_ROMS if record.published_roms else ""))
        for kind, record in zip(kinds, records, strict=True)
    ]


def _folder_name(record: Record) -> str:
    """Return the name of the folder that a run shares with others of its method; nothing if it was moved elsewhere."""
    path = record.path.absolute()
    name = path.parent.parent.name
    as_made = path == run_files.folder(path.parent.parent.parent, name, record.game, record.seed)
    return name if as_made else ""


def _record(file: Path) -> Record:
    data = run_folder.checked_result(file)
    chance = data.get("random_score")
    try:
        config = from_dict(data.get("config"))
    except UserError as error:
        raise UnusableError(f"its configuration can't be read: {error}") from error
    preset = current_preset(data["preset"])
    published = _with_published_rom(data["game"], data["protocol"].get("rom"))
    curve, lost = _curve(file.with_name("metrics.jsonl"), data)
    return Record(
        path=file.parent,
        preset=preset,
        method="",
        changes=changes_of(preset, data["game"], config),
        game=data["game"],
        seed=data["seed"],
        episodes=tuple(map(float, data["episodes"])),
        score=float(data["score"]),
        random_score=None if chance is None else float(chance),
        protocol="",
        rules=data["protocol"],
        config=config,
        about={
            _SHOWN_AS.get(name, name): data[name]
            for name in ("version", "device", "precision", *json_files.RESULT_NUMBERS)
        },
        published_roms=published,
        curve=curve,
        lost=lost,
    )


def _with_published_rom(game: str, rom: str | None) -> bool:
    """Say whether a game was played with the ROM of published scores where that differs from ale-py's."""
    published = published_rom(game)
    return published is not None and bool(published.different) and rom == published.md5


def with_equal_games(records: Sequence[Record]) -> list[Record]:
    """Count games that are the same in ale-py's and in the published ROMs for both, where there are runs of both.

    A method whose games that differ were all played with the published ROMs is known by these alone.
    """
    marked = {record.method for record in records if record.published_roms}
    unlike = {record.method for record in records if unlike_published(record.game, record.rules.get("rom"))}
    counted: list[Record] = []
    for record in records:
        other = record.method + PUBLISHED_ROMS
        equal = other in marked and not unlike_published(record.game, record.rules.get("rom"))
        counted += [record] if not equal or record.method in unlike else []
        counted += [record._replace(method=other)] if equal else []
    return counted


def _curve(file: Path, data: dict[str, Any]) -> tuple[tuple[tuple[int, float], ...], str]:
    """Return (step, score) of the metrics beside a result, and what was lost of them; results without them are fine."""
    if not file.exists():
        return (), ""
    try:
        content = json_files.content(file)
    except UnusableError as problem:
        return (), f"its {file.name} can't be read, so it has no learning curve: {problem}"
    rows, bad = json_files.rows(content)
    curve = tuple((row["step"], float(row["score"])) for row in rows if row.get("score") is not None)
    sums = data.get("checksums")
    written = sums.get(file.name) if isinstance(sums, dict) else None
    missing = max(bad, _missing([row["step"] for row in rows], int(data["steps"])))
    if missing:
        return curve, f"its learning curve lacks {plural(missing, 'line')} of {file.name}, lost or damaged"
    if written is not None and written != hashlib.sha256(content).hexdigest():
        return curve, f"its {file.name} is not as the run left it: its learning curve may be wrong"
    return curve, ""


def _missing(found: Sequence[int], steps: int) -> int:
    """Return how many rows of a finished run are missing: there is one every so many steps, and one at the end."""
    if not found:
        return 0
    gaps = [later - earlier for earlier, later in pairwise([0, *found]) if later != steps]
    every = max(1, min(gaps, default=steps))
    expected = steps // every + (steps % every > 0)
    return max(0, expected - len(found))


def _protocols(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Give each run the name of its protocol; runs with the same name may be compared."""
    rules: dict[str, str] = {}
    named, notes = [], dict[str, None]()
    for record in records:
        config = record.config
        played = record.rules.get("name") in ("atari-100k", "atari")
        benchmark = played and is_atari_100k(record.preset, record.game, config)
        # Files of 0.15.1 and before do not name the limit, and may call a game that was cut short Atari 100k.
        stated = record.rules | {"evaluation_max_steps": config.evaluation.max_steps}
        stated |= {"name": "atari"} if played and not benchmark else {}
        # Every game has a ROM of its own; a published one makes another method (see `_named`).
        free = ("rom", *(("name", "evaluation_epsilon") if benchmark else ()))
        own = {name: value for name, value in stated.items() if name not in free}
        key = json.dumps([benchmark, own], sort_keys=True)
        if key not in rules:
            name = BENCHMARK if benchmark else _protocol_name(config, stated)
            variants = (f"{name}, variant {number}" for number in range(2, 1000))
            rules[key] = next(own_name for own_name in chain([name], variants) if own_name not in rules.values())
        if benchmark and (unlike := unlike_published(record.game, record.rules.get("rom"))):
            notes[f"{record.game}: ale-py's ROM differs from that of published scores in its {unlike}"] = None
        if benchmark and config.evaluation != Config().evaluation:
            epsilon = config.evaluation.epsilon
            notes[f"{record.method} is evaluated with epsilon {epsilon}, as that method prescribes"] = None
        named.append(record._replace(protocol=rules[key]))
    if len(rules) > 1:
        notes[f"runs by {len(rules)} protocols, which are never put together: {'; '.join(rules.values())}"] = None
    return named, list(notes)


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.isprintable() and len(value) <= json_files.LONGEST


def _protocol_name(config: Config, rules: Mapping[str, Any]) -> str:
    steps, games, epsilon, limit = (config.value(name) for name in PROTOCOL_FIELDS)
    # Every game of Gymnasium has rules of its own, and is known by its id.
    known = [text for text in (rules.get("name"), rules.get("id")) if _is_name(text)]
    name = f"{' '.join(known) or 'unknown'}, {steps:,} steps, {plural(games, 'game')}, epsilon {epsilon}"
    return name + ("" if limit == Config().evaluation.max_steps else f", {limit:,} steps a game at most")


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
    """Keep one of each run, of the newest version; others with its name are left out, with a note if they differ."""
    newest: dict[tuple[str, str, str, int], Record] = {}
    for record in sorted(records, key=_age):
        newest.setdefault((record.protocol, record.method, record.game, record.seed), record)
    kept, left_out = [], []
    for record in records:
        one = newest[record.protocol, record.method, record.game, record.seed]
        if one is record:
            kept.append(record)
        else:
            same = "the same run" if one.episodes == record.episodes else "another result of the same method and seed"
            left_out.append(visible(f"{record.path}: {same} is in {one.path}"))
    return kept, left_out


def _age(record: Record) -> tuple[bool, list[int]]:
    """Return what sorts runs by their version, newest first; those that do not say it are the oldest."""
    numbers = re.findall("[0-9]{1,9}", str(record.about.get("version") or ""))
    return not numbers, [-int(number) for number in numbers]
