"""Owns the training loop: act, learn, step the environments, store, in the order of the paper.

It yields what happened after every step, and shows nothing itself.
"""

from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spr.agent.schedules import epsilon_at, fill, reset_at
from spr.common.errors import UserError
from spr.config.config import Config
from spr.envs.base import BrokenStep, Step, seeds_for
from spr.training.actor import ActStep
from spr.training.fleet import Fleet
from spr.training.resets import reset
from spr.training.update_runner import UpdateRunner

_RECENT = 10  # games over which the score shown while training is averaged
_ROWS = 100  # rows of metrics in a whole run, unless asked for others
TERMINAL, TRUNCATED, GAME_OVER = 1, 2, 4  # how the ends of a step are written in the log


class Episode(NamedTuple):
    """A whole game that an agent has finished while training."""

    agent: int
    score: float  # the raw return
    length: int  # steps


class StepInfo(NamedTuple):
    """One environment step of every agent has been made; every so often with a row of metrics per agent."""

    step: int
    scores: list[float | None]  # per agent, mean raw score of its last games
    rows: list[dict[str, Any]] | None
    diverged: list[int]  # agents whose learning has just been found to have diverged
    episodes: list[Episode]  # that this step has finished
    faults: dict[int, str]  # agents whose environments have just failed, and how


def train(fleet: Fleet) -> Iterator[StepInfo]:
    """Train a fleet to the end of its schedule, one item per environment step; its state is changed in place."""
    return Training(fleet).run()


def row_interval(config: Config, asked: int | None) -> int:
    """Return the steps between two rows of metrics: as many as asked for, else a hundredth of the run."""
    return asked or max(1, config.schedule.steps // _ROWS)


class Training:
    """A training run in progress: the loop, and the state that a checkpoint saves between steps (see `snapshot`)."""

    def __init__(self, fleet: Fleet, log_every: int | None = None) -> None:
        """Start at step 0, with a row of metrics every so many steps."""
        steps, agents = fleet.config.schedule.steps, len(fleet.seeds)
        self.fleet = fleet
        self.step = 0
        self.diverged: dict[int, int] = {}  # the step after which an agent's updates diverged
        self.failed: dict[int, int] = {}  # the step after which an agent's environment had failed: it learns no more
        self.restarts: list[int] = []  # steps after which a new game began because the old one could not be restored
        self.update = UpdateRunner(fleet.learner, fleet.state, fleet.replay, fleet.rng)
        self.act = ActStep(fleet)
        self.games = EpisodeTracker(agents, fleet.envs.num_actions)
        self.log = Log(agents, steps)
        self._every = row_interval(fleet.config, log_every)

    def run(self) -> Iterator[StepInfo]:
        """Run to the end of the schedule."""
        fleet, config, act, update = self.fleet, self.fleet.config, self.act, self.update
        schedule = config.schedule
        if self.step == 0:
            act.start(fleet.envs.reset(self.env_seeds()))
        for step in range(self.step, schedule.steps):
            learning = step >= schedule.learning_starts
            if step == schedule.learning_starts and not fleet.replay.can_sample():
                raise UserError(
                    f"no sequence of {config.longest_return} steps without a time limit in the first {step:,} steps: "
                    "set a smaller replay.n_step, or give the environment a longer limit"
                )
            if number := reset_at(config, step):
                reset(fleet, number)
            act.epsilon.fill_(epsilon_at(config, step))
            act.act_async(greedy=learning)
            # Learning needs the frame of this step but not its reward (see Replay.begin_step): a GPU learns while the
            # host waits for the actions and the environments step, and nothing is reordered by that.
            if learning:
                for number in range(schedule.updates_per_step):
                    fill(update.rates, config, step, number)
                    update()
            actions, diverged = act.act_wait()
            new = self._found_diverged(diverged, step)
            fleet.envs.send(actions)
            out, faults = self._outcome()
            act.finish_step(out)
            episodes = self.count_step(actions, out)
            rows = self._metrics() if self.row_is_due() else None
            if self.step == schedule.steps or faults:  # nothing will be heard of them later
                new += self._found_diverged(fleet.state.diverged.cpu().numpy(), self.step)
            faults = {i: fault for i, fault in faults.items() if i not in self.diverged}
            self.failed |= dict.fromkeys(faults, self.step)
            yield StepInfo(self.step, self.games.recent(), rows, new, episodes, faults)

    def _outcome(self) -> tuple[Step, dict[int, str]]:
        """Wait for the environments; those that failed end as at a time limit, so that all is whole and can be saved.

        Their agents stay in their places, since nothing that happens there reaches the others.
        """
        try:
            return self.fleet.envs.recv(), {}
        except BrokenStep as broken:
            return broken.out, dict(broken.faults)

    def env_seeds(self) -> list[int]:
        """Return the seeds of the environments' first games."""
        return [seeds_for(seed, "train", 1)[0] for seed in self.fleet.seeds]

    def count_step(self, actions: NDArray[np.int64], out: Step) -> list[Episode]:
        """Write one step to the log, and count it; return the episodes that it has finished."""
        self.log.write(self.step, actions, out)
        self.step += 1
        return self.games.count(actions, out.reward, out.game_over)

    def row_is_due(self) -> bool:
        """Say whether a row of metrics belongs after the present step."""
        return self.step % self._every == 0 or self.step == self.fleet.config.schedule.steps

    def _metrics(self) -> list[dict[str, Any]]:
        means = self.update.means()
        return [
            {"step": self.step, **game, **{name: values[agent] for name, values in means.items()}}
            for agent, game in enumerate(self.games.rows())
        ]

    def _found_diverged(self, diverged: NDArray[np.bool_], step: int) -> list[int]:
        """Note whose updates after the step before this one diverged, and return those not known before."""
        new = [int(i) for i in np.flatnonzero(diverged) if i not in self.diverged and i not in self.failed]
        self.diverged |= dict.fromkeys(new, step)
        return new


class Log:
    """Actions and their outcomes, [S, steps]: enough to restore a deterministic environment."""

    def __init__(self, agents: int, steps: int) -> None:
        """Nothing has been done."""
        self.actions = np.zeros((agents, steps), np.int32)
        self.rewards = np.zeros((agents, steps), np.float32)
        self.ends = np.zeros((agents, steps), np.uint8)

    def write(self, step: int, actions: NDArray[np.int64], out: Step) -> None:
        """Write down one step."""
        self.actions[:, step] = actions
        self.rewards[:, step] = out.reward
        self.ends[:, step] = TERMINAL * out.terminal + TRUNCATED * out.truncated + GAME_OVER * out.game_over


class EpisodeTracker:
    """What each agent did and scored while training; a low entropy of actions says that it no longer explores."""

    def __init__(self, agents: int, num_actions: int) -> None:
        """No game has been played."""
        self._running = np.zeros(agents)
        self._length = np.zeros(agents, np.int64)
        self._chosen = np.zeros((agents, num_actions))
        self._recent: list[deque[float]] = [deque(maxlen=_RECENT) for _ in range(agents)]
        self._finished = [0] * agents

    def count(self, actions: NDArray[Any], reward: NDArray[np.float32], game_over: NDArray[np.bool_]) -> list[Episode]:
        """Count one step of every agent, and return the episodes that it has finished."""
        self._chosen[np.arange(len(actions)), actions] += 1
        self._running += reward
        self._length += 1
        over = [int(agent) for agent in np.flatnonzero(game_over)]
        episodes = [Episode(agent, float(self._running[agent]), int(self._length[agent])) for agent in over]
        for agent, score, _ in episodes:
            self._recent[agent].append(score)
            self._finished[agent] += 1
        self._running[over] = 0
        self._length[over] = 0
        return episodes

    def abandon(self) -> None:
        """Drop what has been counted of games that will not be finished."""
        self._running[:] = 0
        self._length[:] = 0

    def recent(self) -> list[float | None]:
        """Return the mean raw score of each agent's last games."""
        return [fmean(scores) if scores else None for scores in self._recent]

    def rows(self) -> list[dict[str, Any]]:
        """Return each agent's games, recent score and entropy of actions since the last time."""
        share = self._chosen / self._chosen.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
        self._chosen[:] = 0
        return [
            {"games": games, "score": score, "action_entropy": float(nats)}
            for games, score, nats in zip(self._finished, self.recent(), entropy, strict=True)
        ]
