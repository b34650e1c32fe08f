"""Owns the report on this machine: what works here, what is missing, and what would bring it."""

import platform
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from spr.common.hardware import DEVICES, device_name, free_memory
from spr.common.version import __version__
from spr.config.config import Config
from spr.envs.atari100k import game_names
from spr.envs.registry import known_games
from spr.envs.roms import rom_problem
from spr.training.fleet import fleet_memory

# What each extra brings, modules and their packages; nothing else needs it.
EXTRAS = {
    "report": {"matplotlib": "matplotlib", "jinja2": "jinja2"},
    "video": {"imageio_ffmpeg": "imageio-ffmpeg", "matplotlib": "matplotlib", "PIL": "pillow"},
    "log": {"tensorboard": "tensorboard", "wandb": "wandb"},
    "ray": {"ray": "ray"},
}


def examination() -> tuple[bool, Table]:
    """Say whether all that is needed works, and the rest: versions, devices, ROMs, memory and disk against a run's."""
    table = Table(box=None, header_style="bold")
    for column in ("", "what", "found"):
        table.add_column(column)
    fine = True

    def say(good: bool, what: str, found: str) -> None:
        nonlocal fine
        fine = fine and good
        table.add_row(Text("ok", style="green") if good else Text("no", style="red"), what, found)

    say(True, "spr", __version__)
    say(sys.version_info >= (3, 11), "Python (3.11 or newer)", platform.python_version())
    for package in ("torch", "numpy", "gymnasium", "ale-py", "safetensors"):
        say(True, package, version(package))
    missing = [game for game in game_names() if rom_problem(game) is not None]
    say(not missing, "Atari ROMs", "all 26 games" if not missing else f"missing: {', '.join(missing)}")
    say(True, "other games", f"catch, {len(known_games()) - len(game_names()) - 1} more Atari games, Gymnasium ids")
    for extra, needed in EXTRAS.items():
        lacking = [package for module, package in needed.items() if find_spec(module) is None]
        found = f"not installed: pip install {' '.join(lacking)}" if lacking else "there"
        table.add_row(Text("--", style="yellow") if lacking else Text("ok", style="green"), f"extra {extra}", found)
    for name in DEVICES[1:]:
        if name == "cuda" and not torch.cuda.is_available():
            table.add_row(
                Text("--", style="yellow"), "GPU", "none that PyTorch can use; training runs on the CPU, slowly"
            )
            continue
        device = torch.device(name)
        need, free = fleet_memory(Config(), 1, device), free_memory(device)
        found = f"{free / 2**30:.1f} GiB free on {device_name(device)}; a whole run takes {need / 2**30:.1f} per agent"
        say(free > need, f"memory ({name})", found)
    disk = shutil.disk_usage(Path.cwd()).free
    say(disk > 2**28, "disk", f"{disk / 2**30:.1f} GiB free here; a run's folder takes about 20 MB")
    return fine, table
