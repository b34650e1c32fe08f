"""Owns a run's folder: configuration, metrics, weights and result, each file replaced whole or not at all.

A run lives in OUT/PRESET/GAME/seed-N. Only `metrics.jsonl` grows, line by line.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from spr import __version__
from spr.config import STACK, Config, from_dict
from spr.errors import UserError
from spr.games import game_names, normalised

_KNOWN = ("config.json", "metrics.jsonl", "agent.safetensors", "result.json")
_FILES = {"config.json": "it is not a run's folder", "agent.safetensors": "its agent was not saved"}


class Run(NamedTuple):
    """One agent's run: what it is and where it lives."""

    path: Path
    preset: str
    game: str
    seed: int
    config: Config
    environment: dict[str, Any]  # how its games are played, as the environment states it


def folder(out: Path, preset: str, game: str, seed: int) -> Path:
    """Return where a run lives; a Gymnasium id's slashes and colons do not make folders."""
    return out / preset / game.replace("/", "_").replace(":", "_") / f"seed-{seed}"


def protocol(run: Run) -> dict[str, Any]:
    """Return everything a score depends on besides the method.

    The name atari-100k is kept for exactly that benchmark: another budget, evaluation or game is another protocol.
    """
    config, standard = run.config, Config()
    judged = {
        "stacked_frames": STACK,
        "stack_before_an_episode": "black",
        "learning_reward": "clipped to [-1, 1]",
        "learning_terminal": "lost life or game over; a lost life does not reset the game",
        "training_steps": config.schedule.steps,
        "evaluation_episodes": config.evaluation.episodes,
        "evaluation_epsilon": config.evaluation.epsilon,
        "evaluation_noise": False,
    }
    benchmark = (
        run.environment["name"] == "atari"
        and run.game in game_names()
        and config.schedule.steps == standard.schedule.steps
        and config.evaluation == standard.evaluation
    )
    return run.environment | judged | ({"name": "atari-100k"} if benchmark else {})


def refuse_taken(paths: Sequence[Path], overwrite: bool) -> None:
    """Refuse folders that are in use, before anything is written; foreign files are never overwritten."""
    for path in paths:
        try:
            found = sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unusable(path, error) from error
        foreign = [name for name in found if name.removesuffix(".part") not in _KNOWN]
        if foreign:
            raise UserError(f"{path} holds {foreign[0]}, which is no part of a run: choose another --out")
        if found and not overwrite:
            kind = "a finished" if "result.json" in found else "an unfinished"
            raise UserError(f"{path} holds {kind} run: choose another --out or seed, or replace it with --overwrite")


def create(runs: Sequence[Run]) -> None:
    """Make the runs' folders with their config.json, all or none; whatever one held before is gone."""
    made: list[Path] = []
    for run in runs:
        description = {
            "preset": run.preset,
            "game": run.game,
            "seed": run.seed,
            "version": __version__,
            "environment": run.environment,
            "config": run.config.to_dict(),
        }
        try:
            if run.path.exists():
                shutil.rmtree(run.path)
            run.path.mkdir(parents=True)
            made.append(run.path)
            _write_json(run.path / "config.json", description)
        except OSError as error:
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
            raise _unusable(run.path, error) from error


def log(run: Run, row: dict[str, Any]) -> None:
    """Append one line to metrics.jsonl."""
    with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def save_agent(run: Run, params: dict[str, Tensor]) -> None:
    """Store one agent's weights."""
    plain = {name: p.detach().float().contiguous().cpu() for name, p in params.items()}
    _replace(run.path / "agent.safetensors", save(plain))


def save_result(run: Run, episodes: Sequence[float], measured: dict[str, Any]) -> dict[str, Any]:
    """Store every raw score with what produced it; return what was written."""
    score = sum(episodes) / len(episodes)
    result = {
        "preset": run.preset,
        "game": run.game,
        "seed": run.seed,
        "steps": run.config.schedule.steps,
        "episodes": list(episodes),
        "score": score,
        "human_normalised": normalised(run.game, score),
        "protocol": protocol(run),
        **measured,
        "version": __version__,
        "config": run.config.to_dict(),
    }
    _write_json(run.path / "result.json", result)
    return result


def load(path: Path) -> tuple[Run, dict[str, Tensor]]:
    """Read a run's description and its agent's weights; loading never runs code from a file."""
    if not path.is_dir():
        raise UserError(f"{path} is not a run's folder, such as runs/spr/pong/seed-0")
    for name, meaning in _FILES.items():
        if not (path / name).is_file():
            raise UserError(f"{path} has no {name}: {meaning}")
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
        run = Run(path, data["preset"], data["game"], int(data["seed"]), from_dict(data["config"]), data["environment"])
        weights = load_file(path / "agent.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{path} can't be read: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return run, {name: tensor.to(torch.float32) for name, tensor in weights.items()}


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"can't write to {path}: {error.strerror or error}")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    _replace(path, (json.dumps(data, indent=1) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename: a reader sees the old file or the new one, never a part."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
