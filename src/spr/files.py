"""Owns writing files: whole or not at all, whatever happens meanwhile."""

import os
from pathlib import Path


def replace(path: Path, *chunks: bytes | memoryview) -> None:
    """Write beside, flush to the disk, rename: a reader sees the old file or the new one, never a part."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # lets the renaming reach the disk
    finally:
        os.close(folder)
