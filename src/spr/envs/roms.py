"""Owns which ROM an Atari game is played with: ale-py's, or one in $ALE_ROMS_DIR that is known by its checksum."""

import hashlib
import os
from pathlib import Path

from ale_py import roms

from spr.common.errors import UserError
from spr.envs.atari100k import ale_rom, published_rom

_WHEEL = Path(roms.__file__).parent  # where ale-py's own ROMs are


def rom_games() -> list[str]:
    """Return every game that ale-py has a ROM of."""
    return sorted(roms.get_all_rom_ids())


def rom_problem(game: str) -> str | None:
    """Return what is wrong with the ROM of an Atari game, or None if it is there and sound."""
    try:
        rom_path(game)
    except UserError as problem:
        return str(problem)
    return None


def rom_path(game: str) -> Path:
    """Return the file of an Atari game's ROM: one in $ALE_ROMS_DIR, or else the one in ale-py's wheel.

    Of the 26 games ale-py's own ROM is taken, or atari-py's, which published scores were made with; no others.
    """
    given = os.environ.get("ALE_ROMS_DIR")
    if given and not Path(given).is_dir():
        raise UserError(f"ALE_ROMS_DIR names '{given}', which is not a folder")
    name, published = f"{game}.bin", published_rom(game)
    file = Path(given) / name if given and (Path(given) / name).is_file() else _WHEEL / name
    try:
        checksum = rom_checksum(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"the ROM {file} can't be read: {reason}; reinstall ale-py 0.12.1, which carries it") from error
    if published is not None and checksum not in (published.md5, ale_rom(game)):
        raise UserError(
            f"{file} is neither ale-py's ROM of {game} nor atari-py's: remove it, or reinstall ale-py 0.12.1"
        )
    return file


def rom_of(game: str) -> dict[str, str]:
    """Return which ROM a game is played with here, as its protocol states it; nothing for games that have none."""
    return {"rom": rom_checksum(rom_path(game))} if game in rom_games() else {}


def rom_checksum(file: Path) -> str:
    """Return the MD5 of a ROM, by which emulators know them."""
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
