"""Owns loggers: consumers of events that write metrics elsewhere, each run as a run of its own there.

A run's own files are the truth, and a logger mirrors them: a run that goes on is written again from its beginning, so
nothing is there twice, nothing is there of steps that are played again, and nothing is missing.
"""

import csv
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

from spr.common import atomic_files, json_files
from spr.common.errors import UnusableError, UserError, did_you_mean, one_line
from spr.experiments import events
from spr.experiments.events import Event
from spr.runs import metrics_files, run_files, run_folder
from spr.runs.run_folder import Run

_PROJECT = "spr"  # of wandb, unless WANDB_PROJECT names another
_LINES = ("train", "episode")  # groups of numbers that a run has many of
_WITHOUT_SERVER = ("offline", "dryrun", "disabled")  # modes of wandb


class Writer(Protocol):
    """Where the numbers of one run go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step; steps never go back."""

    def close(self, scored: bool) -> None:
        """Write what is left; say whether the run has come to its result."""


Opener = Callable[[Run], Writer]


class Loggers:
    """Hands every run's metrics, episodes and score to writers of its own; a context, so that all are closed."""

    def __init__(self, openers: Sequence[Opener]) -> None:
        """Nothing is opened, and nothing written, before a training begins."""
        self._openers = openers
        self._writers: dict[Path, list[Writer]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path in list(self._writers):
            self._close(path, scored=False)

    def __call__(self, event: Event) -> None:
        """Write the numbers of one event."""
        match event:
            case events.TrainingBegins(_, begun):
                for run in begun if self._openers else ():
                    self._open(run)
            case events.Metrics(run, row, _):
                self._write(run, "train", row)
            case events.EpisodeEnded(run, row):
                self._write(run, "episode", row)
            case events.Scored(run, result):
                self._write(run, "evaluation", {"step": result["steps"], "score": result["score"]})
                self._close(run.path, scored=True)
            case events.Diverged(run, _):
                self._close(run.path, scored=False)

    def _open(self, run: Run) -> None:
        # One by one, so that those that are open are closed where the next can't be opened.
        mine = self._writers[run.path] = list[Writer]()
        for opener in self._openers:
            mine.append(opener(run))
        metrics, episodes = metrics_files.logged(run.path)
        rows = [("episode", row) for row in episodes] + [("train", row) for row in metrics]
        for group, row in sorted(rows, key=lambda one: int(one[1]["step"])):
            self._write(run, group, row)

    def _write(self, run: Run, group: str, row: Mapping[str, Any]) -> None:
        values = {f"{group}/{name}": value for name, value in row.items() if name != "step" and value is not None}
        with atomic_files.writing(run.path):
            for writer in self._writers.get(run.path, ()):
                writer.write(row["step"], values)

    def _close(self, path: Path, scored: bool) -> None:
        with atomic_files.writing(path):
            for writer in self._writers.pop(path, ()):
                writer.close(scored)


def check(names: Sequence[str]) -> None:
    """Refuse loggers that there are not, or whose package is not installed; nothing is imported for that."""
    for name in names:
        if name not in _KNOWN:
            raise UserError(
                f"unknown logger '{name}'{did_you_mean(name, _KNOWN)} (there are {', '.join(_KNOWN)}; "
                "metrics.jsonl and episodes.jsonl are written always)"
            )
        found = find_spec(name)
        if found is None or found.origin is None:  # a mere folder of that name, such as wandb's own, has no origin
            raise UserError(f"--log {name} needs the package {name}: pip install {name}")


def make(names: Sequence[str], out: Path) -> Loggers:
    """Return the loggers of these names, for runs under a folder; what can't work is refused before anything begins."""
    check(names)
    return Loggers([_KNOWN[name](out) for name in dict.fromkeys(names)])


def _tensorboard(_: Path) -> Opener:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow to import

    def opener(run: Run) -> Writer:
        folder = run.path / run_files.TENSORBOARD
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # Readers of an older file, or of a copy of it, drop what it held.
        return _TensorBoard(SummaryWriter(folder, purge_step=0))

    return opener


class _TensorBoard:
    """Event files in a run's own folder."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, scored: bool) -> None:  # noqa: ARG002 - the evaluation's score says it there
        self._writer.close()


def _csv(_: Path) -> Opener:
    return lambda run: _Csv(run.path)


class _Csv:
    """Tables in a run's own folder: what metrics.jsonl and episodes.jsonl hold, for spreadsheets."""

    def __init__(self, folder: Path) -> None:
        self._tables = {group: _CsvTable(folder / name) for group, name in zip(_LINES, run_files.CSV, strict=True)}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for group, table in self._tables.items():
            if row := {name.partition("/")[2]: value for name, value in values.items() if name.startswith(f"{group}/")}:
                table.add({"step": step} | row)

    def close(self, scored: bool) -> None:
        """Nothing is open."""


class _CsvTable:
    """One file: its columns are those of all rows so far, so a row with a new one writes it again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Mapping[str, Any]] = []
        self._columns: list[str] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one more row."""
        self._rows.append(row)
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            atomic_files.replace(
                self._path, self._text([dict(zip(self._columns, self._columns, strict=True)), *self._rows])
            )
        else:
            with atomic_files.growing(self._path) as file:
                file.write(self._text([row]))

    def _text(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def _wandb(out: Path) -> Opener:
    import wandb  # noqa: PLC0415 - an extra, and slow to import

    # It says nothing: the terminal is the display's, and errors are exceptions.
    try:
        asked = wandb.setup(wandb.Settings(silent=True, console="off")).settings.mode
        can = asked in _WITHOUT_SERVER or wandb.login(prompt=False, verify=False)
    except (wandb.Error, ValueError) as error:  # the latter for settings that can't be, of the environment
        raise _refused(error) from error
    if not can and "WANDB_MODE" in os.environ:
        raise UserError(
            f"WANDB_MODE={asked} needs an API key, and there is none: 'wandb login' stores one, and WANDB_MODE=offline "
            "needs none"
        )

    def opener(run: Run) -> Writer:
        name = _wandb_id(run)
        for old in (out / run_files.WANDB).glob(f"*run-*-{name}"):
            old.unlink() if old.is_symlink() else shutil.rmtree(old)
        try:
            made = wandb.init(
                # A run without `resume` takes the place of what the server has under its id.
                id=name,
                mode=None if can else "offline",
                dir=out,
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name="/".join(run.path.parts[-3:]),
                group="/".join(run.path.parts[-3:-1]),
                config=run_folder.description(run),
                reinit="create_new",
            )
        except wandb.Error as error:
            raise _refused(error) from error
        return _Wandb(made)

    return opener


def _refused(error: Exception) -> UserError:
    return UserError(f"wandb can't be used: {one_line(error)}")


def _wandb_id(run: Run) -> str:
    """Return what a run is called there: drawn when it is first logged, and kept in its folder."""
    path = run.path / run_files.WANDB_ID
    if not path.exists():
        atomic_files.replace(path, (json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n").encode())
    try:
        name = str(json_files.json_object(path).get("id"))
    except UnusableError:
        name = ""
    if not re.fullmatch("[0-9a-f]{12}", name):  # folders are removed by it
        raise UserError(f"{path} is damaged: remove it, and the run begins anew in wandb")
    return name


class _Wandb:
    """A run of Weights & Biases, one of several in this process."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, scored: bool) -> None:
        self._run.finish(exit_code=0 if scored else 1)


_KNOWN: Mapping[str, Callable[[Path], Opener]] = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb}
