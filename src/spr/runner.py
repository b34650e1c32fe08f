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

from spr import checkpoint, events, matching, resume, runs
from spr.aux_losses import check_loss
from spr.checkpoint import Checkpoint, Spec, Writer
from spr.config import Config
from spr.envs import family, make, make_each
from spr.errors import EnvironmentFault, UnusableError, UserError
from spr.evaluation import Agents, play
from spr.events import Consumer
from spr.fleet import assemble, largest_fleet
from spr.games import normalised
from spr.gym_envs import Argument
from spr.hardware import device_name, free_unused, product_dtype
from spr.runs import Run
from spr.training import StepInfo, Training, row_interval

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
        return runs.folder(self.out, self.name or self.preset, member.game, member.seed)

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
        wanted = matching.Wanted(self.preset, *member, config, self.precision, self.exactly, every, self.arguments)
        return matching.finished_as(self.folder(member), wanted)


def run_training(
    job: TrainJob, tell: Consumer, stop: Callable[[], bool], resume_runs: bool = False, overwrite: bool = False
) -> int:
    """Train and evaluate everything that is not finished; return the exit code.

    `stop` is polled between steps: training saves and ends; what can be done again is interrupted at once.
    """
    for config in job.configs.values():
        check_loss(config)
    paths = [job.folder(member) for member in job.members]
    if not resume_runs:
        runs.refuse_taken(paths, overwrite)
    with runs.locked(paths):
        results: list[dict[str, Any]] = []
        done = [member for member in job.members if resume_runs and job.finished(member)]
        if done:
            tell(events.Skipped(_named(done), "finished already"))
        diverged = [member for member in job.members if resume_runs and runs.diverged(job.folder(member))]
        if diverged:
            tell(events.Skipped(_named(diverged), "diverged (--overwrite starts again)"))
        left = [member for member in job.members if member not in (*done, *diverged)]
        _refuse_half_lost(job, left)
        fleets = _fleets(job, left, resume_runs)
        _refuse_impossible(job, fleets)
        for members in fleets:
            try:
                finished = _train_and_evaluate(job, members, tell, stop, resume_runs)
            except EnvironmentFault as fault:
                tell(events.Failed(_fault_text(job, members, fault)))
                continue
            if finished is None:
                return INTERRUPTED
            results += finished
    if results:
        tell(events.Finished(job.out, results))
    return 0 if len(results) + len(done) == len(job.members) else FAILED


def _fault_text(job: TrainJob, members: Sequence[Member], fault: EnvironmentFault) -> str:
    """Say whose environment failed and what has become of the others."""
    whose = f"seed {members[fault.place].seed}: " if fault.place < len(members) else ""
    kept = [step for member in members for step in checkpoint.steps_of(job.folder(member))]
    beside = "" if len(members) == 1 else "; those trained beside it are saved too"
    saved = f"saved after step {max(kept):,}{beside}: --resume goes on" if kept else "nothing was learnt yet"
    return f"{whose}{fault}; {saved}"


def _refuse_half_lost(job: TrainJob, members: Sequence[Member]) -> None:
    """Look at every folder before the first fleet is trained: those that hold no run may hold nothing else."""
    for folder in (job.folder(member) for member in members):
        if not (folder / "config.json").is_file():
            runs.refuse_taken([folder], overwrite=True)
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
        return f"{len(by_game)} games, {runs.seeds_text(next(iter(by_game.values())))}"
    return "; ".join(f"{game}, {runs.seeds_text(seeds)}" for game, seeds in by_game.items())


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
    if set.intersection(*saved.values()):
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
        begun = [run for run in mine if resume_runs and matching.begun(run)]
        saved = _latest(training, mine, tell) if len(begun) == len(mine) else []
        if not saved:
            runs.refuse_taken([run.path for run in mine], overwrite=True)
            runs.create(mine)
        where = f"{device_name(job.device)}, {job.precision}"
        tell(events.FleetBegins(f"{job.preset} on {_named(members)}, {where}", envs.notice))
        before = 0.0
        if saved:
            _restore(training, mine, saved, tell, stop)
            before = float(saved[0].about["seconds"])
        finished, seconds = _train(training, mine, job.checkpoint_every, before, tell, stop)
        healthy = [i for i in range(len(mine)) if i not in training.diverged]
        for i in healthy:
            runs.save_agent(mine[i], fleet.agent(i), training.step)
    finally:
        envs.close()
    if not finished:
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
            return resume.specs(training, step, min(len(about["metrics"]), _MOST_METRICS))

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
        tell(events.TrainingBegins(schedule.steps, mine))
        if compiles and schedule.learning_starts <= training.step < schedule.steps:
            tell(events.Compiling())
        for info in training.run():
            tell(events.Stepped(info))
            if compiles and info.step == schedule.learning_starts:
                tell(events.Compiling())
            _tell_of_runs(training, mine, info, time.monotonic() - began, tell)
            if stop() or len(training.diverged) == len(mine):
                break
            if every and info.step % every == 0 and info.step < schedule.steps:
                save()
        save()
    except EnvironmentFault:
        if training.step > 0:
            save()
        raise
    finally:
        writer.close()
    return training.step == schedule.steps or len(training.diverged) == len(mine), time.monotonic() - began


def _tell_of_runs(training: Training, mine: Sequence[Run], info: StepInfo, seconds: float, tell: Consumer) -> None:
    """Tell what a step means for single runs: who has diverged, and of all others episodes and metrics."""
    for i in info.diverged:
        checkpoint.write(mine[i].path, resume.diverged_update(training, i), runs.DIVERGED_UPDATE)
        tell(events.Diverged(mine[i], runs.save_diverged(mine[i], training.diverged[i])))
    for i, score, length in info.episodes:
        if i not in training.diverged:
            tell(events.EpisodeEnded(mine[i], {"step": info.step, "score": score, "length": length}))
    for i, row in enumerate(info.rows or []):
        if i not in training.diverged:
            tell(events.Metrics(mine[i], row, seconds))


def _compiles(device: torch.device) -> bool:
    """Say whether the first learning steps compile their code."""
    return device.type == "cuda"


def _evaluate(job: TrainJob, trained: _Trained, tell: Consumer, stop: Callable[[], bool]) -> list[dict[str, Any]]:
    """Play the evaluation's games and store the results; where no random score is published, measure one beside."""
    began = time.monotonic()

    def tell_or_stop(event: events.Event) -> None:
        tell(event)
        if stop():
            raise KeyboardInterrupt

    config = trained.runs[0].config
    games, seeds = [run.game for run in trained.runs], [run.seed for run in trained.runs]

    def scores_of(which: Sequence[int], epsilon: float | None = None) -> list[list[float]]:
        params = {name: p[list(which)] for name, p in trained.params.items()}
        mine = Agents([games[i] for i in which], params, [seeds[i] for i in which], job.arguments)
        return evaluate_agents(config, mine, tell_or_stop, epsilon)

    episodes = scores_of(range(len(games)))
    measured: dict[str, Any] = {**trained.about, "eval_seconds": round(time.monotonic() - began, 1)}
    extra: list[dict[str, Any]] = [{} for _ in games]
    if unpublished := [i for i, game in enumerate(games) if normalised(game, 0.0) is None]:
        for i, scores in zip(unpublished, scores_of(unpublished, epsilon=1.0), strict=True):
            extra[i] = {"random_score": sum(scores) / len(scores)}
    results = []
    for run, scores, more in zip(trained.runs, episodes, extra, strict=True):
        results.append(runs.save_result(run, scores, measured | more))
        tell(events.Scored(run, results[-1]))
    return results


def evaluate_agents(config: Config, agents: Agents, tell: Consumer, epsilon: float | None = None) -> list[list[float]]:
    """Play the evaluation's games, and return every raw score by agent."""
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(agents.seeds)
    tell(events.Evaluated(title, 0, total))
    for playing in play(config, agents, epsilon):
        tell(events.Evaluated(title, playing.finished, total))
    return [[score for score in scores if score is not None] for scores in playing.scores]
