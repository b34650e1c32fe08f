"""Owns where the files of runs lie, and who may work on them: names, paths, locks, leftovers.

A run lives in OUT/NAME/GAME/seed-N, where the name is the preset's, or one given to a variant of it.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spr.common import atomic_files, file_locks, old_formats
from spr.common.errors import StorageFault, UserError

TENSORBOARD, WANDB_ID = "tensorboard", "wandb.json"
DIVERGED_UPDATE = "diverged.safetensors"
CSV = ("metrics.csv", "episodes.csv")  # what `--log csv` mirrors of the files that grow
# What a run's folder may hold, beside checkpoints and what the user puts there.
FILES = {
    "config.json": "what the run is: preset, game, seed, configuration, and how its environment is played",
    "metrics.jsonl": "a row of metrics a hundred times in a run, or as often as --log-every says; reproducible",
    "episodes.jsonl": "a row for each training episode: the step of its end, its raw score, its length",
    "times.jsonl": "when each row of metrics was written, in seconds of training",
    "metrics.csv": "with --log csv: metrics.jsonl as a table",
    "episodes.csv": "with --log csv: episodes.jsonl as a table",
    "agent.safetensors": "the weights that act, with a checksum",
    "result.json": "every raw score of the evaluation, their mean, the protocol, seconds, device, version",
    TENSORBOARD: "with --log tensorboard: event files",
    WANDB_ID: "with --log wandb: what the run is called there",
    "diverged.json": "why training stopped, where a loss or gradient was not finite",
    DIVERGED_UPDATE: "the state before that update, with its random numbers",
    **{old: f"the same as {now}, of versions up to 0.7" for now, old in old_formats.DIVERGED.items()},
}
_DIVERGED = ("diverged.json", old_formats.DIVERGED["diverged.json"])
CHECKPOINT = "checkpoint-"  # how the names of checkpoints begin
LOGS = "logs"  # beside all runs: where a sweep's commands write what they print
WANDB = "wandb"  # beside all runs: the folder of what is logged there
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors that no other input would have avoided


def seeds_text(seeds: Sequence[int]) -> str:
    """Return 'seed 0', 'seeds 0 1'."""
    return f"seed{'' if len(seeds) == 1 else 's'} {' '.join(map(str, seeds))}"


def check_name(name: str | None) -> None:
    """Refuse a variant's name that is no plain name of a folder."""
    if name is not None and (not re.fullmatch(r"\w[\w.+=-]*", name) or name in (LOGS, WANDB)):
        raise UserError(
            f"--name must be a folder's name (letters, digits, . _ - + =) other than '{LOGS}' and '{WANDB}', "
            f"not '{name}'"
        )


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that environments can't take, and one that is given twice."""
    if any(seed < 0 or seed >= 2**31 for seed in seeds):
        raise UserError(f"seeds must be between 0 and {2**31 - 1}")
    twice = sorted({seed for seed in seeds if list(seeds).count(seed) > 1})
    if twice:
        raise UserError(f"seed {twice[0]} is given twice: each agent of a fleet needs its own")


def folder(out: Path, name: str, game: str, seed: int) -> Path:
    """Return where a run lives."""
    return out / name / plain_name(game) / f"seed-{seed}"


def plain_name(game: str) -> str:
    """Return a game's name as it may stand in a path: a Gymnasium id's slashes and colons do not make folders."""
    return game.replace("/", "_").replace(":", "_")


def refuse_taken(paths: Sequence[Path], overwrite: bool) -> None:
    """Refuse folders that hold runs, before anything is written; other files in them are left alone."""
    for path in paths:
        try:
            found = sorted(entry.name for entry in path.iterdir() if _ours(entry.name))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unusable(path, error) from error
        if found and not overwrite:
            if (holder := worked_on_by(path)) is not None:
                raise _held(path, holder)
            kind, resumed = ("a finished", "keeps") if "result.json" in found else ("an unfinished", "continues")
            raise UserError(
                f"{path} holds {kind} run: --resume {resumed} it, --overwrite replaces it, --name stores another one"
            )


@contextmanager
def locked(paths: Sequence[Path]) -> Iterator[None]:
    """Keep runs for this process alone; a process that is gone holds nothing.

    The locks lie beside the folders, and leave nothing behind: no file, and no folder that would stay empty. What a
    killed process left of files that it was writing is removed.
    """
    with ExitStack() as held:
        for path in paths:
            missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
            held.callback(_remove_empty, missing)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(file_locks.hold(_lock_of(path)))
                remove_leftovers(path)
            except file_locks.HeldError as error:
                raise _held(path, error.holder) from None
            except OSError as error:
                raise unusable(path, error) from error
        yield


def _held(path: Path, holder: file_locks.Holder) -> UserError:
    return UserError(f"{path} is being worked on by {holder}: wait for it, or stop it")


def worked_on_by(path: Path) -> file_locks.Holder | None:
    """Say who works on a run now; None if nobody does."""
    return file_locks.holder(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def remove_leftovers(path: Path) -> None:
    """Remove what a killed process left of a run's files that it was writing; only for who has the run for itself."""
    atomic_files.remove_leftovers(path, _ours)


def finished(path: Path) -> bool:
    """Say whether a run has its result."""
    return (path / "result.json").is_file()


def results(path: Path) -> list[Path]:
    """Return the files that a run's folder keeps for good, in the order in which they may appear elsewhere."""
    kept = [path / name for name in FILES if name != "result.json"]
    found = [*kept, *sorted((path / TENSORBOARD).glob("*")), path / "result.json"]
    return [file for file in found if file.is_file()]


def write_if_changed(path: Path, data: bytes) -> None:
    """Store a file fetched from a worker, unless the same bytes are already there."""
    try:
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace(path, data)
    except OSError as error:
        raise unusable(path, error) from error


def diverged(path: Path) -> bool:
    """Say whether a run's learning has diverged."""
    return any((path / name).is_file() for name in _DIVERGED)


def _ours(name: str) -> bool:
    plain = atomic_files.named_beside(name)
    return plain in FILES or plain.startswith(CHECKPOINT)


def unusable(path: Path, error: OSError) -> UserError | StorageFault:
    """Return the error for a path that can't be written to: the user's, or the disk's."""
    kind = StorageFault if error.errno in _DISK else UserError
    return kind(f"can't write to {path}: {error.strerror or error}")
