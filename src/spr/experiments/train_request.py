"""Owns what a training is asked for: one request, which Python, the command line and sweeps make, and its job here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from spr.common import plugins
from spr.common.errors import UserError, plural
from spr.common.hardware import choose_device, choose_precision
from spr.config.config import Config, Value, parse_override
from spr.config.presets import preset_config
from spr.envs.gymnasium_adapter import Argument, parse_arguments
from spr.envs.registry import named_games
from spr.experiments import loggers
from spr.runs import compatibility, metrics_files, run_files
from spr.runs.run_folder import Run
from spr.training.loop import row_interval

_MOST_SEEDS = 10_000  # of a range


class Member(NamedTuple):
    """One agent of a request: a game and a seed."""

    game: str
    seed: int


@dataclass(frozen=True)
class TrainRequest:
    """Train one agent per game and seed by one preset. It refuses what can't be, and becomes a command line."""

    games: tuple[str, ...]
    preset: str = "spr"
    seeds: tuple[int, ...] = (0,)
    changes: tuple[tuple[str, Value], ...] = ()  # fields of the configuration, with their values
    env_args: tuple[tuple[str, Argument], ...] = ()  # of Gymnasium environments
    device: str = "auto"
    precision: str = "auto"  # a finished run counts only with the same precision, if one is named here
    out: Path = Path("runs")
    name: str | None = None  # of the folder that its runs share, if not their preset's
    checkpoint_every: int = 5_000  # steps; 0: only when stopped
    log: tuple[str, ...] = ()
    log_every: int | None = None  # steps between two rows of metrics; None: a hundred rows in a run
    plugin: tuple[str, ...] = ()  # modules that were named
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be, in the one place for every way to ask."""
        if not self.games or not self.seeds:
            raise UserError(f"there is nothing to train: no {'seed' if self.games else 'game'} is given")
        if self.resume and self.overwrite:
            raise UserError("resume continues a run and overwrite starts it again: choose one")
        if self.checkpoint_every < 0:
            raise UserError("checkpoint-every takes a number of steps, or 0 for none")
        if self.log_every is not None and self.log_every < 1:
            raise UserError("log-every takes a number of at least 1")
        run_files.check_name(self.name)
        run_files.check_seeds(self.seeds)
        loggers.check(self.log)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Take what the command line was given; options that are not of a training are passed over."""
        changes = dict(parse_override(text) for text in options["set"])
        given = {name: options[name] for name in cls.__dataclass_fields__ if name in options}
        return cls(
            **given
            | {
                "games": tuple(named_games(options["games"])),
                "seeds": tuple(parse_seeds(options["seeds"])),
                "changes": tuple(with_steps(changes, options["steps"]).items()),
                "env_args": tuple(parse_arguments(options["env_arg"]).items()),
                "log": tuple(options["log"]),
                "plugin": tuple(options["plugin"]),
            }
        )

    def to_argv(self) -> list[str]:
        """Return the arguments of `spr` that ask for the same."""
        argv = ["train", *self.games, "--preset", self.preset, *(["--name", self.name] if self.name else [])]
        argv += ["--seeds", *map(str, self.seeds), "--out", str(self.out)]
        argv += ["--device", self.device, "--precision", self.precision]
        argv += ["--checkpoint-every", str(self.checkpoint_every)]
        argv += [f"--{name}" for name in ("resume", "overwrite") if getattr(self, name)]
        argv += ["--log", *self.log] if self.log else []
        argv += ["--log-every", str(self.log_every)] if self.log_every else []
        for option, pairs in (("--set", self.changes), ("--env-arg", self.env_args)):
            argv += [part for name, value in pairs for part in (option, f"{name}={value}")]
        return argv + [part for module in self.plugin for part in ("--plugin", module)]

    @property
    def members(self) -> list[Member]:
        """Every agent, game by game."""
        return [Member(game, seed) for game in self.games for seed in self.seeds]

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of its environments by name."""
        return dict(self.env_args)

    @property
    def games_text(self) -> str:
        """The games by name, or how many there are."""
        if len(self.games) <= 3:
            return ", ".join(self.games)
        return f"{plural(len(self.games), 'game')} ({self.games[0]} to {self.games[-1]})"

    def __str__(self) -> str:
        """Name it for the user."""
        first, last = self.seeds[0], self.seeds[-1]
        in_order = len(self.seeds) > 2 and self.seeds == tuple(range(first, last + 1))
        seeds = f"seeds {first}-{last}" if in_order else run_files.seeds_text(self.seeds)
        return f"{self.preset} on {self.games_text}, {seeds}"

    def config(self, game: str) -> Config:
        """Return the configuration of its runs of a game."""
        return preset_config(self.preset, game).override(dict(self.changes))

    def folder(self, member: Member) -> Path:
        """Return where an agent's run lives."""
        return run_files.folder(self.out, self.name or self.preset, *member)


@dataclass(frozen=True)
class TrainJob:
    """A request with the device and the precision that it is carried out with."""

    request: TrainRequest
    device: torch.device
    precision: str

    @classmethod
    def here(cls, request: TrainRequest) -> Self:
        """Choose both as this machine has them."""
        device = choose_device(request.device)
        return cls(request, device, choose_precision(request.precision, device))

    def run(self, member: Member, environment: dict[str, Any]) -> Run:
        """Return an agent's run."""
        request, config = self.request, self.request.config(member.game)
        named = tuple(dict.fromkeys([*request.plugin, *plugins.modules_of(request.games)]))
        every = row_interval(config, request.log_every)
        folder = request.folder(member)
        return Run(folder, request.preset, *member, config, environment, self.precision, None, named, every)

    def finished(self, member: Member) -> bool:
        """Say whether an agent's run has its result; a run with other settings in its folder is refused."""
        request, config = self.request, self.request.config(member.game)
        wanted = compatibility.ExpectedRun(
            request.preset,
            *member,
            config,
            self.precision,
            exactly=request.precision != "auto",
            log_every=row_interval(config, request.log_every),
            arguments=request.arguments,
        )
        return compatibility.finished_as(request.folder(member), wanted)

    def steps_done(self) -> float | None:
        """Return which share of its training steps the slowest of its runs has made; None where none has begun."""
        found = [metrics_files.last_step(self.request.folder(member)) for member in self.request.members]
        known = [step for step in found if step is not None]
        if not known:
            return None
        return (min(known) if len(known) == len(found) else 0) / self.request.config(
            self.request.games[0]
        ).schedule.steps

    def command(self) -> list[str]:
        """Return the arguments of `spr` that train it in a process of its own, or resume it."""
        device, out = str(self.device), self.request.out.absolute()
        return replace(self.request, device=device, precision=self.precision, out=out, resume=True).to_argv()

    def log_file(self) -> Path:
        """Return where that process writes what it says."""
        request = self.request
        games = request.games[0] if len(request.games) == 1 else f"{request.games[0]}-and-{len(request.games) - 1}-more"
        first = Member(games, request.seeds[0])
        folder = run_files.folder(request.out / run_files.LOGS, request.name or request.preset, *first)
        several = f"{request.seeds[0]}-and-{len(request.seeds) - 1}-more"
        seeds = "-".join(map(str, request.seeds)) if len(request.seeds) <= 10 else several
        return folder.with_name(f"seeds-{seeds}.txt")


def with_steps(changes: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """Return the changes with a number of steps that was given by itself."""
    both = dict(changes)
    if steps is not None and both.setdefault("schedule.steps", steps) != steps:
        raise UserError(f"--steps {steps} and --set schedule.steps={both['schedule.steps']}: choose one")
    return both


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Read seeds: numbers and ranges, with spaces or commas between them."""
    seeds: list[int] = []
    for text in (part for whole in texts for part in whole.split(",") if part):
        first, dash, last = text.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"seeds are whole numbers and ranges, such as 0 1 5-9, not '{text}'")
        if dash and int(last) < int(first):
            raise UserError(f"'{text}' is no range of seeds: the smaller one comes first")
        if dash and int(last) - int(first) >= _MOST_SEEDS:
            raise UserError(f"'{text}' are more seeds than a command takes: {_MOST_SEEDS:,} at the most")
        seeds += range(int(first), int(last or first) + 1)
    run_files.check_seeds(seeds)
    return seeds
