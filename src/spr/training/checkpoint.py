"""Owns checkpoints: all of one agent in one file, replaced whole, verified when read, the last two kept.

A file is plain safetensors, which any tool opens. Its metadata has what is not a tensor, and a checksum of everything:
loading runs no code, and nothing is believed before every shape and the checksum have been checked.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from spr.common import atomic_files, json_files, old_formats
from spr.common.errors import StorageFault, UnusableError, one_line

FORMAT = 2
KEPT = 2
_LARGEST_HEADER = 2**20  # bytes
_SUFFIXES = (".safetensors", old_formats.CHECKPOINT_SUFFIX)
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}


class Checkpoint(NamedTuple):
    """One agent after some step: its tensors, and what else there is to say about it."""

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


# From what a checkpoint says about itself to what each of its tensors has to be.
Specs = Callable[[Mapping[str, Any]], Mapping[str, Spec]]


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies; an old one may have its old name."""
    path, old = (folder / f"checkpoint-{step:010}{suffix}" for suffix in _SUFFIXES)
    return old if old.is_file() and not path.is_file() else path


def steps_of(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, newest first; foreign names are passed over."""
    found = [path for suffix in _SUFFIXES for path in folder.glob(f"checkpoint-*{suffix}")]
    names = {path.stem.removeprefix("checkpoint-") for path in found}
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def write(folder: Path, checkpoint: Checkpoint, name: str | None = None) -> None:
    """Write a checkpoint whole or not at all, and drop those older than the one before it.

    Under another name it is something to look at, and nothing is dropped.
    """
    path = folder / (name or f"checkpoint-{checkpoint.step:010}.safetensors")
    try:
        atomic_files.replace(path, *_chunks(checkpoint))
    except OSError as error:
        raise StorageFault(f"can't write a checkpoint to {folder}: {error.strerror or error}") from error
    if name is None:
        _remove(folder, steps_of(folder)[KEPT:])


def remove(folder: Path) -> None:
    """Drop all checkpoints of a run that needs them no more."""
    _remove(folder, steps_of(folder))


def _remove(folder: Path, steps: Sequence[int]) -> None:
    for step in steps:
        for suffix in _SUFFIXES:
            (folder / f"checkpoint-{step:010}{suffix}").unlink(missing_ok=True)


def _chunks(checkpoint: Checkpoint) -> tuple[bytes, memoryview]:
    """Serialise a checkpoint, with a checksum of all of it in its metadata; the tensors are not copied again."""
    about = json.dumps(checkpoint.about | {"step": checkpoint.step, "format": FORMAT})
    plain = memoryview(save_tensors(checkpoint.tensors, {"about": about}))
    length = int.from_bytes(plain[:8], "little")
    header, data = json.loads(bytes(plain[8 : 8 + length])), plain[8 + length :]
    header["__metadata__"]["sha256"] = _checksum(header, data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, data


def _checksum(header: dict[str, Any], data: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()


def read(folder: Path, step: int, specs: Specs) -> Checkpoint:
    """Read and verify the checkpoint of a step: `UnusableError` says what is wrong with it."""
    path = path_of(folder, step)
    old = path.suffix == old_formats.CHECKPOINT_SUFFIX
    try:
        with path.open("rb") as file:
            given = old_formats.checkpoint_checksum(file) if old else ""
            size = file.read(8)
            if int.from_bytes(size, "little") > _LARGEST_HEADER:
                raise UnusableError("its header is damaged")
            text = file.read(int.from_bytes(size, "little"))
            header, about = _header(text, old)
            wanted = _wanted(specs, about, old)
            _compare(header, wanted)
            expected = sum(spec.bytes for spec in wanted.values())
            data = file.read(expected + 1)
            if len(data) != expected:
                raise UnusableError(f"its tensors take {expected:,} bytes, and it does not end with them")
        given = given or header["__metadata__"].pop("sha256", "")
        if given != (hashlib.sha256(size + text + data).hexdigest() if old else _checksum(header, data)):
            raise UnusableError("its checksum does not match its content")
        tensors = load_tensors(size + text + data)
    except (OSError, SafetensorError) as error:
        raise UnusableError(one_line(error)) from error
    if about.get("step") != step:
        raise UnusableError(f"it says that it is of step {about.get('step')}")
    return Checkpoint(
        step, {old_formats.current_tensor(name) if old else name: tensor for name, tensor in tensors.items()}, about
    )


def read_row(folder: Path, step: int, name: str, size: int) -> Tensor:
    """Read one row of numbers from the checkpoint of a step, for who needs no more; the whole file is verified.

    What else a file holds depends on the device that it was written on; a row of weights does not.
    """
    path = path_of(folder, step)
    if path.suffix == old_formats.CHECKPOINT_SUFFIX:
        raise UnusableError("it is of version 0.7 or before, and can't be read in part")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise UnusableError("its header is damaged")
            header, about = _header(file.read(length), old=False)
            given = header["__metadata__"].pop("sha256", "")
            with mmap(file.fileno(), 0, access=ACCESS_READ) as whole, memoryview(whole) as data:
                if given != _checksum(header, data[8 + length :]):
                    raise UnusableError("its checksum does not match its content")
        if about.get("step") != step:
            raise UnusableError(f"it says that it is of step {about.get('step')}")
        _compare({name: header.get(name)}, {name: Spec((size,), torch.float32)})
        with safe_open(path, "pt") as tensors:
            row: Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UnusableError(one_line(error)) from error
    return row


def _header(text: bytes, old: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header of a file, and what it says about itself."""
    try:
        header = json_files.parse(text)
        about = json_files.parse(header["__metadata__"]["about"])
        version = about.get("format", 1)
    except (UnusableError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError("its header is damaged") from error
    if type(version) is not int:
        raise UnusableError("its header is damaged")
    if version > FORMAT:
        raise UnusableError(f"it has format {version}, which a newer version of spr wrote; this one reads {FORMAT}")
    return header, {old_formats.current_tensor(name): value for name, value in about.items()} if old else about


def _wanted(specs: Specs, about: Mapping[str, Any], old: bool) -> dict[str, Spec]:
    try:
        wanted = specs(about)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UnusableError("what it says about itself is damaged") from error
    return {old_formats.old_tensor(name) if old else name: spec for name, spec in wanted.items()}


def _compare(header: Mapping[str, Any], wanted: Mapping[str, Spec]) -> None:
    """Check every tensor's shape and type by the header, before any of them is made."""
    try:
        found = {
            name: Spec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError) as error:
        raise UnusableError("its header is damaged") from error
    if found != dict(wanted):
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise UnusableError(f"its '{wrong[0]}' is not what this run's configuration asks for")


class CheckpointWriter:
    """Writes checkpoints in a background thread: one set at a time, its faults returned by the next call."""

    def __init__(self) -> None:
        """Nothing is being written."""
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[dict[Path, StorageFault]] | None = None

    def write(self, checkpoints: Mapping[Path, Checkpoint]) -> dict[Path, StorageFault]:
        """Begin to write one checkpoint per folder, as soon as the set before has been written; return its faults."""
        faults = self.wait()

        def write_all() -> dict[Path, StorageFault]:
            found = {}
            for folder, checkpoint in checkpoints.items():
                try:
                    write(folder, checkpoint)
                except StorageFault as fault:  # those of the other folders may be written all the same
                    found[folder] = fault
            return found

        self._writing = self._pool.submit(write_all)
        return faults

    def wait(self) -> dict[Path, StorageFault]:
        """Wait until everything has reached the disk, or could not: return whose checkpoints are not there, and why."""
        if self._writing is None:
            return {}
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        """Let go of the thread, when it has done its work."""
        self._pool.shutdown()
