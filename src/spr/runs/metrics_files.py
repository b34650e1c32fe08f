"""Owns the files of a run that grow line by line: its metrics, its episodes, and when each row was written.

A full disk takes no part of a line; what a crash has torn is passed over, and forgotten when the run goes on.
"""

import json
import math
from pathlib import Path
from typing import Any

from spr.common import atomic_files, json_files
from spr.common.errors import UnusableError, UserError

CURVES = ("metrics.jsonl", "episodes.jsonl")  # the same whenever a run is made
GROWING = (*CURVES, "times.jsonl")
_LARGEST = 2**28  # bytes of such a file


def log(folder: Path, row: dict[str, Any], seconds: float) -> None:
    """Append a line to metrics.jsonl, and its time to times.jsonl: the first is the same whenever a run is made."""
    _append(folder / "metrics.jsonl", row)
    _append(folder / "times.jsonl", {"step": row["step"], "seconds": round(seconds, 3)})


def log_episode(folder: Path, row: dict[str, Any]) -> None:
    """Append a line to episodes.jsonl."""
    _append(folder / "episodes.jsonl", row)


def logged(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a run's rows of metrics and its episodes so far; lines that are damaged are passed over."""
    return _rows(folder / "metrics.jsonl").good, _rows(folder / "episodes.jsonl").good


def last_step(folder: Path) -> int | None:
    """Return the step of a run's last line of times, or None where there is none yet."""
    found = _rows(folder / "times.jsonl").good
    return int(found[-1]["step"]) if found else None


def rewind(folder: Path, step: int) -> None:
    """Forget the lines after a step, and a last one that is torn."""
    for name in GROWING:
        path = folder / name
        if not path.exists():
            continue
        try:
            lines = json_files.content(path, _LARGEST).split(b"\n")
        except UnusableError as problem:
            raise UserError(f"{path} can't be read: {problem}; remove it to continue without these lines") from problem
        known = ((line, json_files.row(line)) for line in lines)
        kept = [line for line, row in known if row is not None and row["step"] <= step]
        with atomic_files.writing(path):
            atomic_files.replace(path, b"".join(line + b"\n" for line in kept))


def _rows(file: Path) -> json_files.Rows:
    try:
        return json_files.rows(json_files.content(file, _LARGEST))
    except UnusableError:
        return json_files.Rows([], 0)


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a line, whole or not at all: what a full disk took of it is taken back."""
    # What is no number has no place in JSON, whatever the library would write.
    illegal = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    line = (json.dumps(row | dict.fromkeys(illegal), allow_nan=False) + "\n").encode()
    with atomic_files.writing(path), atomic_files.growing(path) as file:
        before = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(before)
            raise
