"""Owns the plan of a sweep: the fleets that its runs are trained in, and what each will cost in time and memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from spr.agent.auxiliary_losses import check_names
from spr.common.errors import UserError
from spr.common.hardware import device_name
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.envs.atari100k import reference_table
from spr.envs.registry import family, make
from spr.experiments.train_request import TrainJob, TrainRequest
from spr.runs import run_folder
from spr.training.fleet import fleet_memory, largest_fleet

T = TypeVar("T")

# Of a sweep, unless asked for others. On a GPU larger ones gain little per agent (docs/explanation/performance.md); a
# CPU gains nothing by them, and smaller ones are sooner finished.
LARGEST_FLEET = {"cuda": 32, "cpu": 10}


class Cost(NamedTuple):
    """What a job is expected to take."""

    seconds: float | None  # unknown where nothing was measured on such a device
    memory: int  # bytes


def plan(presets: Sequence[str], whole: TrainJob, largest: int, together: int | None) -> list[TrainJob]:
    """Divide a job, for each of these presets, into fleets of at most `largest` agents; what can't work is refused.

    A fleet holds as many games as can share one, and of each as many seeds as then fit.
    Fleets that are trained on this machine are no larger than what fits its memory, `together` of them at a time; None
    means another machine.
    """
    request = whole.request
    if request.name is not None and len(presets) > 1:
        raise UserError(f"--name is the folder of one method's runs, but there are {len(presets)}: sweep one at a time")
    twice = next((preset for preset in presets if list(presets).count(preset) > 1), None)
    if twice is not None:
        raise UserError(f"the preset {twice} is given twice")
    for game in request.games:  # refuses an unknown one
        config = replace(request, preset=presets[0]).config(game)
        make(game, 1, obs=config.observation, arguments=request.arguments).close()
    jobs = []
    for mine in (replace(request, preset=preset) for preset in presets):
        check_names(mine.config(mine.games[0]))
        groups: dict[tuple[str, Config], list[str]] = {}  # games that can share a fleet
        for game in mine.games:
            groups.setdefault((family(game), mine.config(game)), []).append(game)
        for (_, config), games in groups.items():
            size = min(largest, largest_fleet(config, whole.device, together)) if together else largest
            for some in _parts(games, math.ceil(len(games) / size)):
                fleets = math.ceil(len(mine.seeds) / max(1, size // len(some)))
                jobs += [_part(whole, mine, some, seeds) for seeds in _parts(mine.seeds, fleets)]
    return jobs


def _part(whole: TrainJob, request: TrainRequest, games: Sequence[str], seeds: Sequence[int]) -> TrainJob:
    """Return a job for some games and seeds of a request, on the device of another job."""
    return replace(whole, request=replace(request, games=tuple(games), seeds=tuple(seeds)))


def unfinished(jobs: Iterable[TrainJob]) -> list[TrainJob]:
    """Return what of the jobs has no result yet; folders that hold runs with other settings are refused.

    What is finished of a job that is left is skipped by its command.
    """
    left = []
    for job in jobs:
        request = job.request
        members = [member for member in request.members if not job.finished(member)]
        games = [game for game in request.games if any(member.game == game for member in members)]
        seeds = [seed for seed in request.seeds if any(member.seed == seed for member in members)]
        left += [_part(job, request, games, seeds)] if members else []
    return left


class CostModel:
    """How long runs take here: as finished runs of this sweep took, or as was measured on such a device before."""

    def __init__(self, jobs: Iterable[TrainJob], device: torch.device) -> None:
        """Look at what is finished. If there is no such device here, the runs are made elsewhere: any device counts."""
        here = device.type != "cuda" or torch.cuda.is_available()
        # A CPU's threads depend on the environment, and say little of its speed.
        name = device_name(device).partition(",")[0] if here else None
        self._steps: dict[str, dict[int, list[float]]] = {}  # by preset and fleet: seconds per step
        self._eval_seconds: list[float] = []  # seconds of evaluation per agent
        for job in jobs:
            for member in job.request.members:
                self._learn(job.request.preset, run_folder.result(job.request.folder(member)), name)
        rows = [row for row in reference_table("rates") if row["device"].partition(",")[0] == name]
        self._known: dict[str, dict[int, float]] = {}
        self._known_eval_seconds: dict[str, list[float]] = {}
        for row in rows:
            self._known.setdefault(row["preset"], {})[int(row["agents"])] = float(row["step_ms"]) / 1e3
            self._known_eval_seconds.setdefault(row["preset"], []).append(float(row["evaluation_s_per_agent"]))

    def cost(self, job: TrainJob) -> Cost:
        """Return what a job is expected to take; methods that never ran here as long as SPR with as many updates."""
        preset, config = job.request.preset, job.request.config(job.request.games[0])
        agents = len(job.request.members)
        need = fleet_memory(config, agents, job.device)
        seen = {size: median(found) for size, found in self._steps.get(preset, {}).items()}
        like = preset if preset in self._known else "spr"
        if not seen:
            more = config.schedule.updates_per_step / preset_config(like).schedule.updates_per_step
            seen = {size: more * seconds for size, seconds in self._known.get(like, {}).items()}
        eval_seconds = self._eval_seconds or self._known_eval_seconds.get(like, [])
        if not seen or not eval_seconds:
            return Cost(None, need)
        training = config.schedule.steps * _between(seen, agents)
        return Cost(training + agents * median(eval_seconds) * config.evaluation.episodes / 100, need)

    def _learn(self, preset: str, result: dict[str, Any] | None, device: str | None) -> None:
        if result is None or device not in (None, str(result.get("device")).partition(",")[0]):
            return
        try:
            together = int(result["agents_together"])
            sizes = self._steps.setdefault(preset, {})
            sizes.setdefault(together, []).append(result["train_seconds"] / result["steps"])
            self._eval_seconds.append(result["eval_seconds"] / together * 100 / len(result["episodes"]))
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            return  # no measurement; what is wrong with a result is the report's to say


def _between(seen: dict[int, float], agents: int) -> float:
    """Interpolate between measured fleets; above the largest, time grows with the number of agents."""
    sizes = sorted(seen)
    return float(np.interp(agents, sizes, [seen[size] for size in sizes])) * max(1.0, agents / sizes[-1])


def _parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Divide games or seeds into parts of nearly equal size, in their order."""
    sizes = [len(items) // count + (i < len(items) % count) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [items[end - size : end] for end, size in zip(ends, sizes, strict=True)]
