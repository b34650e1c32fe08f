"""Owns training and judging from Python: what the command line does, as functions that return what was made."""

import operator
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import gymnasium

from spr import trained_agent as agents
from spr.common import json_files, plugins
from spr.common.errors import EnvironmentFault, UserError, one_line, shown
from spr.common.hardware import choose_device, choose_precision, tune
from spr.config.presets import PRESETS, preset_config
from spr.envs.atari100k import normalised
from spr.envs.gymnasium_adapter import Maker
from spr.envs.registry import named_games, provide, provided
from spr.evaluation.scheduler import Agents
from spr.experiments import events, loggers
from spr.experiments.events import Consumer, Event, to_all, write_metrics
from spr.experiments.train_job import TrainJob, evaluate_agents, run_training
from spr.runs import metrics_files, run_folder
from spr.trained_agent import Agent

Env = Maker | gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: where it lies, and what came of it."""

    folder: Path
    result: dict[str, Any] = field(repr=False)  # everything that result.json holds

    @property
    def game(self) -> str:
        """What was played."""
        return str(self.result["game"])

    @property
    def seed(self) -> int:
        """The agent's seed."""
        return int(self.result["seed"])

    @property
    def scores(self) -> list[float]:
        """The raw score of every game of the evaluation."""
        return list(self.result["episodes"])

    @property
    def score(self) -> float:
        """Their mean."""
        return float(self.result["score"])

    def curve(self) -> dict[str, list[Any]]:
        """Return the rows that were logged while training, by column: step, score, the losses and so on."""
        said = self.result.get("checksums", {}).get("metrics.jsonl")
        if said is not None and said != json_files.checksum_of(self.folder / "metrics.jsonl"):
            warnings.warn(f"{self.folder / 'metrics.jsonl'} has lost lines since its run was finished", stacklevel=2)
        return _columns(metrics_files.logged(self.folder)[0])

    def training_games(self) -> dict[str, list[Any]]:
        """Return the games that were played while training, by column: the step of their end, score and length."""
        return _columns(metrics_files.logged(self.folder)[1])

    def agent(self, device: str = "auto") -> Agent:
        """Return the trained agent."""
        return agents.load(self.folder, device)


@dataclass(frozen=True)
class Evaluation:
    """The raw scores of an agent's games."""

    scores: list[float]
    game: str

    @property
    def score(self) -> float:
        """Their mean."""
        return fmean(self.scores)

    @property
    def human_normalised(self) -> float | None:
        """Where random play is 0 and a human's score 1; None for a game that no published score of these exists for."""
        return normalised(self.game, self.score)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def presets() -> dict[str, str]:
    """Return the methods by name, with a line about each; `spr.preset(name)` is a method's whole configuration."""
    return {name: listed.summary for name, listed in PRESETS.items()}


def train(
    games: str | Sequence[str],
    *,
    preset: str = "spr",
    seeds: int | Sequence[int] = 0,
    changes: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    tell: Consumer | None = None,
    **more: Any,
) -> list[TrainedRun]:
    """Train one agent per game and seed, judge them, and return their runs, game by game.

    Games are named as on the command line; 'all' are the 26 of Atari 100k. An environment of your own is given by
    `env`, the environment itself or a function that makes one, and its runs are stored under the name `games`.
    `changes` are fields of the configuration, such as {"learner.depth": 3}. Everything is stored under `out`.

    Also: `steps`, `device`, `precision`, `name`, `checkpoint_every`, `env_args`, `log` (such as ["csv"]), `log_every`,
    and `resume` or `overwrite` for runs that are already there. `tell` is called with every event (see
    `spr.train_events`).
    """
    order = _order(games, preset, seeds, changes, out, **more)
    problems: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, events.Failed | events.Diverged):
            problems.append(event.message)

    with order.env:
        order.carry_out(to_all(listen, *([] if tell is None else [tell])), lambda: False)
        made = []
        for member in order.job.members:
            folder = order.job.folder(member)
            if (result := run_folder.result(folder)) is None:
                raise UserError(problems[0] if problems else f"{folder} has no result")
            made.append(TrainedRun(folder, result))
    return made


def train_events(games: str | Sequence[str], **more: Any) -> Iterator[Event]:
    """Train like `train`, and yield what happens: steps, rows of metrics, games of the evaluation, results.

    The training goes on beside whoever looks on, and waits for nobody. Closing the iterator stops it after the step
    that it is at, and saves: `resume=True` goes on.
    """
    order = _order(games, **more)
    told: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            with order.env:
                order.carry_out(told.put, stop.is_set)
            told.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever looks on
            told.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while (event := told.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        stop.set()
        worker.join()


def evaluate(
    agent: Agent | str | Path,
    env: str | Env | None = None,
    episodes: int | None = None,
    *,
    seed: int | None = None,
    epsilon: float | None = None,
) -> Evaluation:
    """Play whole games with an agent, without network noise, and return their raw scores.

    It plays the game that it learnt, unless another one is named or an environment is given.
    """
    agent = agent if isinstance(agent, Agent) else agents.load(agent)
    tune(agent.device, choose_precision("auto", agent.device))
    if isinstance(env, str) or env is None:
        game = agent.game if env is None else named_games([env])[0]
        arguments = agent.run.arguments if env is None else {}
    else:
        game, arguments = f"{run_folder.plain_name(agent.game)}-given", {}
        provide(game, _maker(env))
    config = agent.config if episodes is None else agent.config.override({"evaluation.episodes": episodes})
    params = {name: tensor[None] for name, tensor in agent.weights.items()}
    who = Agents([game], params, [agent.run.seed if seed is None else seed], arguments)
    try:
        (judged,) = evaluate_agents(config, who, lambda _: None, epsilon)
    except EnvironmentFault as fault:
        raise UserError(str(fault)) from fault
    return Evaluation(judged.scores, game)


class _Order(NamedTuple):
    """What was asked for: a job, and everything around it."""

    job: TrainJob
    env: AbstractContextManager[None]  # in which an environment that was given is there
    resume: bool
    overwrite: bool
    log: tuple[str, ...]

    def carry_out(self, tell: Consumer, stop: Callable[[], bool]) -> None:
        """Train and judge what was asked for."""
        with loggers.make(self.log, self.job.out) as logger:
            run_training(self.job, to_all(write_metrics, logger, tell), stop, self.resume, self.overwrite)


def _order(
    games: str | Sequence[str],
    preset: str = "spr",
    seeds: int | Sequence[int] = 0,
    changes: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    **more: Any,
) -> _Order:
    """Turn the arguments of `train` into an order; nothing of it is done yet."""
    known = {"steps", "device", "precision", "name", "checkpoint_every", "env", "env_args", "resume", "overwrite"}
    known |= {"log", "log_every"}
    if unknown := sorted(more.keys() - known):
        raise TypeError(f"train() got an unexpected argument '{unknown[0]}'; there are {', '.join(sorted(known))}")
    names = [games] if isinstance(games, str) else _listed(games)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"games are names, 'pong' or ['pong', 'breakout'], not {shown(games)}")
    if not isinstance(changes, Mapping | None) or not all(isinstance(field, str) for field in changes or ()):
        raise UserError(f'changes are fields by name, such as {{"learner.depth": 3}}, not {shown(changes)}')
    if more.get("resume") and more.get("overwrite"):
        raise UserError("resume=True goes on with a run and overwrite=True starts it again: choose one")
    named = named_games(names)
    numbers = _whole_numbers(seeds)
    run_folder.check_seeds(numbers)
    if not named or not numbers:
        raise UserError(f"there is nothing to train: no {'seed' if named else 'game'} is given")
    if (env := more.get("env")) is not None and len(named) != 1:
        raise UserError("an environment of your own has one name")
    if (every := more.get("log_every")) is not None and every < 1:
        raise UserError("log_every takes a number of at least 1")
    log = more.get("log", ())
    run_folder.check_name(more.get("name"))
    changes = dict(changes or {}) | ({"schedule.steps": more["steps"]} if "steps" in more else {})
    device = choose_device(more.get("device", "auto"))
    precision = choose_precision(more.get("precision", "auto"), device)
    tune(device, precision)
    job = TrainJob(
        preset=preset,
        configs={game: preset_config(preset, game).override(changes) for game in named},
        seeds=numbers,
        device=device,
        precision=precision,
        out=Path(out),
        checkpoint_every=more.get("checkpoint_every", 5_000),
        name=more.get("name"),
        arguments=more.get("env_args", {}),
        plugins=tuple(dict.fromkeys(plugins.modules_of(named))),
        log_every=every,
    )
    return _Order(
        job,
        nullcontext() if env is None else provided(named[0], _maker(env)),
        more.get("resume", False),
        more.get("overwrite", False),
        (log,) if isinstance(log, str) else tuple(log),
    )


def _listed(given: Any) -> list[Any]:
    """Return what was given as a list: one thing, or several."""
    try:
        return list(given)
    except TypeError:
        return [given]


def _whole_numbers(seeds: Any) -> tuple[int, ...]:
    try:
        numbers = _listed(seeds)
        if any(isinstance(number, bool) for number in numbers):
            raise TypeError
        return tuple(map(operator.index, numbers))
    except TypeError:
        raise UserError(f"seeds are whole numbers, seeds=3 or seeds=[0, 1, 2], not {shown(seeds)}") from None


def _maker(env: Env) -> Maker:
    """Return what makes environments like this one: fleets and evaluations take several."""
    if not isinstance(env, gymnasium.Env):
        if not callable(env):
            raise UserError(
                f"env is an environment or a function that makes one, env=lambda: MyEnv(), not {shown(env)}"
            )
        return env
    if env.spec is not None:
        return partial(gymnasium.make, env.spec)
    try:
        return partial(deepcopy, deepcopy(env))
    except Exception as error:  # whatever its parts raise
        said = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"this environment can be neither made again nor copied ({said}): give a function, env=lambda: MyEnv()"
        ) from error
