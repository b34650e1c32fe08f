"""Owns training and evaluating from Python: what the command line does, as functions that return the results."""

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
from spr.common import json_files
from spr.common.errors import EnvironmentFault, UserError, one_line, shown
from spr.common.hardware import choose_precision, tune
from spr.config.presets import PRESETS
from spr.envs.atari100k import normalised
from spr.envs.gymnasium_adapter import Maker
from spr.envs.registry import named_games, provide, provided
from spr.evaluation.batched_policy import Agents
from spr.experiments import events, loggers
from spr.experiments.agent_evaluation import evaluate_agents
from spr.experiments.events import Consumer, Event, to_all, write_metrics
from spr.experiments.job_runner import JobRunner
from spr.experiments.train_request import TrainJob, TrainRequest
from spr.runs import compatibility, metrics_files, run_files, run_folder
from spr.trained_agent import Agent

Env = Maker | gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder and its result."""

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
        expected = self.result.get("checksums", {}).get("metrics.jsonl")
        if expected is not None and expected != json_files.checksum_of(self.folder / "metrics.jsonl"):
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
    """An agent's games: their raw scores, and how many steps each took."""

    scores: list[float]
    game: str
    lengths: list[int] = field(default_factory=list, repr=False)

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
    on_event: Consumer | None = None,
    **more: Any,
) -> list[TrainedRun]:
    """Train and evaluate one agent per game and seed, and return their runs, game by game.

    Games are named as on the command line; 'all' are the 26 of Atari 100k. A custom environment is given by
    `env`, the environment itself or a function that makes one, and its runs are stored under the name `games`.
    `changes` are fields of the configuration, such as {"learner.depth": 3}. Everything is stored under `out`.

    Also: `steps`, `device`, `precision`, `name`, `checkpoint_every`, `env_args`, `log` (such as ["csv"]), `log_every`,
    and `resume` or `overwrite` for runs that are already there. `on_event` is called with every event (see
    `spr.train_events`).
    """
    order = _order(games, preset, seeds, changes, out, **more)
    problems: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, events.Failed | events.Diverged):
            problems.append(event.message)

    with order.env:
        order.carry_out(to_all(listen, *([] if on_event is None else [on_event])), lambda: False)
        made = []
        for member in order.job.request.members:
            folder = order.job.request.folder(member)
            if (result := run_folder.result(folder)) is None:
                raise UserError(problems[0] if problems else f"{folder} has no result")
            made.append(TrainedRun(folder, result))
    return made


def train_events(games: str | Sequence[str], **more: Any) -> Iterator[Event]:
    """Train like `train`, and yield what happens: steps, rows of metrics, games of the evaluation, results.

    Training runs in a thread of its own and does not wait for the events to be read. Closing the iterator stops it
    after the present step, and saves: `resume=True` resumes.
    """
    order = _order(games, **more)
    happened: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            with order.env:
                order.carry_out(happened.put, stop.is_set)
            happened.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            happened.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while (event := happened.get()) is not None:
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
    on_event: Consumer | None = None,
) -> Evaluation:
    """Play whole games with an agent, without network noise, and return their raw scores.

    It plays the game that it learnt, with the ROM it learnt with, unless another one is named or an environment is
    given. `on_event` is called with every event.
    """
    agent = agent if isinstance(agent, Agent) else agents.load(agent)
    try:
        return play(agent, env, episodes, seed, epsilon, on_event or to_all())
    except EnvironmentFault as fault:
        raise UserError(str(fault)) from fault


def play(
    agent: Agent,
    env: str | Env | None,
    episodes: int | None,
    seed: int | None,
    epsilon: float | None,
    on_event: Consumer,
) -> Evaluation:
    """Evaluate an agent for the command line and for Python; an environment that fails raises `EnvironmentFault`."""
    tune(agent.device, choose_precision("auto", agent.device))
    if env is None:
        compatibility.refuse_other_rom(agent.run)
    if isinstance(env, str) or env is None:
        game = agent.game if env is None else named_games([env])[0]
        arguments = agent.run.arguments if env is None else {}
    else:
        game, arguments = f"{run_files.plain_name(agent.game)}-given", {}
        provide(game, _maker(env))
    config = agent.config if episodes is None else agent.config.override({"evaluation.episodes": episodes})
    params = {name: tensor[None] for name, tensor in agent.weights.items()}
    who = Agents([game], params, [agent.run.seed if seed is None else seed], arguments)
    (played,) = evaluate_agents(config, who, on_event, epsilon)
    return Evaluation(played.scores, game, played.lengths)


class _Order(NamedTuple):
    """A request, and the environment that was given with it."""

    job: TrainJob
    env: AbstractContextManager[None]  # in which that environment is there

    def carry_out(self, on_event: Consumer, stop: Callable[[], bool]) -> None:
        """Train and evaluate what was asked for."""
        with loggers.make(self.job.request.log, self.job.request.out) as logger:
            JobRunner(self.job, to_all(write_metrics, logger, on_event), stop).run()


def _order(
    games: str | Sequence[str],
    preset: str = "spr",
    seeds: int | Sequence[int] = 0,
    changes: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    **more: Any,
) -> _Order:
    """Turn the arguments of `train` into an order; nothing of it is done yet."""
    known = {*TrainRequest.__dataclass_fields__, "steps", "env"} - {
        "games",
        "preset",
        "seeds",
        "changes",
        "out",
        "plugin",
    }
    if unknown := sorted(more.keys() - known):
        raise TypeError(f"train() got an unexpected argument '{unknown[0]}'; there are {', '.join(sorted(known))}")
    names = [games] if isinstance(games, str) else _listed(games)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"games are names, 'pong' or ['pong', 'breakout'], not {shown(games)}")
    if not isinstance(changes, Mapping | None) or not all(isinstance(field, str) for field in changes or ()):
        raise UserError(f'changes are fields by name, such as {{"learner.depth": 3}}, not {shown(changes)}')
    if (env := more.pop("env", None)) is not None and len(names) != 1:
        raise UserError("a custom environment has one name")
    steps = {"schedule.steps": more.pop("steps")} if "steps" in more else {}
    more["env_args"] = tuple(more.get("env_args", {}).items())
    more["log"] = (more["log"],) if isinstance(more.get("log"), str) else tuple(more.get("log", ()))
    request = TrainRequest(
        games=tuple(named_games(names)),
        preset=preset,
        seeds=_whole_numbers(seeds),
        changes=tuple((dict(changes or {}) | steps).items()),
        out=Path(out),
        **more,
    )
    for game in request.games:
        request.config(game)  # refuses what can't be before a GPU is touched
    job = TrainJob.here(request)
    tune(job.device, job.precision)
    return _Order(job, nullcontext() if env is None else provided(request.games[0], _maker(env)))


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
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"this environment can be neither made again nor copied ({reason}): give a function, env=lambda: MyEnv()"
        ) from error
