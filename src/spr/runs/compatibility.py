"""Owns whether a folder holds the run that is asked for: a run counts only for what it was made with."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from spr.common import json_files
from spr.common.errors import UnusableError, UserError
from spr.common.old_formats import current_preset
from spr.config.config import Config, from_dict
from spr.envs.atari100k import ale_rom
from spr.envs.gymnasium_adapter import Argument
from spr.envs.roms import rom_of
from spr.runs.run_folder import Run, checked_result, description
from spr.training.loop import row_interval


class ExpectedRun(NamedTuple):
    """What the run in a folder has to be, to count as the one that is asked for."""

    preset: str
    game: str
    seed: int
    config: Config
    precision: str
    exactly: bool  # whether a finished run counts only if it was made with this precision
    log_every: int  # steps between two rows of metrics; a finished run counts whatever its rows are
    arguments: Mapping[str, Argument] = MappingProxyType({})  # of its environment


def finished_as(path: Path, wanted: ExpectedRun) -> bool:
    """Say whether a folder holds the result of this run; a run with other settings, finished or not, is refused."""
    asked = {"preset": wanted.preset, "game": wanted.game, "seed": wanted.seed, "config": wanted.config}
    rules, precision = rom_of(wanted.game) | _with_text(wanted.arguments), {"precision": wanted.precision}
    if _holds(path, "result.json", asked | {"protocol": rules} | (precision if wanted.exactly else {})):
        return True
    _holds(path, "config.json", asked | {"environment": rules, "log_every": wanted.log_every} | precision)
    return False


def _holds(path: Path, name: str, asked: Mapping[str, Any]) -> bool:
    """Say whether a run's folder has this file; a run made with other settings is refused by what differs.

    Compared is what both sides name. What a file of an earlier version does not name is as it was then.
    """
    if not (path / name).exists():
        return False
    try:
        read = checked_result if name == "result.json" else json_files.json_object
        made = _as_made(read(path / name))
    except (UnusableError, UserError) as error:
        raise UserError(f"{path / name} can't be used: {error}; 'spr train --overwrite' replaces the run") from error
    for what in [key for key in asked if key in made]:
        if (differs := _difference(what, asked[what], made[what])) is not None:
            kind = "a finished" if name == "result.json" else "an unfinished"
            raise UserError(
                f"{path} holds {kind} run with {differs}: give this variant a --name of its own, choose another --out, "
                "or replace the run by 'spr train --overwrite'"
            )
    return True


def _as_made(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of its run, in the terms of this version."""
    for key in ("preset", "game"):
        json_files.check_name(data, key)
    config = from_dict(data.get("config"))
    usual = {"log_every": row_interval(config, None)}  # of versions that do not name it
    made = usual | dict(data) | {"config": config, "preset": current_preset(data["preset"])}
    rom = ale_rom(data["game"])
    for key in ("environment", "protocol"):
        if key in made:
            rules = made[key]
            if not isinstance(rules, dict) or not isinstance(rules.get("arguments", {}), dict):
                raise UnusableError(f"its {key} is not a group of values by name")
            made[key] = ({} if rom is None else {"rom": rom}) | rules | _with_text(rules.get("arguments", {}))
    return made


def _with_text(arguments: Mapping[str, Argument]) -> dict[str, str]:
    """Return an environment's arguments as one text: of a group, only what both sides name would be compared."""
    return {"arguments": " ".join(f"{name}={value}" for name, value in sorted(arguments.items())) or "none"}


def _difference(what: str, mine: Any, theirs: Any) -> str | None:
    """Name what is different in a run, and both values; None if nothing is. Of groups, what both have is compared."""
    if isinstance(mine, Config):
        return mine.difference(theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs = ((key, mine[key], theirs[key]) for key in mine if key in theirs)
        return next(filter(None, (_difference(f"{what} {key}", *pair) for key, *pair in pairs)), None)
    return None if mine == theirs else f"{what} {theirs}, not {mine}"


def begun(run: Run) -> bool:
    """Say whether a run's folder holds this very run; one made with other settings is refused by what differs."""
    mine = json.loads(json.dumps(description(run))) | {"config": run.config}
    mine["environment"] |= _with_text(run.arguments)
    mine = {key: value for key, value in mine.items() if key not in ("version", "plugins")}
    return _holds(run.path, "config.json", mine)


def refuse_other_rom(run: Run) -> None:
    """Refuse an agent that learnt with another ROM of its game than is played here: it would see other pictures."""
    learnt, here = run.environment.get("rom", ale_rom(run.game)), rom_of(run.game).get("rom")
    if here is not None and learnt not in (None, here):
        raise UserError(
            f"this agent learnt {run.game} with the ROM {learnt}, but {here} is played here: "
            "ALE_ROMS_DIR names the folder of other ROMs (docs/explanation/roms.md)"
        )
