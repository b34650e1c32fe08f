"""Owns carrying a job out: its fleets, from the first step or the last checkpoint to the results.

It shows nothing itself: whatever happens goes to a consumer as an event.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spr.agent.auxiliary_losses import check_names
from spr.common.errors import EnvironmentFault, StorageFault, UnusableError, UserError
from spr.common.hardware import device_name, free_unused, product_dtype
from spr.config.config import Config
from spr.envs.atari100k import normalised
from spr.envs.registry import family, make, make_each
from spr.evaluation.batched_policy import Agents
from spr.experiments import events
from spr.experiments.agent_evaluation import AgentScores, evaluate_agents
from spr.experiments.events import Consumer
from spr.experiments.run_saver import Saver, deleted, failure
from spr.experiments.train_request import Member, TrainJob
from spr.runs import compatibility, metrics_files, run_files, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint, snapshot
from spr.training.checkpoint import Checkpoint, Spec
from spr.training.fleet import assemble, largest_fleet
from spr.training.loop import Training

INTERRUPTED = 130
FAILED = 1
_MOST_METRICS = 1_000


class _Trained(NamedTuple):
    """A trained fleet, to be evaluated."""

    runs: list[Run]  # whose learning did not diverge
    params: dict[str, Tensor]  # theirs, [S, ...] each
    about: dict[str, Any]


class JobRunner:
    """Trains and evaluates the runs of a job that are not finished."""

    def __init__(self, job: TrainJob, on_event: Consumer, stop: Callable[[], bool]) -> None:
        """Take the job.

        `stop` is polled between steps: training saves and ends; what can be done again is interrupted at once.
        """
        self._job, self._request = job, job.request
        self._on_event, self._stop = on_event, stop
        self._resume = job.request.resume
        self._configs = {game: job.request.config(game) for game in job.request.games}

    def run(self) -> int:
        """Do all of it, and return the exit code."""
        for config in self._configs.values():
            check_names(config)
        members = self._request.members
        paths = [self._request.folder(member) for member in members]
        if not self._resume:
            run_files.refuse_taken(paths, self._request.overwrite)
        with run_files.locked(paths):
            results: list[dict[str, Any]] = []
            done = [member for member in members if self._resume and self._job.finished(member)]
            for member in done:
                checkpoint.remove(self._request.folder(member))  # what a kill after its result has left
            if done:
                self._on_event(events.Skipped(_named(done), "finished already"))
            diverged = [m for m in members if self._resume and run_files.diverged(self._request.folder(m))]
            if diverged:
                self._on_event(events.Skipped(_named(diverged), "diverged (--overwrite starts again)"))
            left = [member for member in members if member not in (*done, *diverged)]
            self._refuse_half_lost(left)
            fleets = self._fleets(left)
            self._refuse_impossible(fleets)
            for fleet in fleets:
                finished = self._train_and_evaluate(fleet)
                if finished is None:
                    return INTERRUPTED
                results += finished
        if results:
            self._on_event(events.Finished(self._request.out, results))
        return 0 if len(results) + len(done) == len(members) else FAILED

    def _refuse_half_lost(self, members: Sequence[Member]) -> None:
        """Look at every folder before the first fleet is trained: those that hold no run may hold nothing else."""
        for folder in (self._request.folder(member) for member in members):
            if not (folder / "config.json").is_file():
                run_files.refuse_taken([folder], overwrite=True)
                if checkpoint.steps_of(folder):
                    raise UserError(
                        f"{folder} holds checkpoints, but its config.json is gone: --overwrite, with that game and "
                        "seed alone, starts it again"
                    )

    def _refuse_impossible(self, fleets: Sequence[Sequence[Member]]) -> None:
        """Look at every fleet before the first is trained: whether its games are there, and whether it fits."""
        for i, members in enumerate(fleets):
            config = self._configs[members[0].game]
            if len(members) > (most := largest_fleet(config, self._job.device)):
                raise UserError(
                    f"{len(members)} agents do not fit into the free memory of the {self._job.device.type}, {most} do: "
                    "train fewer seeds or games at once, or set a smaller replay.capacity"
                )
            if i > 0:  # the first one's are made at once
                for game in {member.game for member in members}:
                    make(game, 1, obs=config.observation, arguments=self._request.arguments).close()

    def _fleets(self, members: Sequence[Member]) -> list[list[Member]]:
        """Divide unfinished runs into fleets: one configuration, one family of games, saved after the same step."""
        groups: dict[tuple[str, Config], list[Member]] = {}
        for member in members:
            groups.setdefault((family(member.game), self._configs[member.game]), []).append(member)
        if not self._resume:
            return list(groups.values())
        return [fleet for group in groups.values() for fleet in self._saved_together(group)]

    def _saved_together(self, members: Sequence[Member]) -> list[list[Member]]:
        """Divide unfinished runs into those that were saved after the same step."""
        saved = {member: set(checkpoint.steps_of(self._request.folder(member))) for member in members}
        # A run that was killed while checkpoints were written lacks the newest. One that ended by a fault has a later
        # one that no other has, and resumes alone.
        if min(max(steps, default=0) for steps in saved.values()) in set.intersection(*saved.values()):
            return [list(members)]
        # Killed while the first checkpoints were written: apart they would round differently, so all begin again.
        begun = all((self._request.folder(member) / "config.json").is_file() for member in members)
        if begun and all(steps <= {self._request.checkpoint_every} for steps in saved.values()):
            return [list(members)]
        by_step: dict[int, list[Member]] = {}
        for member in members:
            by_step.setdefault(max(saved[member], default=0), []).append(member)
        return [by_step[step] for step in sorted(by_step)]

    def _train_and_evaluate(self, members: Sequence[Member]) -> list[dict[str, Any]] | None:
        """Bring one fleet to its results; None if the user asked to stop."""
        trained = self._train_fleet(members)
        if trained is None:
            return None
        # The fleet is gone, and so may be its memory: another one can train while this one is evaluated.
        free_unused(self._job.device)
        results = self._evaluate(trained) if trained.runs else []
        for run in trained.runs:
            if run_files.finished(run.path):
                checkpoint.remove(run.path)
        return results

    def _train_fleet(self, members: Sequence[Member]) -> _Trained | None:
        """Train one fleet to its end, from the beginning or from its checkpoints; None if the user asked to stop."""
        config = self._configs[members[0].game]
        envs = make_each([member.game for member in members], config.observation, self._request.arguments)
        try:
            mine = [self._job.run(member, rules) for member, rules in zip(members, envs.protocols, strict=True)]
            seeds = [member.seed for member in members]
            fleet = assemble(config, envs, seeds, self._job.device, product_dtype(self._job.precision))
            training = Training(fleet, self._request.log_every)
            begun = [run for run in mine if self._resume and compatibility.begun(run)]
            saved = self._latest(training, mine) if len(begun) == len(mine) else []
            if not saved:
                run_files.refuse_taken([run.path for run in mine], overwrite=True)
                run_folder.create(mine)
            where = f"{device_name(self._job.device)}, {self._job.precision}"
            self._on_event(events.FleetBegins(f"{self._request.preset} on {_named(members)}, {where}", envs.notice))
            before = 0.0
            if saved:
                self._restore(training, mine, saved)
                before = float(saved[0].about["seconds"])
            healthy, seconds = self._train(training, mine, before)
        finally:
            envs.close()
        if healthy and training.step < config.schedule.steps:
            self._on_event(events.Stopped(training.step))
            return None
        about = {
            "train_seconds": round(seconds, 1),
            "precision": self._job.precision,
            "agents_together": len(mine),
            "device": device_name(self._job.device),
        }
        if training.restarts:
            about["new_games_after_steps"] = training.restarts
        params = {name: p[healthy] for name, p in fleet.state.acting.items()}
        return _Trained([mine[i] for i in healthy], params, about)

    def _latest(self, training: Training, mine: Sequence[Run]) -> list[Checkpoint]:
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
                    self._on_event(events.CheckpointRefused(checkpoint.path_of(run.path, step), str(problem)))
                    bad[run.path] = bad.get(run.path, 0) + 1
            if len(found) == len(mine):
                return found
        if steps:
            worst = max(bad, key=lambda path: bad[path])
            raise UserError(
                f"no checkpoint in {worst} can be used (a run resumes only on the kind of device it began on, one of "
                "Atari only since version 0.9): --overwrite, with that game and seed alone, starts it again"
            )
        return []

    def _restore(self, training: Training, mine: Sequence[Run], saved: Sequence[Checkpoint]) -> None:
        for step in snapshot.restore(training, saved):
            self._on_event(events.Replaying(step, saved[0].step))
            if self._stop():
                raise KeyboardInterrupt
        for run in mine:
            metrics_files.rewind(run.path, training.step)
        if training.restarts:
            self._on_event(events.Restarted())

    def _train(self, training: Training, mine: Sequence[Run], before: float) -> tuple[list[int], float]:
        """Train to the end, or until asked to stop; return the agents that got there, and the seconds it took."""
        began, every = time.monotonic() - before, self._request.checkpoint_every
        schedule = training.fleet.config.schedule
        compiles = _compiles(training.fleet.device)
        saver = Saver(training, mine, lambda: time.monotonic() - began, self._on_event)
        try:
            self._on_event(events.TrainingBegins(schedule.steps, mine))
            if compiles and schedule.learning_starts <= training.step < schedule.steps:
                self._on_event(events.Compiling())
            for info in training.run():
                self._on_event(events.Stepped(info))
                if compiles and info.step == schedule.learning_starts:
                    self._on_event(events.Compiling())
                saver.note(info)
                if self._stop() or not saver.going:
                    break
                if every and info.step % every == 0 and info.step < schedule.steps:
                    saver.save()
            saver.finish()
        finally:
            saver.close()
        return saver.going, time.monotonic() - began

    def _evaluate(self, trained: _Trained) -> list[dict[str, Any]]:
        """Evaluate a fleet and store the results; whose environment fails has none, and the others have theirs."""
        try:
            played = self._play(trained)
        except EnvironmentFault as fault:
            if len(trained.runs) == 1:
                self._on_event(failure(trained.runs[0], f"{fault}; its agent is saved: --resume evaluates it again"))
                return []
            # Agents score the same in any fleet, so they can as well be evaluated one by one.
            each = [
                _Trained([run], {name: p[[i]] for name, p in trained.params.items()}, trained.about)
                for i, run in enumerate(trained.runs)
            ]
            return [result for one in each for result in self._evaluate(one)]
        results = []
        for run, scores, measured in played:
            try:
                results.append(run_folder.save_result(run, scores, measured))
            except StorageFault as fault:
                if run.path.is_dir():
                    raise StorageFault(f"{fault}; its agent is saved: --resume evaluates it again") from fault
                self._on_event(failure(run, deleted(run)))
            else:
                self._on_event(events.Scored(run, results[-1]))
        return results

    def _play(self, trained: _Trained) -> list[tuple[Run, list[float], dict[str, Any]]]:
        """Play the evaluation's games, and return every run's scores and what else was measured.

        Where no random score is published, one is measured beside.
        """
        began = time.monotonic()

        def show_or_stop(event: events.Event) -> None:
            self._on_event(event)
            if self._stop():
                raise KeyboardInterrupt

        config = trained.runs[0].config
        games, seeds = [run.game for run in trained.runs], [run.seed for run in trained.runs]

        def evaluated(which: Sequence[int], epsilon: float | None = None) -> list[AgentScores]:
            params = {name: p[list(which)] for name, p in trained.params.items()}
            mine = Agents([games[i] for i in which], params, [seeds[i] for i in which], self._request.arguments)
            return evaluate_agents(config, mine, show_or_stop, epsilon)

        found = evaluated(range(len(games)))
        measured: dict[str, Any] = {**trained.about, "eval_seconds": round(time.monotonic() - began, 1)}
        extra = [_lengths(config, each.lengths) for each in found]
        if unpublished := [i for i, game in enumerate(games) if normalised(game, 0.0) is None]:
            for i, (scores, _) in zip(unpublished, evaluated(unpublished, epsilon=1.0), strict=True):
                extra[i]["random_score"] = sum(scores) / len(scores)
        whole = [measured | more for more in extra]
        return list(zip(trained.runs, [each.scores for each in found], whole, strict=True))


def _named(members: Sequence[Member]) -> str:
    """Name agents for a message, game by game."""
    by_game: dict[str, list[int]] = {}
    for game, seed in members:
        by_game.setdefault(game, []).append(seed)
    if len({tuple(seeds) for seeds in by_game.values()}) == 1 and len(by_game) > 3:
        return f"{len(by_game)} games, {run_files.seeds_text(next(iter(by_game.values())))}"
    return "; ".join(f"{game}, {run_files.seeds_text(seeds)}" for game, seeds in by_game.items())


def _compiles(device: torch.device) -> bool:
    """Say whether the first learning steps compile their code."""
    return device.type == "cuda"


def _lengths(config: Config, lengths: Sequence[int]) -> dict[str, Any]:
    """Return how long the games were, and how many of them were cut off, if any."""
    cut = sum(length >= config.evaluation.max_steps for length in lengths)
    return {"episode_steps": list(lengths), **({"episodes_cut": cut} if cut else {})}
