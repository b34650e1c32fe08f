"""Owns reading JSON that may be damaged: of a believable size and depth, with its checksum where it has one.

`UnusableError` says in a line what is wrong with a file; its reader decides what to do.
"""

import hashlib
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spr.common import old_formats
from spr.common.errors import UnusableError, one_line

LARGEST = 2**24  # bytes of a file that is read; real ones have a few thousand
LARGEST_NUMBER = 1e100  # larger ones can't be averaged or drawn
LONGEST = 200  # characters of a name
_DEEPEST = 32  # levels; real files have four
_SEAL = "sha256"
RESULT_NUMBERS = ("train_seconds", "eval_seconds", "agents_together", "steps")  # that every result has


def parse(text: bytes | str) -> Any:
    """Return what a JSON text says; what Python would stumble over later is refused here."""
    try:
        found = json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise UnusableError("it is nested too deeply") from None
    except ValueError as error:
        raise UnusableError(f"it is torn or damaged ({one_line(error)})") from error
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return found
    raise UnusableError("it is nested too deeply")


def content(file: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a plain file; a pipe would never end, and a device may have no end."""
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UnusableError("it is no plain file")
        if about.st_size > largest:
            raise UnusableError(f"it is too large to be a {file.name}")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise UnusableError((error.strerror if isinstance(error, OSError) else None) or one_line(error)) from error


class LoadedJson(NamedTuple):
    """What a JSON file says by name, and whether a checksum vouches for it."""

    data: dict[str, Any]
    sealed: bool


def load_json(file: Path, largest: int = LARGEST) -> LoadedJson:
    """Return what a JSON file says; one with a checksum is refused where that does not match."""
    data = parse(content(file, largest))
    if not isinstance(data, dict):
        raise UnusableError("it is not a group of values by name")
    given = data.pop(_SEAL, None)
    if given is not None and given != _checksum(data):
        raise UnusableError("it is not as it was written: its checksum does not match")
    return LoadedJson(data, given is not None)


def json_object(file: Path, largest: int = LARGEST) -> dict[str, Any]:
    """Return what a JSON file says, with or without a checksum."""
    return load_json(file, largest).data


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with the checksum that `json_object` looks for; it does not depend on spaces, or on the order."""
    return {**data, _SEAL: _checksum(data)}


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def checksum_of(file: Path) -> str | None:
    """Return the checksum of a file's bytes; None where there is no such file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


class Rows(NamedTuple):
    """Lines of a file that grows, each a group of numbers by name after some step."""

    good: list[dict[str, Any]]
    bad: int  # lines that are none such, or not of a later step than the one before


def rows(data: bytes) -> Rows:
    """Return the lines of a growing file that can be used, and how many can't."""
    good: list[dict[str, Any]] = []
    lines = [line for line in data.split(b"\n") if line]
    for line in lines:
        found = row(line)
        if found is not None and (not good or found["step"] > good[-1]["step"]):
            good.append(found)
    return Rows(good, len(lines) - len(good))


def row(line: bytes) -> dict[str, Any] | None:
    """Return one line of a growing file; None where it is damaged."""
    try:
        found = parse(line)
    except UnusableError:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    plain = old_formats.finite_or_none(found)
    return plain if all(value is None or is_number(value) for value in plain.values()) else None


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number that can be reckoned with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def check_name(data: Mapping[str, Any], name: str) -> None:
    """Refuse a name that is not a line of text."""
    if not isinstance(data.get(name), str):
        raise UnusableError(f"its '{name}' is not a string")
    if not data[name].isprintable() or not 0 < len(data[name]) <= LONGEST:
        raise UnusableError(f"its '{name}' is not a line of at most {LONGEST} printable characters")


def check_seed(data: Mapping[str, Any]) -> None:
    """Refuse a seed that no environment takes."""
    if type(data.get("seed")) is not int or not 0 <= data["seed"] < 2**31:
        raise UnusableError("its seed is not a whole number from 0 to 2147483647")


def check_result(data: Mapping[str, Any]) -> None:
    """Refuse a result that lacks what is shown of it, or says it in another way."""
    for name in ("preset", "game", "version", "device", "precision"):
        check_name(data, name)
    measured = ("human_normalised", "random_score")
    known = [name for name in measured if data.get(name) is not None]
    for name in (*RESULT_NUMBERS, "score", *known):
        if not is_number(data.get(name)):
            raise UnusableError(f"its '{name}' is not a finite number")
    for name in ("agents_together", "steps"):
        if data[name] < 1:
            raise UnusableError(f"its '{name}' is less than 1")
    check_seed(data)
    if not isinstance(data.get("protocol"), dict):
        raise UnusableError("its protocol is missing")
    episodes = data.get("episodes")
    if not isinstance(episodes, list) or not episodes or not all(map(is_number, episodes)):
        raise UnusableError("its episodes are not all finite numbers")
    mean = sum(episodes) / len(episodes)
    if not math.isclose(mean, data["score"], rel_tol=1e-9, abs_tol=1e-9):
        raise UnusableError(f"its score {data['score']} is not the mean of its episodes, {mean}")
