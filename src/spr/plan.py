"""Owns the plan of a sweep: the fleets that its runs are trained in, and what each will cost in time and memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from spr import matching, runs
from spr.config import Config, parse_override
from spr.envs import make
from spr.errors import UserError
from spr.fleet import fleet_memory, largest_fleet
from spr.games import reference_table
from spr.hardware import device_name
from spr.presets import preset_config

LARGEST_FLEET = 10  # of a sweep, unless asked for more: larger ones gain little per agent (docs/performance.md)


@dataclass(frozen=True)
class Job:
    """One fleet: the seeds of a game that are trained together by one method."""

    preset: str
    game: str
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        """Name it for a person."""
        return f"{self.preset} on {self.game}, {_shortly(self.seeds)}"


@dataclass(frozen=True)
class Settings:
    """What all runs of a sweep share."""

    out: Path
    device: torch.device
    precision: str
    changes: tuple[str, ...]  # FIELD=VALUE, as on the command line
    checkpoint_every: int
    name: str | None = None  # of the folder that its runs share, if not their preset's
    exactly: bool = False  # whether finished runs count only if they were made with this precision

    def config(self, job: Job) -> Config:
        """Return the configuration of a job's runs."""
        return preset_config(job.preset, job.game).override(dict(parse_override(text) for text in self.changes))

    def folder(self, job: Job, seed: int) -> Path:
        """Return where one of its runs lives."""
        return runs.folder(self.out, self.name or job.preset, job.game, seed)

    def finished(self, job: Job, seed: int) -> bool:
        """Say whether one of its runs has its result; a run with other settings in its folder is refused."""
        wanted = matching.Wanted(job.preset, job.game, seed, self.config(job), self.precision, self.exactly)
        return matching.finished_as(self.folder(job, seed), wanted)

    def log(self, job: Job) -> Path:
        """Return where a job's command writes what it says."""
        folder = runs.folder(self.out / runs.LOGS, self.name or job.preset, job.game, job.seeds[0])
        return folder.with_name(f"seeds-{'-'.join(map(str, job.seeds))}.txt")

    def command(self, job: Job) -> list[str]:
        """Return the arguments of `spr` that train a job, or go on with it."""
        seeds = [str(seed) for seed in job.seeds]
        where = ["--out", str(self.out.absolute()), "--device", self.device.type, "--precision", self.precision]
        kept = ["--checkpoint-every", str(self.checkpoint_every), "--resume"]
        changed = [part for text in self.changes for part in ("--set", text)]
        named = ["--name", self.name] if self.name else []
        return ["train", job.game, "--preset", job.preset, *named, "--seeds", *seeds, *where, *kept, *changed]


class Cost(NamedTuple):
    """What a job is expected to take."""

    seconds: float | None  # unknown where nothing was measured on such a device
    memory: int  # bytes


def plan(
    presets: Sequence[str],
    games: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    largest: int,
    together: int | None,
) -> list[Job]:
    """Divide presets x games x seeds into fleets of at most `largest` agents; whatever can't work is refused here.

    Fleets that are trained on this machine are no larger than what fits its memory, `together` of them at a time; None
    means another machine.
    """
    if settings.name is not None and len(presets) > 1:
        raise UserError(f"--name is the folder of one method's runs, but there are {len(presets)}: sweep one at a time")
    for what, names in (("preset", presets), ("game", games), ("seed", seeds)):
        twice = next((name for name in names if list(names).count(name) > 1), None)
        if twice is not None:
            raise UserError(f"the {what} {twice} is given twice")
    jobs = []
    for game in games:
        for preset in presets:
            whole = Job(preset, game, tuple(seeds))
            config = settings.config(whole)
            make(game, 1, obs=config.observation).close()  # an unknown game is refused in the words of its owner
            size = min(largest, largest_fleet(config, settings.device, together)) if together else largest
            fleets = math.ceil(len(seeds) / size)
            jobs += [Job(preset, game, part) for part in _parts(whole.seeds, fleets)]
    return jobs


def unfinished(jobs: Iterable[Job], settings: Settings) -> list[Job]:
    """Return what of the jobs has no result yet; folders that hold runs with other settings are refused."""
    left = []
    for job in jobs:
        seeds = tuple(seed for seed in job.seeds if not settings.finished(job, seed))
        left += [Job(job.preset, job.game, seeds)] if seeds else []
    return left


class Rates:
    """How long runs take here: as finished runs of this sweep took, or as was measured on such a device before."""

    def __init__(self, jobs: Iterable[Job], settings: Settings) -> None:
        """Look at what is finished. If there is no such device here, the runs are made elsewhere: any device counts."""
        self._settings = settings
        here = settings.device.type != "cuda" or torch.cuda.is_available()
        name = device_name(settings.device) if here else None
        self._steps: dict[str, dict[int, list[float]]] = {}  # by preset and fleet: seconds per step
        self._eval_seconds: list[float] = []  # seconds of evaluation per agent
        for job in jobs:
            for seed in job.seeds:
                self._learn(job.preset, runs.result(settings.folder(job, seed)), name)
        rows = [row for row in reference_table("rates") if row["device"] == name]
        self._known = {int(row["agents"]): float(row["step_ms"]) / 1e3 for row in rows}
        self._known_eval_seconds = [float(row["evaluation_s_per_agent"]) for row in rows]

    def cost(self, job: Job) -> Cost:
        """Return what a job is expected to take; methods that never ran here as long as SPR."""
        config, agents = self._settings.config(job), len(job.seeds)
        need = fleet_memory(config, agents, self._settings.device)
        seen = {size: median(found) for size, found in self._steps.get(job.preset, {}).items()} or self._known
        eval_seconds = self._eval_seconds or self._known_eval_seconds
        if not seen or not eval_seconds:
            return Cost(None, need)
        training = config.schedule.steps * _between(seen, agents)
        return Cost(training + agents * median(eval_seconds) * config.evaluation.episodes / 100, need)

    def _learn(self, preset: str, result: dict[str, Any] | None, device: str | None) -> None:
        if result is None or device not in (None, result.get("device")):
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


def _parts(seeds: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Divide seeds into parts of nearly equal size, in their order."""
    sizes = [len(seeds) // count + (i < len(seeds) % count) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [seeds[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _shortly(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return runs.seeds_text(seeds)
