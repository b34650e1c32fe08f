"""Owns one training job: runs and their fleets from the first step or the last checkpoint to the results.

It shows nothing itself: whatever happens goes to a consumer as an event.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spr import checkpoint, events, matching, resume, runs
from spr.checkpoint import Checkpoint, Spec, Writer
from spr.config import Config
from spr.envs import make
from spr.errors import UnusableError, UserError
from spr.evaluate import play
from spr.events import Consumer
from spr.fleet import Fleet, assemble, largest_fleet
from spr.games import normalised
from spr.hardware import device_name, product_dtype
from spr.runs import Run
from spr.train import Training

INTERRUPTED = 130
FAILED = 1
_MOST_METRICS = 1_000


@dataclass(frozen=True)
class TrainJob:
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


def run_training(
    job: TrainJob, tell: Consumer, stop: Callable[[], bool], resume_runs: bool = False, overwrite: bool = False
) -> int:
    """Train and evaluate everything that is not finished; return the exit code.

    `stop` is polled between steps: training saves and ends; what can be done again is interrupted at once.
    """
    paths = [job.folder(seed) for seed in job.seeds]
    if not resume_runs:
        runs.refuse_taken(paths, overwrite)
    with runs.locked(paths):
        results: list[dict[str, Any]] = []
        done = [seed for seed in job.seeds if resume_runs and job.finished(seed)]
        if done:
            tell(events.Skipped(done, "finished already"))
        diverged = [seed for seed in job.seeds if resume_runs and runs.diverged(job.folder(seed))]
        if diverged:
            tell(events.Skipped(diverged, "diverged (--overwrite starts again)"))
        left = [seed for seed in job.seeds if seed not in (*done, *diverged)]
        if left and len(left) > (most := largest_fleet(job.config, job.device)):
            raise UserError(
                f"{len(left)} agents do not fit into the free memory of the {job.device.type}, {most} do: train fewer "
                "seeds at once, or set a smaller replay.capacity"
            )
        for seeds in _fleets(job, left) if resume_runs else [left]:
            finished = _train_and_evaluate(job, seeds, tell, stop, resume_runs)
            if finished is None:
                return INTERRUPTED
            results += finished
    if results:
        tell(events.Finished(job.out, results))
    return 0 if len(results) + len(done) == len(job.seeds) else FAILED


def _fleets(job: TrainJob, seeds: Sequence[int]) -> list[list[int]]:
    """Divide unfinished runs into fleets that can go on together: those that were saved after the same step."""
    if not seeds:
        return []
    saved = {seed: set(checkpoint.steps_of(job.folder(seed))) for seed in seeds}
    if set.intersection(*saved.values()):
        return [list(seeds)]
    # Killed while the first checkpoints were written: apart they would round differently, so all begin again.
    begun = all((job.folder(seed) / "config.json").is_file() for seed in seeds)
    if begun and all(steps <= {job.checkpoint_every} for steps in saved.values()):
        return [list(seeds)]
    by_step: dict[int, list[int]] = {}
    for seed in seeds:
        by_step.setdefault(max(saved[seed], default=0), []).append(seed)
    return [by_step[step] for step in sorted(by_step)]


def _train_and_evaluate(
    job: TrainJob, seeds: Sequence[int], tell: Consumer, stop: Callable[[], bool], resume_runs: bool
) -> list[dict[str, Any]] | None:
    """Bring one fleet to its results; None if somebody asked to stop."""
    envs = make(job.game, len(seeds), obs=job.config.observation)
    try:
        mine = [job.run(seed, envs.protocol) for seed in seeds]
        fleet = assemble(job.config, envs, seeds, job.device, product_dtype(job.precision))
        training = Training(fleet)
        begun = [run for run in mine if resume_runs and matching.begun(run)]
        saved = _latest(training, mine, tell) if len(begun) == len(mine) else []
        if not saved:
            runs.refuse_taken([run.path for run in mine], overwrite=True)
            runs.create(mine)
        where = f"{device_name(job.device)}, {job.precision}"
        tell(events.FleetBegins(f"{job.preset} on {job.game}, {runs.seeds_text(seeds)}, {where}", envs.notice))
        before = 0.0
        if saved:
            _restore(training, mine, saved, tell, stop)
            before = float(saved[0].about["seconds"])
        finished, seconds = _train(training, mine, job.checkpoint_every, before, tell, stop)
        healthy = [i for i in range(len(mine)) if i not in training.diverged]
        for i in healthy:
            runs.save_agent(mine[i], {name: p[i] for name, p in fleet.state.params.items()}, training.step)
    finally:
        envs.close()
    if not finished:
        tell(events.Stopped(training.step))
        return None
    trained: dict[str, Any] = {"train_seconds": round(seconds, 1), "precision": job.precision}
    if training.restarts:
        trained["new_games_after_steps"] = training.restarts
    results = _evaluate(fleet, mine, healthy, trained, tell, stop) if healthy else []
    for i in healthy:
        checkpoint.remove(mine[i].path)
    return results


def _latest(training: Training, mine: Sequence[Run], tell: Consumer) -> list[Checkpoint]:
    """Read the newest checkpoints of one step that are good for all; what is not good is named and passed over.

    Nothing is returned where nothing has been saved yet.
    """
    steps = sorted(set.intersection(*(set(checkpoint.steps_of(run.path)) for run in mine)), reverse=True)
    for step in steps:

        def specs(about: Any, step: int = step) -> dict[str, Spec]:
            return resume.specs(training, step, min(len(about["metrics"]), _MOST_METRICS))

        found = []
        for run in mine:
            try:
                found.append(checkpoint.read(run.path, step, specs))
            except UnusableError as problem:
                tell(events.CheckpointRefused(checkpoint.path_of(run.path, step), str(problem)))
        if len(found) == len(mine):
            return found
    if steps:
        raise UserError(
            f"no checkpoint in {mine[0].path} can be used (a run goes on only on the kind of device it began on): "
            "--overwrite starts again"
        )
    return []


def _restore(
    training: Training, mine: Sequence[Run], saved: Sequence[Checkpoint], tell: Consumer, stop: Callable[[], bool]
) -> None:
    for step in resume.restore(training, saved):
        tell(events.Replaying(step, saved[0].step))
        if stop():
            raise KeyboardInterrupt
    for run in mine:
        runs.rewind(run, training.step)
    if training.restarts:
        tell(events.Restarted())


def _train(
    training: Training, mine: Sequence[Run], every: int, before: float, tell: Consumer, stop: Callable[[], bool]
) -> tuple[bool, float]:
    """Train to the end, or until somebody asks to stop; return whether it is the end, and the seconds of it all."""
    began = time.monotonic() - before
    schedule = training.fleet.config.schedule
    compiles = _compiles(training.fleet.device)
    writer = Writer()

    def save() -> None:
        seconds = time.monotonic() - began
        saved = {
            mine[i].path: one._replace(about=one.about | {"seconds": seconds})
            for i, one in enumerate(resume.snapshots(training))
            if i not in training.diverged
        }
        writer.write(list(saved), list(saved.values()))

    try:
        tell(events.TrainingBegins(schedule.steps))
        if compiles and schedule.learning_starts <= training.step < schedule.steps:
            tell(events.Compiling())
        for info in training.run():
            tell(events.Stepped(info))
            if compiles and info.step == schedule.learning_starts:
                tell(events.Compiling())
            for i in info.diverged:
                checkpoint.write(mine[i].path, resume.diverged_update(training, i), runs.DIVERGED_UPDATE)
                tell(events.Diverged(mine[i], runs.save_diverged(mine[i], training.diverged[i])))
            for i, row in enumerate(info.rows or []):
                if i not in training.diverged:
                    tell(events.Metrics(mine[i], row, time.monotonic() - began))
            if stop() or len(training.diverged) == len(mine):
                break
            if every and info.step % every == 0 and info.step < schedule.steps:
                save()
        save()
    finally:
        writer.close()
    return training.step == schedule.steps or len(training.diverged) == len(mine), time.monotonic() - began


def _compiles(device: torch.device) -> bool:
    """Say whether the first learning steps compile their code."""
    return device.type == "cuda"


def _evaluate(
    fleet: Fleet,
    mine: Sequence[Run],
    which: Sequence[int],
    trained: dict[str, Any],
    tell: Consumer,
    stop: Callable[[], bool],
) -> list[dict[str, Any]]:
    """Play the evaluation's games and store the results; where no random score is published, measure one beside."""
    began = time.monotonic()

    def tell_or_stop(event: events.Event) -> None:
        tell(event)
        if stop():
            raise KeyboardInterrupt

    config, game, seeds = fleet.config, mine[0].game, [fleet.seeds[i] for i in which]
    params = {name: p[list(which)] for name, p in fleet.state.params.items()}
    episodes = evaluate_agents(config, game, params, seeds, tell_or_stop)
    measured: dict[str, Any] = {
        **trained,
        "eval_seconds": round(time.monotonic() - began, 1),
        "agents_together": len(mine),
        "device": device_name(fleet.device),
    }
    extra: list[dict[str, Any]] = [{} for _ in which]
    if normalised(game, 0.0) is None:
        chance = evaluate_agents(config, game, params, seeds, tell_or_stop, epsilon=1.0)
        extra = [{"random_score": sum(scores) / len(scores)} for scores in chance]
    evaluated = [mine[i] for i in which]
    return [runs.save_result(run, e, measured | x) for run, e, x in zip(evaluated, episodes, extra, strict=True)]


def evaluate_agents(
    config: Config,
    game: str,
    params: dict[str, Tensor],
    seeds: Sequence[int],
    tell: Consumer,
    epsilon: float | None = None,
) -> list[list[float]]:
    """Play the evaluation's games, and return every raw score by agent."""
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(seeds)
    tell(events.Evaluated(title, 0, total))
    for playing in play(config, game, params, seeds, epsilon):
        tell(events.Evaluated(title, playing.finished, total))
    return [[score for score in games if score is not None] for games in playing.scores]
