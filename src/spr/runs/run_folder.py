"""Owns a run's folder: configuration, metrics, weights and result, each file replaced whole or not at all.

A run lives in OUT/NAME/GAME/seed-N, where the name is the preset's, or one given to a variant of it. What grows line by
line is in `metrics_files`.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from spr.common import atomic_files, json_files
from spr.common.errors import UnusableError, UserError
from spr.common.old_formats import current_preset
from spr.common.version import __version__
from spr.config.config import Config, from_dict
from spr.config.presets import is_atari_100k
from spr.envs.atari100k import normalised
from spr.runs import metrics_files, weights_file
from spr.runs.run_files import DIVERGED_UPDATE, _ours, unusable

_MODULE = r"[\w.]{1,200}"  # a module's name, in a file
_FILES = {
    "config.json": "it is not a run's folder",
    "agent.safetensors": "its agent was not saved, or has been removed",
}


class Run(NamedTuple):
    """One agent's run: what it is and where it lives."""

    path: Path
    preset: str
    game: str
    seed: int
    config: Config
    environment: dict[str, Any]  # how its games are played, as the environment states it
    precision: str | None = None  # of its products while learning; None where a file does not say
    step: int | None = None  # after which its agent was saved; None where a file does not say
    plugins: tuple[str, ...] = ()  # modules that were named when it was made: for the record, never imported for it
    log_every: int | None = None  # steps between two rows of metrics; None where it does not matter
    sealed: bool = True  # whether its agent's file has a checksum; those up to version 0.10 have none

    @property
    def arguments(self) -> dict[str, bool | int | float | str]:
        """The arguments of its environment."""
        return _arguments_of(self.environment)


def _arguments_of(environment: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the arguments of an environment from a file: plain values by name, or it is refused."""
    found = environment.get("arguments", {})
    plain = isinstance(found, dict) and all(isinstance(value, bool | int | float | str) for value in found.values())
    if not plain or not all(name.isidentifier() for name in found):
        raise UnusableError("the arguments of its environment are not plain values by name")
    return dict(found)


def protocol(run: Run) -> dict[str, Any]:
    """Return everything a score depends on besides the method.

    The name atari-100k is kept for exactly that benchmark: another budget, evaluation or game is another protocol.
    """
    config = run.config
    rules = {
        "stacked_frames": config.observation.stack,
        "stack_before_an_episode": "black",
        "learning_reward": "clipped to [-1, 1]" if config.replay.clip_rewards else "raw",
        "learning_terminal": "lost life or game over; a lost life does not reset the game",
        "training_steps": config.schedule.steps,
        "evaluation_episodes": config.evaluation.episodes,
        "evaluation_epsilon": config.evaluation.epsilon,
        "evaluation_noise": False,
    }
    if config.evaluation.max_steps != Config().evaluation.max_steps:  # results of earlier versions do not name it
        rules["evaluation_max_steps"] = config.evaluation.max_steps
    benchmark = run.environment["name"] == "atari" and is_atari_100k(run.preset, run.game, config)
    return run.environment | rules | ({"name": "atari-100k"} if benchmark else {})


def result(path: Path) -> dict[str, Any] | None:
    """Return what a finished run has written of itself, or None where it can't be used; `spr report` says why."""
    try:
        return checked_result(path / "result.json")
    except UnusableError:
        return None


def checked_result(file: Path) -> dict[str, Any]:
    """Read a result that has everything a result has; `UnusableError` says what is wrong with it."""
    data = json_files.json_object(file)
    json_files.check_result(data)
    return data


def save_diverged(run: Run, step: int) -> str:
    """Write down that learning has diverged, and return that as a message."""
    line = (
        f"{run.game}, seed {run.seed} diverged: a loss or gradient was not finite in the updates after step {step:,}; "
        f"this agent is stopped, and {run.path / DIVERGED_UPDATE} holds the state before that update and its random "
        "numbers"
    )
    metrics_files.rewind(run.path, step - 1)
    with atomic_files.writing(run.path / "diverged.json"):
        about = {"step": step, "seed": run.seed, "message": line, "version": __version__}
        _write_json(run.path / "diverged.json", about)
    return line


def create(runs: Sequence[Run]) -> None:
    """Make the runs' folders with their config.json, all or none; whatever a run held before is gone."""
    made: list[Path] = []
    for run in runs:
        try:
            _clear(run.path)
            run.path.mkdir(parents=True, exist_ok=True)
            made.append(run.path)
            _write_json(run.path / "config.json", json_files.sealed(description(run)))
        except OSError as error:
            for path in made:
                _clear(path)
            raise unusable(run.path, error) from error


def _clear(path: Path) -> None:
    """Remove a run from its folder, and the folder unless it holds other files."""
    for entry in path.iterdir() if path.is_dir() else ():
        if _ours(entry.name):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def description(run: Run) -> dict[str, Any]:
    """Return what a run is, as it stands in config.json."""
    return {
        "preset": run.preset,
        "game": run.game,
        "seed": run.seed,
        "version": __version__,
        "environment": run.environment,
        **({} if run.precision is None else {"precision": run.precision}),
        **({"plugins": list(run.plugins)} if run.plugins else {}),
        **({} if run.log_every is None else {"log_every": run.log_every}),
        "config": run.config.to_dict(),
    }


def save_agent(run: Run, params: dict[str, Tensor], step: int) -> None:
    """Store one agent's weights, and the step after which they are these."""
    path = run.path / "agent.safetensors"
    with atomic_files.writing(path):
        atomic_files.replace(path, weights_file.to_bytes(params, {"step": step}, run.config.to_dict()))


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
        # By these a report knows whether a curve has lost lines since.
        "checksums": {
            name: found
            for name in metrics_files.CURVES
            if (found := json_files.checksum_of(run.path / name)) is not None
        },
    }
    with atomic_files.writing(run.path / "result.json"):
        _write_json(run.path / "result.json", json_files.sealed(result))
    return result


def load_run(path: Path) -> tuple[Run, dict[str, Tensor]]:
    """Read a run's description and its agent's weights, from its folder or from an exported file.

    Loading never runs code from a file, and what was damaged is refused (see `weights_file`).
    """
    if path.is_dir():
        for name, meaning in _FILES.items():
            if not (path / name).is_file():
                raise UserError(f"{path} has no {name}: {_unfinished(path) or meaning}")
    elif not path.is_file():
        raise UserError(f"{path} is neither a run's folder, such as runs/spr/pong/seed-0, nor an exported agent")
    try:
        file = path / "agent.safetensors" if path.is_dir() else path
        about = weights_file.about(file)
        described = _description(path) if path.is_dir() else json_files.LoadedJson({}, sealed=False)
        data = about.words | described.data
        run = _described(path, data)._replace(sealed=about.checksum is not None)
        found = weights_file.read_weights(file, about, run.config, data["config"])
        if described.sealed and not run.sealed:  # agents had one before descriptions had
            raise UnusableError("its agent has lost its checksum")
    except (UserError, UnusableError) as error:
        raise UserError(f"{path} can't be used: {error}") from error
    return run, found


def _unfinished(path: Path) -> str:
    """Say what can be done with a run that has been saved, and has not come to its end; nothing of any other."""
    saved = (path / "config.json").is_file() and any(path.glob("checkpoint-*"))
    end = "'spr watch' plays it as it was saved last, and 'spr train' with --resume finishes it"
    return f"its run is not finished; {end}" if saved else ""


def describe(path: Path) -> Run:
    """Read a run's description from its folder, whether its agent has been saved or not."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: {_FILES['config.json']}")
    try:
        return _described(path, _description(path).data)
    except (UserError, UnusableError) as error:
        raise UserError(f"{path} can't be used: {error}") from error


def _description(path: Path) -> json_files.LoadedJson:
    try:
        return json_files.load_json(path / "config.json", weights_file.LARGEST_DESCRIPTION)
    except UnusableError as problem:
        raise UnusableError(f"its config.json can't be read: {problem}") from problem


def _described(path: Path, data: dict[str, Any]) -> Run:
    """Return the run that a file describes; what it says is compared with what a description has to be."""
    for name in ("preset", "game", *(["precision"] if data.get("precision") is not None else [])):
        json_files.check_name(data, name)
    json_files.check_seed(data)
    environment = data.get("environment")
    if not isinstance(environment, dict) or not isinstance(environment.get("name"), str):
        raise UnusableError("its environment has no name")
    _arguments_of(environment)
    named = data.get("plugins", [])
    if not isinstance(named, list) or not all(isinstance(n, str) and re.fullmatch(_MODULE, n) for n in named):
        raise UnusableError("its plug-ins are not modules' names")
    step = str(data.get("step", 0))  # in the metadata of files up to version 0.10 a text
    if not re.fullmatch("[0-9]{1,10}", step, re.ASCII):
        raise UnusableError("its step is not a whole number")
    return Run(
        path,
        current_preset(data["preset"]),
        data["game"],
        data["seed"],
        from_dict(data.get("config")),
        environment,
        data.get("precision"),
        int(step) if "step" in data else None,
        tuple(named),
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    atomic_files.replace(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
