"""Owns one training job: runs and their fleets from the first step or the last checkpoint to the results.

It shows nothing itself: whatever happens goes to a consumer as an event.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spr.agent.auxiliary_losses import check_names
from spr.common.errors import EnvironmentFault, StorageFault, UnusableError, UserError
from spr.common.hardware import device_name, free_unused, product_dtype
from spr.config.config import Config
from spr.envs.atari100k import normalised
from spr.envs.gymnasium_adapter import Argument
from spr.envs.registry import family, make, make_each
from spr.evaluation.scheduler import Agents, play
from spr.experiments import events
from spr.experiments.events import Consumer
from spr.experiments.run_saver import Saver, deleted, failure
from spr.runs import compatibility, metrics_files, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint, snapshot
from spr.training.checkpoint import Checkpoint, Spec
from spr.training.fleet import assemble, largest_fleet
from spr.training.loop import Training, row_interval

INTERRUPTED = 130
FAILED = 1
_MOST_METRICS = 1_000


class Member(NamedTuple):
    """One agent of a job: a game and a seed."""

    game: str
    seed: int


@dataclass(frozen=True)
class TrainJob:
    """What is to be trained, where, and how often it is saved: every game with every seed."""

    preset: str
    configs: Mapping[str, Config]  # by game; what some games differ by is the preset's to say
    seeds: tuple[int, ...]
    device: torch.device
    precision: str
    out: Path
    checkpoint_every: int
    name: str | None = None  # of the folder that its runs share, if not their preset's
    exactly: bool = False  # whether finished runs count only if they were made with this precision
    arguments: Mapping[str, Argument] = field(default_factory=dict)  # of its environments
    plugins: tuple[str, ...] = ()  # modules that were named, for the record
    log_every: int | None = None  # steps between two rows of metrics; None: a hundred rows in a run

    @property
    def members(self) -> list[Member]:
        """Every agent, game by game."""
        return [Member(game, seed) for game in self.configs for seed in self.seeds]

    def folder(self, member: Member) -> Path:
        """Return where an agent's run lives."""
        return run_folder.folder(self.out, self.name or self.preset, member.game, member.seed)

    def run(self, member: Member, environment: dict[str, Any]) -> Run:
        """Return an agent's run."""
        config = self.configs[member.game]
        every = row_interval(config, self.log_every)
        folder = self.folder(member)
        return Run(folder, self.preset, *member, config, environment, self.precision, None, self.plugins, every)

    def finished(self, member: Member) -> bool:
        """Say whether an agent's run has its result; a run with other settings in its folder is refused."""
        config = self.configs[member.game]
        every = row_interval(config, self.log_every)
        wanted = compatibility.Wanted(self.preset, *member, config, self.precision, self.exactly, every, self.arguments)
        return compatibility.finished_as(self.folder(member), wanted)


def run_training(
    job: TrainJob, tell: Consumer, stop: Callable[[], bool], resume_runs: bool = False, overwrite: bool = False
) -> int:
    """Train and evaluate everything that is not finished; return the exit code.

    `stop` is polled between steps: training saves and ends; what can be done again is interrupted at once.
    """
    for config in job.configs.values():
        check_names(config)
    paths = [job.folder(member) for member in job.members]
    if not resume_runs:
        run_folder.refuse_taken(paths, overwrite)
    with run_folder.locked(paths):
        results: list[dict[str, Any]] = []
        done = [member for member in job.members if resume_runs and job.finished(member)]
        for member in done:
            checkpoint.remove(job.folder(member))  # what a kill after its result has left
        if done:
            tell(events.Skipped(_named(done), "finished already"))
        diverged = [member for member in job.members if resume_runs and run_folder.diverged(job.folder(member))]
        if diverged:
            tell(events.Skipped(_named(diverged), "diverged (--overwrite starts again)"))
        left = [member for member in job.members if member not in (*done, *diverged)]
        _refuse_half_lost(job, left)
        fleets = _fleets(job, left, resume_runs)
        _refuse_impossible(job, fleets)
        for members in fleets:
            finished = _train_and_evaluate(job, members, tell, stop, resume_runs)
            if finished is None:
                return INTERRUPTED
            results += finished
    if results:
        tell(events.Finished(job.out, results))
    return 0 if len(results) + len(done) == len(job.members) else FAILED


def _refuse_half_lost(job: TrainJob, members: Sequence[Member]) -> None:
    """Look at every folder before the first fleet is trained: those that hold no run may hold nothing else."""
    for folder in (job.folder(member) for member in members):
        if not (folder / "config.json").is_file():
            run_folder.refuse_taken([folder], overwrite=True)
            if checkpoint.steps_of(folder):
                raise UserError(
                    f"{folder} holds checkpoints, but its config.json is gone: --overwrite, with that game and seed "
                    "alone, starts it again"
                )


def _refuse_impossible(job: TrainJob, fleets: Sequence[Sequence[Member]]) -> None:
    """Look at every fleet before the first is trained: whether its games are there, and whether it fits."""
    for i, members in enumerate(fleets):
        config = job.configs[members[0].game]
        if len(members) > (most := largest_fleet(config, job.device)):
            raise UserError(
                f"{len(members)} agents do not fit into the free memory of the {job.device.type}, {most} do: train "
                "fewer seeds or games at once, or set a smaller replay.capacity"
            )
        if i > 0:  # the first one's are made at once
            for game in {member.game for member in members}:
                make(game, 1, obs=config.observation, arguments=job.arguments).close()


def _named(members: Sequence[Member]) -> str:
    """Name agents for a person, game by game."""
    by_game: dict[str, list[int]] = {}
    for game, seed in members:
        by_game.setdefault(game, []).append(seed)
    if len({tuple(seeds) for seeds in by_game.values()}) == 1 and len(by_game) > 3:
        return f"{len(by_game)} games, {run_folder.seeds_text(next(iter(by_game.values())))}"
    return "; ".join(f"{game}, {run_folder.seeds_text(seeds)}" for game, seeds in by_game.items())


def _fleets(job: TrainJob, members: Sequence[Member], resume_runs: bool) -> list[list[Member]]:
    """Divide unfinished runs into fleets: of one configuration and family of games, and saved together if at all."""
    groups: dict[tuple[str, Config], list[Member]] = {}
    for member in members:
        groups.setdefault((family(member.game), job.configs[member.game]), []).append(member)
    if not resume_runs:
        return list(groups.values())
    return [fleet for group in groups.values() for fleet in _saved_together(job, group)]


def _saved_together(job: TrainJob, members: Sequence[Member]) -> list[list[Member]]:
    """Divide unfinished runs into those that were saved after the same step."""
    saved = {member: set(checkpoint.steps_of(job.folder(member))) for member in members}
    # Whoever was killed while checkpoints were written lacks the newest. One that ended by a fault has a later one that
    # nobody else has, and goes on alone.
    if min(max(steps, default=0) for steps in saved.values()) in set.intersection(*saved.values()):
        return [list(members)]
    # Killed while the first checkpoints were written: apart they would round differently, so all begin again.
    begun = all((job.folder(member) / "config.json").is_file() for member in members)
    if begun and all(steps <= {job.checkpoint_every} for steps in saved.values()):
        return [list(members)]
    by_step: dict[int, list[Member]] = {}
    for member in members:
        by_step.setdefault(max(saved[member], default=0), []).append(member)
    return [by_step[step] for step in sorted(by_step)]


class _Trained(NamedTuple):
    """What training leaves for the evaluation."""

    runs: list[Run]  # whose learning did not diverge
    params: dict[str, Tensor]  # theirs, [S, ...] each
    about: dict[str, Any]


def _train_and_evaluate(
    job: TrainJob, members: Sequence[Member], tell: Consumer, stop: Callable[[], bool], resume_runs: bool
) -> list[dict[str, Any]] | None:
    """Bring one fleet to its results; None if somebody asked to stop."""
    trained = _train_fleet(job, members, tell, stop, resume_runs)
    if trained is None:
        return None
    # The fleet is gone, and so may be its memory: another one can train while this one is judged.
    free_unused(job.device)
    results = _evaluate(job, trained, tell, stop) if trained.runs else []
    for run in trained.runs:
        if run_folder.finished(run.path):
            checkpoint.remove(run.path)
    return results


def _train_fleet(
    job: TrainJob, members: Sequence[Member], tell: Consumer, stop: Callable[[], bool], resume_runs: bool
) -> _Trained | None:
    """Train one fleet to its end, from the beginning or from its checkpoints; None if somebody asked to stop."""
    config = job.configs[members[0].game]
    envs = make_each([member.game for member in members], config.observation, job.arguments)
    try:
        mine = [job.run(member, rules) for member, rules in zip(members, envs.protocols, strict=True)]
        seeds = [member.seed for member in members]
        fleet = assemble(config, envs, seeds, job.device, product_dtype(job.precision))
        training = Training(fleet, job.log_every)
        begun = [run for run in mine if resume_runs and compatibility.begun(run)]
        saved = _latest(training, mine, tell) if len(begun) == len(mine) else []
        if not saved:
            run_folder.refuse_taken([run.path for run in mine], overwrite=True)
            run_folder.create(mine)
        where = f"{device_name(job.device)}, {job.precision}"
        tell(events.FleetBegins(f"{job.preset} on {_named(members)}, {where}", envs.notice))
        before = 0.0
        if saved:
            _restore(training, mine, saved, tell, stop)
            before = float(saved[0].about["seconds"])
        healthy, seconds = _train(training, mine, job.checkpoint_every, before, tell, stop)
    finally:
        envs.close()
    if healthy and training.step < config.schedule.steps:
        tell(events.Stopped(training.step))
        return None
    about = {
        "train_seconds": round(seconds, 1),
        "precision": job.precision,
        "agents_together": len(mine),
        "device": device_name(job.device),
    }
    if training.restarts:
        about["new_games_after_steps"] = training.restarts
    params = {name: p[healthy] for name, p in fleet.state.acting.items()}
    return _Trained([mine[i] for i in healthy], params, about)


def _latest(training: Training, mine: Sequence[Run], tell: Consumer) -> list[Checkpoint]:
    """Read the newest checkpoints of one step that are good for all; what is not good is named and passed over.

    Nothing is returned where nothing has been saved yet.
    """
    steps = sorted(set.intersection(*(set(checkpoint.steps_of(run.path)) for run in mine)), reverse=True)
    bad: dict[Path, int] = {}
    for step in steps:

        def specs(about: Any, step: int = step) -> dict[str, Spec]:
            snapshot.check(about)
            return snapshot.specs(training, step, min(len(about["metrics"]), _MOST_METRICS))

        found = []
        for run in mine:
            try:
                found.append(checkpoint.read(run.path, step, specs))
            except UnusableError as problem:
                tell(events.CheckpointRefused(checkpoint.path_of(run.path, step), str(problem)))
                bad[run.path] = bad.get(run.path, 0) + 1
        if len(found) == len(mine):
            return found
    if steps:
        worst = max(bad, key=lambda path: bad[path])
        raise UserError(
            f"no checkpoint in {worst} can be used (a run goes on only on the kind of device it began on, one of Atari "
            "only since version 0.9): --overwrite, with that game and seed alone, starts it again"
        )
    return []


def _restore(
    training: Training, mine: Sequence[Run], saved: Sequence[Checkpoint], tell: Consumer, stop: Callable[[], bool]
) -> None:
    for step in snapshot.restore(training, saved):
        tell(events.Replaying(step, saved[0].step))
        if stop():
            raise KeyboardInterrupt
    for run in mine:
        metrics_files.rewind(run.path, training.step)
    if training.restarts:
        tell(events.Restarted())


def _train(
    training: Training, mine: Sequence[Run], every: int, before: float, tell: Consumer, stop: Callable[[], bool]
) -> tuple[list[int], float]:
    """Train to the end, or until somebody asks to stop; return the agents that came so far, and the seconds of it."""
    began = time.monotonic() - before
    schedule = training.fleet.config.schedule
    compiles = _compiles(training.fleet.device)
    saver = Saver(training, mine, lambda: time.monotonic() - began, tell)
    try:
        tell(events.TrainingBegins(schedule.steps, mine))
        if compiles and schedule.learning_starts <= training.step < schedule.steps:
            tell(events.Compiling())
        for info in training.run():
            tell(events.Stepped(info))
            if compiles and info.step == schedule.learning_starts:
                tell(events.Compiling())
            saver.note(info)
            if stop() or not saver.going:
                break
            if every and info.step % every == 0 and info.step < schedule.steps:
                saver.save()
        saver.finish()
    finally:
        saver.close()
    return saver.going, time.monotonic() - began


def _compiles(device: torch.device) -> bool:
    """Say whether the first learning steps compile their code."""
    return device.type == "cuda"


def _evaluate(job: TrainJob, trained: _Trained, tell: Consumer, stop: Callable[[], bool]) -> list[dict[str, Any]]:
    """Judge a fleet and store the results; whose environment fails has none, and the others have theirs."""
    try:
        judged = _judge(job, trained, tell, stop)
    except EnvironmentFault as fault:
        if len(trained.runs) == 1:
            tell(failure(trained.runs[0], f"{fault}; its agent is saved: --resume judges it again"))
            return []
        # Agents score alike in any company, so they can as well be judged one by one.
        each = [
            _Trained([run], {name: p[[i]] for name, p in trained.params.items()}, trained.about)
            for i, run in enumerate(trained.runs)
        ]
        return [result for one in each for result in _evaluate(job, one, tell, stop)]
    results = []
    for run, scores, measured in judged:
        try:
            results.append(run_folder.save_result(run, scores, measured))
        except StorageFault as fault:
            if run.path.is_dir():
                raise StorageFault(f"{fault}; its agent is saved: --resume judges it again") from fault
            tell(failure(run, deleted(run)))
        else:
            tell(events.Scored(run, results[-1]))
    return results


def _judge(
    job: TrainJob, trained: _Trained, tell: Consumer, stop: Callable[[], bool]
) -> list[tuple[Run, list[float], dict[str, Any]]]:
    """Play the evaluation's games, and return every run's scores and what else was measured.

    Where no random score is published, one is measured beside.
    """
    began = time.monotonic()

    def tell_or_stop(event: events.Event) -> None:
        tell(event)
        if stop():
            raise KeyboardInterrupt

    config = trained.runs[0].config
    games, seeds = [run.game for run in trained.runs], [run.seed for run in trained.runs]

    def judged(which: Sequence[int], epsilon: float | None = None) -> list[Judged]:
        params = {name: p[list(which)] for name, p in trained.params.items()}
        mine = Agents([games[i] for i in which], params, [seeds[i] for i in which], job.arguments)
        return evaluate_agents(config, mine, tell_or_stop, epsilon)

    found = judged(range(len(games)))
    measured: dict[str, Any] = {**trained.about, "eval_seconds": round(time.monotonic() - began, 1)}
    extra = [_lengths(config, each.lengths) for each in found]
    if unpublished := [i for i, game in enumerate(games) if normalised(game, 0.0) is None]:
        for i, (scores, _) in zip(unpublished, judged(unpublished, epsilon=1.0), strict=True):
            extra[i]["random_score"] = sum(scores) / len(scores)
    whole = [measured | more for more in extra]
    return list(zip(trained.runs, [each.scores for each in found], whole, strict=True))


def _lengths(config: Config, lengths: Sequence[int]) -> dict[str, Any]:
    """Return how long the games were, and how many of them were cut off, if any."""
    cut = sum(length >= config.evaluation.max_steps for length in lengths)
    return {"episode_steps": list(lengths), **({"episodes_cut": cut} if cut else {})}


class Judged(NamedTuple):
    """Every game of an agent's evaluation."""

    scores: list[float]  # raw
    lengths: list[int]  # steps


def evaluate_agents(config: Config, agents: Agents, tell: Consumer, epsilon: float | None = None) -> list[Judged]:
    """Play the evaluation's games, and return every agent's."""
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(agents.seeds)
    tell(events.Evaluated(title, 0, total))
    for playing in play(config, agents, epsilon):
        tell(events.Evaluated(title, playing.finished, total))
    scores = [[score for score in each if score is not None] for each in playing.scores]
    return [Judged(*both) for both in zip(scores, playing.lengths, strict=True)]
