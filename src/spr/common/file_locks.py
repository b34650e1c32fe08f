"""Owns who works on what: locks on files, with the name of who holds them inside.

The kernel lets go of a lock when its process ends, however it ends, so a file that was left behind holds nobody up: the
next process that wants it takes it, and removes it in the end.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from spr.common import atomic_files
from spr.common.errors import UserError

_PATIENCE = 0.3  # seconds: a process that only looks holds a lock for a moment
_LOOK = 0.02
_LARGEST = 2**24  # bytes of what a file may say of its holder


class Holder(NamedTuple):
    """Who holds a lock."""

    process: int
    host: str
    since: str
    about: Mapping[str, Any]  # what it says besides

    def __str__(self) -> str:
        """Name it for a message."""
        return f"process {self.process} on {self.host}, since {self.since}" if self.process else "another process"


class HeldError(Exception):
    """A lock is held by another process."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


@contextmanager
def hold(path: Path, patience: float = _PATIENCE, **about: Any) -> Iterator[None]:
    """Hold a lock, and say so in its file: `HeldError` if another process has it. Afterwards its file is gone."""
    file = _take(path, patience)
    try:
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": _now()}
        file.truncate(0)
        file.write(json.dumps(holder | about))
        file.flush()
        yield
    finally:
        # While it is still held: what another process made meanwhile is never removed.
        path.unlink(missing_ok=True)
        file.close()


def holder(path: Path) -> Holder | None:
    """Say who holds a lock; None if nobody does."""
    try:
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(file)
    except FileNotFoundError:
        return None
    return None


def _take(path: Path, patience: float) -> IO[str]:
    """Open and lock a file that is still the one with that name: its last holder may have removed it meanwhile."""
    end = time.monotonic() + patience
    while True:
        file = atomic_files.lockable(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BlockingIOError:
            if time.monotonic() > end:
                who = _read_holder(file)
                file.close()
                raise HeldError(who) from None
        except OSError as error:
            file.close()
            raise _without_locks(path, error) from error
        file.close()
        time.sleep(_LOOK)


def _without_locks(path: Path, error: OSError) -> UserError:
    return UserError(
        f"can't lock {path}: {error.strerror or error}; a network folder needs locks (NFS: lockd), or give an --out on "
        "a disk of this machine"
    )


def _read_holder(file: IO[str]) -> Holder:
    """Read what a holder says of itself; one of an earlier version says nothing, and one that just began not yet."""
    try:
        file.seek(0)
        found = json.loads(file.read(_LARGEST))
        about = {name: value for name, value in found.items() if name not in Holder._fields}
        return Holder(int(found["process"]), str(found["host"]), str(found["since"]), about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Holder(0, "", "", {})


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")
