"""Owns plug-ins: custom modules, imported because the user who runs a command names them.

A run's files are data: what they name is never imported. So environments that a module makes are available only if the
user has named that module, on the command line or in Python.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from spr.common.errors import UserError, one_line

_named: set[str] = set()


def import_named(module: str) -> None:
    """Import a module that the user has named; the current folder is searched too."""
    if module.endswith(".py") or "/" in module:
        raise UserError(f"--plugin takes a module's name, not a file's; did you mean '{Path(module).stem}'?")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, error) from error
        raise UserError(f"there is no module '{module}', here or among what is installed") from error
    except (Exception, SystemExit) as error:
        raise _failed(module, error) from error
    _named.add(module)


def is_named(module: str) -> bool:
    """Say whether the user has named this module."""
    return module in _named


def modules_of(games: Sequence[str]) -> list[str]:
    """Return the modules that are named with games, 'module:...'."""
    return [game.partition(":")[0] for game in games if ":" in game]


def where(error: BaseException) -> str:
    """Say where an error was raised: the last place that is neither in this package nor in Python."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = Path(__file__).parents[1]  # the whole package
    theirs = [frame for frame in frames if inside not in Path(frame.filename).parents and frame.filename[0] != "<"]
    last = (theirs or list(frames))[-1]
    return f"{last.filename}, line {last.lineno}"


def _failed(module: str, error: BaseException) -> UserError:
    reason = f"{type(error).__name__}: {one_line(error)} ({where(error)})"
    return UserError(f"the module '{module}' can't be imported: {reason}")
