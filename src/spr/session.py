"""Owns one order of training: runs and their fleets from the first step or the last checkpoint to the results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spr import checkpoint, matching, runs
from spr.checkpoint import Checkpoint, UnusableError, Writer
from spr.config import Config
from spr.display import Bar, StopRequest
from spr.envs import make
from spr.errors import UserError
from spr.evaluate import play
from spr.fleet import Fleet, assemble
from spr.games import normalised
from spr.machine import device_name, free_memory, product_dtype
from spr.replay import memory_needed
from spr.representations import known
from spr.runs import Run
from spr.train import Tick, Training

INTERRUPTED = 130
FAILED = 1


@dataclass(frozen=True)
class Order:
    """What is to be trained, where, and how often it is saved."""

    preset: str
    game: str
    seeds: tuple[int, ...]
    config: Config
    device: torch.device
    precision: str
    out: Path
    checkpoint_every: int
    name: str | None = None  # of the folder that its runs share, if not their preset's
    exactly: bool = False  # whether finished runs count only if they were made with this precision

    def folder(self, seed: int) -> Path:
        """Return where the run of a seed lives."""
        return runs.folder(self.out, self.name or self.preset, self.game, seed)

    def run(self, seed: int, environment: dict[str, Any]) -> Run:
        """Return the run of a seed."""
        return Run(self.folder(seed), self.preset, self.game, seed, self.config, environment, self.precision)

    def finished(self, seed: int) -> bool:
        """Say whether the run of a seed has its result; a run with other settings in its folder is refused."""
        wanted = matching.Wanted(self.preset, self.game, seed, self.config, self.precision, self.exactly)
        return matching.finished_as(self.folder(seed), wanted)


def carry_out(order: Order, console: Console, resume: bool, overwrite: bool) -> int:
    """Train and judge everything that is not finished; return the exit code."""
    _refuse_too_large(order)
    paths = [order.folder(seed) for seed in order.seeds]
    if not resume:
        runs.refuse_taken(paths, overwrite)
    with runs.locked(paths):
        results: list[dict[str, Any]] = []
        done = [seed for seed in order.seeds if resume and order.finished(seed)]
        if done:
            console.print(f"finished already, skipped: {_seeds(done)}", highlight=False)
        broken = [seed for seed in order.seeds if resume and runs.failed(order.folder(seed))]
        if broken:
            console.print(f"failed, skipped: {_seeds(broken)}; --overwrite begins anew", highlight=False)
        left = [seed for seed in order.seeds if seed not in (*done, *broken)]
        for seeds in _fleets(order, left) if resume else [left]:
            finished = _train_and_judge(order, seeds, console, resume)
            if finished is None:
                return INTERRUPTED
            results += finished
    if results:
        _summary(console, order.out, results)
    return 0 if len(results) + len(done) == len(order.seeds) else FAILED


def _fleets(order: Order, seeds: Sequence[int]) -> list[list[int]]:
    """Divide unfinished runs into fleets that can go on together: those that were saved after the same step."""
    if not seeds:
        return []
    saved = {seed: set(checkpoint.steps_of(order.folder(seed))) for seed in seeds}
    if set.intersection(*saved.values()):
        return [list(seeds)]
    # Killed while the first checkpoints were written: apart they would round differently, so all begin again.
    begun = all((order.folder(seed) / "config.json").is_file() for seed in seeds)
    if begun and all(steps <= {order.checkpoint_every} for steps in saved.values()):
        return [list(seeds)]
    by_step: dict[int, list[int]] = {}
    for seed in seeds:
        by_step.setdefault(max(saved[seed], default=0), []).append(seed)
    return [by_step[step] for step in sorted(by_step)]


def _train_and_judge(order: Order, seeds: Sequence[int], console: Console, resume: bool) -> list[dict[str, Any]] | None:
    """Bring one fleet to its results; None if somebody asked to stop."""
    envs = make(order.game, len(seeds))
    try:
        mine = [order.run(seed, envs.protocol) for seed in seeds]
        fleet = assemble(order.config, envs, seeds, order.device, product_dtype(order.precision))
        training = Training(fleet)
        known_runs = [run for run in mine if resume and matching.begun(run)]
        saved = _latest(training, mine, console) if len(known_runs) == len(mine) else []
        if not saved:
            runs.refuse_taken([run.path for run in mine], overwrite=True)
            runs.create(mine)
        console.print(
            f"{order.preset} on {order.game}, {_seeds(seeds)}, {device_name(order.device)}, {order.precision}",
            highlight=False,
        )
        if envs.notice:
            console.print(envs.notice, highlight=False, soft_wrap=True)
        before = 0.0
        if saved:
            _restore(console, training, mine, saved)
            before = float(saved[0].about["seconds"])
        finished, seconds = _learn(console, training, mine, order.checkpoint_every, before)
        healthy = [i for i in range(len(mine)) if i not in training.faults]
        for i in healthy:
            runs.save_agent(mine[i], {name: p[i] for name, p in fleet.state.params.items()}, training.step)
    finally:
        envs.close()
    if not finished:
        console.print(f"stopped after {training.step:,} steps and saved; the same command with --resume goes on")
        return None
    trained: dict[str, Any] = {"train_seconds": round(seconds, 1), "precision": order.precision}
    if training.restarts:
        trained["new_games_after_steps"] = training.restarts
    results = _judge(console, fleet, mine, healthy, trained) if healthy else []
    for i in healthy:
        checkpoint.remove(mine[i].path)
    return results


def _latest(training: Training, mine: Sequence[Run], console: Console) -> list[Checkpoint]:
    """Read the newest checkpoints of one step that are good for all; what is not good is named and passed over.

    Nothing is returned where nothing has been saved yet.
    """
    steps = sorted(set.intersection(*(set(checkpoint.steps_of(run.path)) for run in mine)), reverse=True)
    for step in steps:
        found = []
        for run in mine:
            try:
                found.append(checkpoint.read(run.path, step, training.specs(step)))
            except UnusableError as problem:
                console.print(f"{checkpoint.path_of(run.path, step)} can't be used: {problem}", highlight=False)
        if len(found) == len(mine):
            return found
    if steps:
        raise UserError(
            f"no checkpoint in {mine[0].path} can be used (a run goes on only on the kind of device it began on): "
            "--overwrite begins anew"
        )
    return []


def _restore(console: Console, training: Training, mine: Sequence[Run], saved: Sequence[Checkpoint]) -> None:
    with Bar(console, "playing again", saved[0].step, "steps") as bar:
        for step in training.restore(saved):
            bar.show(step)
    for run in mine:
        runs.rewind(run, training.step)
    if training.restarts:
        console.print("this environment can't be restored: a new game begins, and the result will say so")


def _refuse_too_large(order: Order) -> None:
    agents = len(order.seeds)
    need, free = memory_needed(order.config, agents), free_memory(order.device)
    if need > free:
        raise UserError(
            f"the replay of {agents} agents takes {need / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free "
            f"on the {order.device.type}: train fewer seeds at once, or set a smaller replay.capacity"
        )


def _learn(console: Console, training: Training, mine: Sequence[Run], every: int, before: float) -> tuple[bool, float]:
    """Train to the end, or until somebody asks to stop; return whether it is the end, and the seconds of it all."""
    began = time.monotonic() - before
    last: list[dict[str, Any]] = []
    steps = training.fleet.config.schedule.steps
    writer = Writer()

    def save() -> None:
        seconds = time.monotonic() - began
        saved = {
            mine[i].path: one._replace(about=one.about | {"seconds": seconds})
            for i, one in enumerate(training.snapshots())
            if i not in training.faults
        }
        writer.write(list(saved), list(saved.values()))

    try:
        with StopRequest() as stop, Bar(console, "training", steps, "steps") as bar:
            learns = training.fleet.config.schedule.random_steps
            if training.step >= learns:
                _announce(bar, training)
            for tick in training.ticks():
                last = tick.rows or last
                bar.show(tick.step, _figures(tick, last))
                if tick.step == learns:
                    _announce(bar, training)
                for i in tick.faults:
                    checkpoint.write(mine[i].path, training.dump(i), "fault.spr")
                    console.print(runs.save_fault(mine[i], training.faults[i]), highlight=False, soft_wrap=True)
                for i, row in enumerate(tick.rows or []):
                    if i not in training.faults:
                        runs.log(mine[i], row, time.monotonic() - began)
                if stop.check() or len(training.faults) == len(mine):
                    break
                if every and tick.step % every == 0 and tick.step < steps:
                    save()
        save()
    finally:
        writer.close()
    return training.step == steps or len(training.faults) == len(mine), time.monotonic() - began


def _announce(bar: Bar, training: Training) -> None:
    """Say what a GPU's first learning step will be busy with, if there is one to come."""
    fleet = training.fleet
    if fleet.device.type == "cuda" and training.step < fleet.config.schedule.steps:
        bar.pause("compiling; about a minute the first time, from the cache in seconds")


def _judge(
    console: Console, fleet: Fleet, mine: Sequence[Run], which: Sequence[int], trained: dict[str, Any]
) -> list[dict[str, Any]]:
    """Play the evaluation's games and store the results; where no random score is published, measure one beside."""
    began = time.monotonic()
    config, game, seeds = fleet.config, mine[0].game, [fleet.seeds[i] for i in which]
    params = {name: p[list(which)] for name, p in fleet.state.params.items()}
    episodes = show_games(console, config, game, params, seeds)
    measured: dict[str, Any] = {
        **trained,
        "eval_seconds": round(time.monotonic() - began, 1),
        "agents_together": len(mine),
        "device": device_name(fleet.device),
    }
    extra: list[dict[str, Any]] = [{} for _ in which]
    if normalised(game, 0.0) is None:
        chance = show_games(console, config, game, params, seeds, epsilon=1.0)
        extra = [{"random_score": sum(scores) / len(scores)} for scores in chance]
    judged = [mine[i] for i in which]
    return [runs.save_result(run, e, measured | x) for run, e, x in zip(judged, episodes, extra, strict=True)]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}"


def _figures(tick: Tick, rows: list[dict[str, Any]]) -> str:
    """Return the recent score (mean over the fleet) and losses of the last row."""
    scores = [score for score in tick.scores if score is not None]
    parts = [f"score {sum(scores) / len(scores):,.1f}"] if scores else []
    for name in ("rl", *known()):
        values = [row[name] for row in rows if name in row]
        parts += [f"{name} {sum(values) / len(values):.2f}"] if values else []
    return "  ".join(parts)


def show_games(
    console: Console,
    config: Config,
    game: str,
    params: dict[str, Tensor],
    seeds: Sequence[int],
    epsilon: float | None = None,
) -> list[list[float]]:
    """Play the evaluation's games with a bar, and return every raw score by agent."""
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(seeds)
    with Bar(console, title, total, "games") as bar:
        for playing in play(config, game, params, seeds, epsilon):
            bar.show(playing.finished)
    return [[score for score in games if score is not None] for games in playing.scores]


def _summary(console: Console, out: Path, results: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    reference = "human-normalised" if results[0]["human_normalised"] is not None else "random agent"
    for column in ("game", "seed", "mean score", "games", reference, "training", "evaluation"):
        table.add_column(column, justify="right")
    for result in results:
        human, chance = result["human_normalised"], result.get("random_score")
        table.add_row(
            result["game"],
            str(result["seed"]),
            f"{result['score']:,.2f}",
            str(len(result["episodes"])),
            f"{human:.3f}" if human is not None else f"{chance:,.2f}",
            f"{result['train_seconds']:,.0f} s",
            f"{result['eval_seconds']:,.0f} s",
        )
    console.print(table)
    console.print(f"stored under {out}", highlight=False)
