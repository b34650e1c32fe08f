"""Owns checkpoints: all of one agent in one file, written beside and renamed, verified when read, the last two kept.

A file is a line that says what it is, a line of JSON with its length and checksum, and a safetensors payload: loading
it runs no code, and nothing of it is believed before the checksum and every shape have been checked.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_payload
from safetensors.torch import save as save_payload
from torch import Tensor

from spr.errors import UserError

FORMAT = 1
_MAGIC = b"SPR checkpoint\n"
_LINE = 4096  # longest line of JSON before the payload
_KEPT = 2
_PATTERN = "checkpoint-*.spr"


class Checkpoint(NamedTuple):
    """One agent after some step: what it consists of, and what there is to say about it."""

    step: int
    tensors: dict[str, Tensor]
    about: dict[str, Any]


class Spec(NamedTuple):
    """What a tensor of a checkpoint has to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class UnusableError(Exception):
    """A file that is no good checkpoint, and why."""


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return folder / f"checkpoint-{step:010}.spr"


def steps_of(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, newest first; foreign names are passed over."""
    names = [path.stem.removeprefix("checkpoint-") for path in folder.glob(_PATTERN)]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def write(folder: Path, checkpoint: Checkpoint, name: str | None = None) -> None:
    """Write a checkpoint whole or not at all, and drop those older than the one before it.

    Under another name it is something to look at, and nothing is dropped.
    """
    payload = save_payload(checkpoint.tensors, {"about": json.dumps(checkpoint.about | {"step": checkpoint.step})})
    says = {"format": FORMAT, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    path = path_of(folder, checkpoint.step) if name is None else folder / name
    beside = path.with_suffix(".part")
    try:
        with beside.open("wb") as file:
            file.write(_MAGIC + json.dumps(says).encode() + b"\n")
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(folder)
    except OSError as error:
        beside.unlink(missing_ok=True)
        kept = steps_of(folder)
        last = f"the last good one is of step {kept[0]:,}" if kept else "there is none yet"
        raise UserError(f"can't write a checkpoint to {folder}: {error.strerror or error}; {last}") from error
    for step in steps_of(folder)[_KEPT:]:
        path_of(folder, step).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Drop all checkpoints of a run that needs them no more."""
    for step in steps_of(folder):
        path_of(folder, step).unlink(missing_ok=True)


def read(folder: Path, step: int, specs: Mapping[str, Spec], name: str | None = None) -> Checkpoint:
    """Read and verify the checkpoint of a step: `UnusableError` says what is wrong with it."""
    path = path_of(folder, step) if name is None else folder / name
    allowed = sum(spec.bytes for spec in specs.values()) + 2**20  # its own header and what it says about itself
    try:
        with path.open("rb") as file:
            payload = _payload(file.read(len(_MAGIC)), file.readline(_LINE), os.fstat(file.fileno()).st_size, allowed)
            data = file.read(payload["bytes"])
        if hashlib.sha256(data).hexdigest() != payload["sha256"]:
            raise UnusableError("its checksum does not match its content")
        about = _about(data, specs)
        tensors = load_payload(data)
    except (OSError, SafetensorError) as error:
        raise UnusableError(" ".join(str(error).split())) from error
    if about.get("step") != step:
        raise UnusableError(f"it says that it is of step {about.get('step')}")
    return Checkpoint(step, tensors, about)


def _payload(magic: bytes, line: bytes, size: int, allowed: int) -> dict[str, Any]:
    """Check the lines before the payload and return what they say."""
    if magic != _MAGIC:
        raise UnusableError("it is not a checkpoint")
    try:
        says = json.loads(line)
        version, length, checksum = int(says["format"]), int(says["bytes"]), str(says["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableError("its first lines are damaged") from error
    if version > FORMAT:
        raise UserError(
            f"a checkpoint has format {version}, which a newer version of spr wrote; this one reads {FORMAT}"
        )
    if length > allowed:
        raise UnusableError(f"it claims {length:,} bytes where {allowed:,} would be enough")
    if size != len(_MAGIC) + len(line) + length:
        raise UnusableError(f"it is {size:,} bytes long instead of {len(_MAGIC) + len(line) + length:,}")
    return {"bytes": length, "sha256": checksum}


def _about(data: bytes, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Check every tensor's shape and type by the payload's header, before any of them is made."""
    names = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        about = json.loads(header.pop("__metadata__")["about"])
        found = {name: Spec(tuple(entry["shape"]), names[entry["dtype"]]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError("what it says about itself is damaged") from error
    if found != dict(specs):
        wrong = sorted(name for name in found.keys() | specs.keys() if found.get(name) != specs.get(name))
        raise UnusableError(f"its '{wrong[0]}' is not what this run's configuration asks for")
    if not isinstance(about, dict):
        raise UnusableError("what it says about itself is damaged")
    return about


def _sync_folder(folder: Path) -> None:
    """Let the renaming reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Writer:
    """Writes checkpoints beside the training: one set at a time, its errors told at the next occasion."""

    def __init__(self) -> None:
        """Nothing is being written."""
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def write(self, folders: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> None:
        """Begin to write one checkpoint per folder, as soon as the set before has been written."""
        self.wait()
        pairs = list(zip(folders, checkpoints, strict=True))

        def all_of_them() -> None:
            for folder, checkpoint in pairs:
                write(folder, checkpoint)

        self._writing = self._pool.submit(all_of_them)

    def wait(self) -> None:
        """Wait until everything has reached the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait, and let go of the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
