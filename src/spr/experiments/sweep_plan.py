"""Owns the plan of a sweep: the fleets that its runs are trained in, and what each will cost in time and memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from spr.agent.auxiliary_losses import check_names
from spr.common.errors import UserError, plural
from spr.common.hardware import device_name
from spr.config.config import Config, parse_override
from spr.config.presets import preset_config
from spr.envs.atari100k import reference_table
from spr.envs.gymnasium_adapter import parse_arguments
from spr.envs.registry import family, make
from spr.experiments.train_job import Member
from spr.runs import compatibility, metrics_files, run_folder
from spr.training.fleet import fleet_memory, largest_fleet
from spr.training.loop import row_interval

T = TypeVar("T")

# Of a sweep, unless asked for others. On a GPU larger ones gain little per agent (docs/performance.md); a CPU gains
# nothing by company, and smaller ones are sooner finished.
LARGEST_FLEET = {"cuda": 32, "cpu": 10}


@dataclass(frozen=True)
class Job:
    """One fleet: games and seeds, every game with every seed, that are trained together by one method."""

    preset: str
    games: tuple[str, ...]
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        """Name it for a person."""
        return f"{self.preset} on {self.games_text}, {_shortly(self.seeds)}"

    @property
    def games_text(self) -> str:
        """The games by name, or how many there are."""
        if len(self.games) <= 3:
            return ", ".join(self.games)
        return f"{plural(len(self.games), 'game')} ({self.games[0]} to {self.games[-1]})"

    @property
    def members(self) -> list[Member]:
        """Every agent, game by game."""
        return [Member(game, seed) for game in self.games for seed in self.seeds]


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
    arguments: tuple[str, ...] = ()  # NAME=VALUE of environments, as on the command line
    plugins: tuple[str, ...] = ()  # modules, as on the command line
    log_every: int | None = None  # steps between two rows of metrics; None: a hundred rows in a run
    loggers: tuple[str, ...] = ()

    def config(self, preset: str, game: str) -> Config:
        """Return the configuration of a method's runs on a game."""
        return preset_config(preset, game).override(dict(parse_override(text) for text in self.changes))

    def folder(self, job: Job, member: Member) -> Path:
        """Return where one of its runs lives."""
        return run_folder.folder(self.out, self.name or job.preset, *member)

    def finished(self, job: Job, member: Member) -> bool:
        """Say whether one of its runs has its result; a run with other settings in its folder is refused."""
        config = self.config(job.preset, member.game)
        every, given = row_interval(config, self.log_every), parse_arguments(self.arguments)
        wanted = compatibility.Wanted(job.preset, *member, config, self.precision, self.exactly, every, given)
        return compatibility.finished_as(self.folder(job, member), wanted)

    def steps_done(self, job: Job) -> float | None:
        """Return which share of its training steps the slowest of a job's runs has made; None where none has."""
        found = [metrics_files.last_step(self.folder(job, member)) for member in job.members]
        known = [step for step in found if step is not None]
        if not known:
            return None
        return (min(known) if len(known) == len(found) else 0) / self.config(job.preset, job.games[0]).schedule.steps

    def log(self, job: Job) -> Path:
        """Return where a job's command writes what it says."""
        games = job.games[0] if len(job.games) == 1 else f"{job.games[0]}-and-{len(job.games) - 1}-more"
        folder = run_folder.folder(self.out / run_folder.LOGS, self.name or job.preset, games, job.seeds[0])
        several = f"{job.seeds[0]}-and-{len(job.seeds) - 1}-more"
        return folder.with_name(f"seeds-{'-'.join(map(str, job.seeds)) if len(job.seeds) <= 10 else several}.txt")

    def command(self, job: Job) -> list[str]:
        """Return the arguments of `spr` that train a job, or go on with it."""
        seeds = [str(seed) for seed in job.seeds]
        where = ["--out", str(self.out.absolute()), "--device", str(self.device), "--precision", self.precision]
        kept = ["--checkpoint-every", str(self.checkpoint_every), "--resume"]
        changed = [part for text in self.changes for part in ("--set", text)]
        changed += [part for text in self.arguments for part in ("--env-arg", text)]
        changed += [part for module in self.plugins for part in ("--plugin", module)]
        named = ["--name", self.name] if self.name else []
        rows = ["--log-every", str(self.log_every)] if self.log_every else []
        logged = [*(["--log", *self.loggers] if self.loggers else []), *rows]
        order = ["train", *job.games, "--preset", job.preset, *named, "--seeds", *seeds]
        return [*order, *where, *kept, *logged, *changed]


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

    A fleet holds as many games as can share one, and of each as many seeds as then fit.
    Fleets that are trained on this machine are no larger than what fits its memory, `together` of them at a time; None
    means another machine.
    """
    if settings.name is not None and len(presets) > 1:
        raise UserError(f"--name is the folder of one method's runs, but there are {len(presets)}: sweep one at a time")
    for what, names in (("preset", presets), ("game", games), ("seed", seeds)):
        twice = next((name for name in names if list(names).count(name) > 1), None)
        if twice is not None:
            raise UserError(f"the {what} {twice} is given twice")
    for game in games:  # an unknown one is refused in the words of its owner
        config = settings.config(presets[0], game)
        make(game, 1, obs=config.observation, arguments=parse_arguments(settings.arguments)).close()
    jobs = []
    for preset in presets:
        check_names(settings.config(preset, games[0]))
        groups: dict[tuple[str, Config], list[str]] = {}  # games that can share a fleet
        for game in games:
            groups.setdefault((family(game), settings.config(preset, game)), []).append(game)
        for (_, config), mine in groups.items():
            size = min(largest, largest_fleet(config, settings.device, together)) if together else largest
            for some in _parts(mine, math.ceil(len(mine) / size)):
                fleets = math.ceil(len(seeds) / max(1, size // len(some)))
                jobs += [Job(preset, tuple(some), tuple(part)) for part in _parts(seeds, fleets)]
    return jobs


def unfinished(jobs: Iterable[Job], settings: Settings) -> list[Job]:
    """Return what of the jobs has no result yet; folders that hold runs with other settings are refused.

    What is finished of a job that is left is skipped by its command.
    """
    left = []
    for job in jobs:
        members = [member for member in job.members if not settings.finished(job, member)]
        games = tuple(game for game in job.games if any(member.game == game for member in members))
        seeds = tuple(seed for seed in job.seeds if any(member.seed == seed for member in members))
        left += [Job(job.preset, games, seeds)] if members else []
    return left


class Rates:
    """How long runs take here: as finished runs of this sweep took, or as was measured on such a device before."""

    def __init__(self, jobs: Iterable[Job], settings: Settings) -> None:
        """Look at what is finished. If there is no such device here, the runs are made elsewhere: any device counts."""
        self._settings = settings
        here = settings.device.type != "cuda" or torch.cuda.is_available()
        # A CPU's threads depend on the environment, and say little of its speed.
        name = device_name(settings.device).partition(",")[0] if here else None
        self._steps: dict[str, dict[int, list[float]]] = {}  # by preset and fleet: seconds per step
        self._eval_seconds: list[float] = []  # seconds of evaluation per agent
        for job in jobs:
            for member in job.members:
                self._learn(job.preset, run_folder.result(settings.folder(job, member)), name)
        rows = [row for row in reference_table("rates") if row["device"].partition(",")[0] == name]
        self._known: dict[str, dict[int, float]] = {}
        self._known_eval_seconds: dict[str, list[float]] = {}
        for row in rows:
            self._known.setdefault(row["preset"], {})[int(row["agents"])] = float(row["step_ms"]) / 1e3
            self._known_eval_seconds.setdefault(row["preset"], []).append(float(row["evaluation_s_per_agent"]))

    def cost(self, job: Job) -> Cost:
        """Return what a job is expected to take; methods that never ran here as long as SPR with as many updates."""
        config, agents = self._settings.config(job.preset, job.games[0]), len(job.members)
        need = fleet_memory(config, agents, self._settings.device)
        seen = {size: median(found) for size, found in self._steps.get(job.preset, {}).items()}
        like = job.preset if job.preset in self._known else "spr"
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


def _shortly(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return run_folder.seeds_text(seeds)
