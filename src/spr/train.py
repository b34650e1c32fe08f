"""Owns the training loop: act, step, store, learn, in the order of the paper."""

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.checkpoint import Checkpoint, Spec
from spr.config import SIDE, Config
from spr.draws import Numbers
from spr.envs import Step, seeds_for
from spr.errors import UserError
from spr.fleet import Fleet, Turn
from spr.learner import Updates

_RECENT = 10  # games over which the score shown while training is averaged
_ROWS = 100  # rows of metrics in a whole run


class Tick(NamedTuple):
    """One environment step of every agent has been made; every so often with a row of metrics per agent."""

    step: int
    scores: list[float | None]  # per agent, mean raw score of its last games
    rows: list[dict[str, Any]] | None
    faults: list[int]  # agents whose learning has just been found to have failed


def train(fleet: Fleet) -> Iterator[Tick]:
    """Train a fleet to the end of its schedule, one tick per environment step; its state is changed in place."""
    return Training(fleet).ticks()


class Training:
    """A fleet on its way: the loop, and all that a checkpoint has to hold of it between two steps."""

    def __init__(self, fleet: Fleet) -> None:
        """Stand before the first step."""
        steps, agents = fleet.config.schedule.steps, len(fleet.seeds)
        self.fleet = fleet
        self.step = 0
        self.faults: dict[int, int] = {}  # the step after which an agent's updates failed
        self.restarts: list[int] = []  # steps after which a new game began because the old one could not be restored
        self._update = Updates(fleet.learner, fleet.state, fleet.replay, fleet.dice)
        self._turn = Turn(fleet)
        self._games = _Games(agents, fleet.envs.actions)
        self._every = max(1, steps // _ROWS)
        # What was done and what came of it: an environment that repeats itself needs no more to be restored.
        self._actions = np.zeros((agents, steps), np.int32)
        self._rewards = np.zeros((agents, steps), np.float32)
        self._ends = np.zeros((agents, steps), np.uint8)

    def ticks(self) -> Iterator[Tick]:
        """Go on to the end of the schedule."""
        fleet, config, turn = self.fleet, self.fleet.config, self._turn
        schedule = config.schedule
        if self.step == 0:
            turn.start(fleet.envs.reset(self._seeds()))
        for step in range(self.step, schedule.steps):
            learning = step >= schedule.random_steps
            if step == schedule.random_steps and not fleet.replay.drawable():
                raise UserError(
                    f"no sequence of {config.replay.n_step} steps without a time limit in the first {step:,} steps: "
                    "set a smaller replay.n_step, or give the environment a longer limit"
                )
            turn.epsilon.fill_(epsilon_at(config, step))
            turn.choose(greedy=learning)
            # Learning needs the frame of this step but not what comes of it (see Replay.append): a GPU learns while the
            # host waits for the actions and the environments step, and nothing is reordered by that.
            if learning:
                self._update.beta.fill_(beta_at(config, step))
                for _ in range(schedule.updates_per_step):
                    self._update()
            chosen, faulty = turn.chosen()
            new = self._found(faulty, step)
            fleet.envs.send(chosen)
            out = fleet.envs.receive()
            turn.settle(out)
            self._note(chosen, out)
            rows = self._rows()
            if self.step == schedule.steps:
                new += self._found(fleet.state.faulty.cpu().numpy(), schedule.steps)
            yield Tick(self.step, self._games.recent(), rows, new)

    def _found(self, faulty: NDArray[np.bool_], step: int) -> list[int]:
        """Note whose updates after the step before this one failed, and return those not known before."""
        new = [int(agent) for agent in np.flatnonzero(faulty) if agent not in self.faults]
        self.faults |= dict.fromkeys(new, step)
        return new

    def dump(self, agent: int) -> Checkpoint:
        """Return what makes an agent's failed update fail again: everything as it was before, and its numbers."""
        step = self.faults[agent]
        whole = self.snapshots()[agent]
        tensors = whole.tensors | {f"numbers_{name}": t[agent].cpu() for name, t in self._update.last._asdict().items()}
        tensors |= {name: tensors[name][:step] for name in ("actions", "rewards", "ends")}
        # The host learns of it a step later, when one more sequence can be drawn than could be then.
        later = torch.arange(step, self.step) - self.fleet.config.horizon
        tensors["priority"][later[later >= 0] % self.fleet.replay.capacity] = 0
        return Checkpoint(step, tensors, whole.about)

    def _seeds(self) -> list[int]:
        return [seeds_for(seed, "train", 1)[0] for seed in self.fleet.seeds]

    def _note(self, chosen: NDArray[np.int64], out: Step) -> None:
        """Write one step down in the log, and count it."""
        self._actions[:, self.step] = chosen
        self._rewards[:, self.step] = out.reward
        ends = _TERMINAL * out.terminal + _TRUNCATED * out.truncated + _GAME_OVER * out.game_over
        self._ends[:, self.step] = ends
        self._games.count(chosen, out.reward, out.game_over)
        self.step += 1

    def _rows(self) -> list[dict[str, Any]] | None:
        if self.step % self._every and self.step != self.fleet.config.schedule.steps:
            return None
        means = self._update.means()
        return [
            {"step": self.step, **game, **{name: values[agent] for name, values in means.items()}}
            for agent, game in enumerate(self._games.rows())
        ]

    def snapshots(self) -> list[Checkpoint]:
        """Return a copy of everything that the next step depends on, per agent."""
        state, replay, step = self.fleet.state, self.fleet.replay, self.step
        names, sums, made = self._update.watched()
        return [
            Checkpoint(
                step,
                {
                    **{name: getattr(state, name)[i].to("cpu", copy=True) for name in _ROWS_OF_STATE},
                    "count": state.count.view(1).to("cpu", copy=True),
                    "priority": replay.priority[i].to("cpu", copy=True),
                    "generator": generator.get_state().clone(),
                    "watched": sums[:, i].clone(),
                    "actions": torch.from_numpy(self._actions[i, :step].copy()),
                    "rewards": torch.from_numpy(self._rewards[i, :step].copy()),
                    "ends": torch.from_numpy(self._ends[i, :step].copy()),
                    **({} if self.fleet.envs.repeats else {"frames": replay.recent(i)}),
                },
                {
                    "seed": self.fleet.seeds[i],
                    "watched": names,
                    "watched_updates": made,
                    "restarts": self.restarts,
                },
            )
            for i, generator in enumerate(self.fleet.dice.generators)
        ]

    def specs(self, step: int) -> dict[str, Spec]:
        """Return what every tensor of an agent's checkpoint after a step has to be."""
        tensors = self.snapshots()[0].tensors
        logged = {name: Spec((step,), tensors[name].dtype) for name in ("actions", "rewards", "ends")}
        watched = len(self._update.names()) if step > self.fleet.config.schedule.random_steps else 0
        if not self.fleet.envs.repeats:
            logged["frames"] = Spec((min(step, self.fleet.replay.capacity), SIDE, SIDE), torch.uint8)
        return (
            {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            | logged
            | {"watched": Spec((watched,), torch.float32)}
        )

    def restore(self, saved: Sequence[Checkpoint]) -> Iterator[int]:
        """Come to stand where a fleet was saved, by playing its games again; yields how many steps have been played."""
        fleet = self.fleet
        self.restarts = [int(step) for step in saved[0].about["restarts"]]
        yield from self._play_again(saved) if fleet.envs.repeats else self._begin_again(saved)
        for i, one in enumerate(saved):
            for name in _ROWS_OF_STATE:
                getattr(fleet.state, name)[i].copy_(one.tensors[name])
            fleet.replay.priority[i].copy_(one.tensors["priority"])
            fleet.dice.generators[i].set_state(one.tensors["generator"])
        fleet.state.count.copy_(saved[0].tensors["count"][0])
        about = saved[0].about
        sums = torch.stack([one.tensors["watched"] for one in saved], 1)
        self._update.restore(about["watched"], sums, int(about["watched_updates"]))

    def fail_again(self, dump: Checkpoint) -> dict[str, Tensor]:
        """Do the update that failed, of a fleet of one, and return what there was to watch, [1] each."""
        list(self.restore([dump]))
        fleet = self.fleet
        numbers = Numbers(*(dump.tensors[f"numbers_{name}"][None].to(fleet.device) for name in Numbers._fields))
        beta = torch.tensor(beta_at(fleet.config, dump.step - 1), device=fleet.device)
        return fleet.learner.prepare(fleet.state, fleet.replay, fleet.dice.draws(numbers), beta)[1]

    def _play_again(self, saved: Sequence[Checkpoint]) -> Iterator[int]:
        """Bring environments that repeat themselves back to where they were."""
        actions, rewards, ends = _logs(saved)
        self._turn.start(self.fleet.envs.reset(self._seeds()))
        for step in range(saved[0].step):
            chosen = actions[:, step].astype(np.int64)
            self._turn.repeat(chosen)
            self.fleet.envs.send(chosen)
            out = self.fleet.envs.receive()
            self._turn.settle(out)
            self._note(chosen, out)
            if (self._rewards[:, step] != rewards[:, step]).any() or (self._ends[:, step] != ends[:, step]).any():
                raise UserError(
                    f"the game did not repeat itself at step {step:,}: its checkpoint was made with another version of "
                    "the emulator or by other rules, and can't be resumed here"
                )
            if self.step % self._every == 0:
                self._games.rows()
            yield self.step

    def _begin_again(self, saved: Sequence[Checkpoint]) -> Iterator[int]:
        """Refill the memory and begin a new game, as after a time limit: the old one can't be restored."""
        steps = saved[0].step
        actions, rewards, ends = _logs(saved)
        ends[:, -1] |= _TRUNCATED
        self._actions[:, :steps], self._rewards[:, :steps], self._ends[:, :steps] = actions, rewards, ends
        for step in range(steps):
            self._games.count(actions[:, step], rewards[:, step], (ends[:, step] & _GAME_OVER) > 0)
            if (step + 1) % self._every == 0:
                self._games.rows()
        self._games.abandon()
        self.step = steps
        ended = (ends & (_TERMINAL | _TRUNCATED)) > 0
        first = np.concatenate([np.ones_like(ended[:, :1]), ended[:, :-1]], 1)
        self.fleet.replay.refill(
            torch.stack([one.tensors["frames"] for one in saved]),
            *(torch.from_numpy(a) for a in (first, actions, rewards.clip(-1, 1), (ends & _TRUNCATED) > 0)),
        )
        self._turn.start(self.fleet.envs.reset([seeds_for(s, f"after {steps}", 1)[0] for s in self.fleet.seeds]))
        self.restarts = [*self.restarts, steps]
        yield steps


def _logs(saved: Sequence[Checkpoint]) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
    """Return the actions, rewards and ends of a fleet, [S, steps] each."""
    actions, rewards, ends = (
        torch.stack([one.tensors[name] for one in saved]).numpy() for name in ("actions", "rewards", "ends")
    )
    return actions, rewards, ends


_TERMINAL, _TRUNCATED, _GAME_OVER = 1, 2, 4  # how the ends of a step are written in the log
_ROWS_OF_STATE = ("weights", "averaged", "copied", "first_moment", "second_moment")


def epsilon_at(config: Config, step: int) -> float:
    """Return the probability of a random action: a straight line from the first step of learning, then constant."""
    schedule = config.schedule
    share = min(1.0, max(0.0, (step - schedule.random_steps) / schedule.epsilon_steps))
    return schedule.epsilon_start + (schedule.epsilon_end - schedule.epsilon_start) * share


def beta_at(config: Config, step: int) -> float:
    """Return the importance-correction exponent: linear from the first step of learning to the last step."""
    schedule, replay = config.schedule, config.replay
    share = (step - schedule.random_steps) / (schedule.steps - schedule.random_steps)
    return replay.beta_start + (replay.beta_end - replay.beta_start) * share


class _Games:
    """What each agent did and scored while training; a low entropy of actions says that it no longer explores."""

    def __init__(self, agents: int, actions: int) -> None:
        self._running = np.zeros(agents)
        self._chosen = np.zeros((agents, actions))
        self._recent: list[deque[float]] = [deque(maxlen=_RECENT) for _ in range(agents)]
        self._finished = [0] * agents

    def count(self, chosen: Any, reward: Any, game_over: Any) -> None:
        self._chosen[np.arange(len(chosen)), chosen] += 1
        self._running += reward
        for agent in np.flatnonzero(game_over):
            self._recent[agent].append(float(self._running[agent]))
            self._finished[agent] += 1
            self._running[agent] = 0

    def abandon(self) -> None:
        """Forget the games that are going on; they will not come to their ends."""
        self._running[:] = 0

    def recent(self) -> list[float | None]:
        return [fmean(scores) if scores else None for scores in self._recent]

    def rows(self) -> list[dict[str, Any]]:
        share = self._chosen / self._chosen.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
        self._chosen[:] = 0
        return [
            {"games": games, "score": score, "action_entropy": float(nats)}
            for games, score, nats in zip(self._finished, self.recent(), entropy, strict=True)
        ]
