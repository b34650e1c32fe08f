"""Owns writing files: whole or not at all, whatever happens meanwhile, and never through a link.

A file is written beside its place under a name that nobody can foresee, created there and nowhere else, flushed to
the disk and renamed. What a killed process leaves of it ends in `.part`, and is removed by the next command that has
the folder for itself.
"""

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spr.common.errors import StorageFault, UserError

# Versions up to 0.12 had no token in such names.
_LEFTOVER = re.compile(r"(?P<name>.+?)(\.[0-9a-f]{8})?\.part")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open what takes a file's place at the end: a reader sees the old file or the new one, never a part.

    A link in that place is replaced, not followed. Whoever gives the file to another program does so by its `name`.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(beside, "xb", opener=_unfollowed) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # lets the renaming reach the disk
    finally:
        os.close(folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk, while a command is at work, into a fault that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageFault(f"can't write to {path}: {error.strerror or error}") from error


def replace(path: Path, *chunks: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as file:
        for chunk in chunks:
            file.write(chunk)


def growing(path: Path, fresh: bool = False) -> IO[bytes]:
    """Open a file that grows piece by piece, or is emptied first; a link in its place is refused."""
    return open(
        path, "wb" if fresh else "ab", buffering=0, opener=_unfollowed
    )  # a full disk is met where it is written


def lockable(path: Path) -> IO[str]:
    """Open a file to be locked, read and written; a link in its place is refused."""
    return open(path, "a+", encoding="utf-8", opener=_unfollowed)


def named_beside(name: str) -> str:
    """Return which file a leftover was to become; other names are their own."""
    found = _LEFTOVER.fullmatch(name)
    return name if found is None else found["name"]


def remove_leftovers(folder: Path, known: Callable[[str], bool]) -> None:
    """Remove what killed processes left of files with known names; only for who has these for itself."""
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        name = named_beside(entry.name)
        if name != entry.name and known(name) and (entry.is_symlink() or entry.is_file()):
            entry.unlink(missing_ok=True)


def _unfollowed(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a link, and what is written would go elsewhere: remove it") from error
        raise
