"""Owns the training loop: act, step, store, learn, in the order of the paper."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import SIDE, Config
from spr.draws import Dice, Numbers
from spr.envs import Envs, Frames, Step, seeds_for
from spr.errors import UserError
from spr.graphs import Inbox, Outbox, captured, compiled
from spr.learner import Learner, LearnerState, Updates
from spr.replay import Replay

_RECENT = 10  # games over which the score shown while training is averaged
_ROWS = 100  # rows of metrics in a whole run


@dataclass(frozen=True)
class Fleet:
    """S agents of one game and one configuration on one device; one agent is a fleet of one."""

    config: Config
    seeds: tuple[int, ...]
    device: torch.device
    envs: Envs
    learner: Learner
    state: LearnerState
    replay: Replay
    dice: Dice
    actor: Actor


class Tick(NamedTuple):
    """One environment step of every agent has been made; every so often with a row of metrics per agent."""

    step: int
    scores: list[float | None]  # per agent, mean raw score of its last games
    rows: list[dict[str, Any]] | None


def assemble(
    config: Config, envs: Envs, seeds: Sequence[int], device: torch.device, product: torch.dtype = torch.float32
) -> Fleet:
    """Put a fleet together, one agent per seed; its matrix products are taken in the dtype `product`."""
    learner = Learner(config, envs.actions, device, product=product)
    return Fleet(
        config=config,
        seeds=tuple(seeds),
        device=device,
        envs=envs,
        learner=learner,
        state=learner.init(seeds),
        replay=Replay(config, len(seeds), device),
        dice=Dice(config, envs.actions, seeds, device),
        actor=Actor(config, envs.actions, (len(seeds), 1), device),
    )


def train(fleet: Fleet) -> Iterator[Tick]:
    """Train a fleet to the end of its schedule, one tick per environment step; its state is changed in place."""
    config, envs = fleet.config, fleet.envs
    schedule, agents = config.schedule, len(fleet.seeds)
    games = _Games(agents, envs.actions)
    update = Updates(fleet.learner, fleet.state, fleet.replay, fleet.dice)
    turn = Turn(fleet)
    every = max(1, schedule.steps // _ROWS)

    turn.start(envs.reset([seeds_for(seed, "train", 1)[0] for seed in fleet.seeds]))
    for step in range(schedule.steps):
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
            update.beta.fill_(beta_at(config, step))
            for _ in range(schedule.updates_per_step):
                update()
        chosen = turn.chosen()
        envs.send(chosen)
        out = envs.receive()
        turn.settle(out)
        games.count(chosen, out.reward, out.game_over)

        done = step + 1
        rows = None
        if done % every == 0 or done == schedule.steps:
            means = update.means()
            rows = [
                {"step": done, **game, **{name: values[agent] for name, values in means.items()}}
                for agent, game in enumerate(games.rows())
            ]
        yield Tick(done, games.recent(), rows)


def epsilon_at(config: Config, step: int) -> float:
    """Return the probability of a random action: a straight line from the first step of learning, then constant."""
    schedule = config.schedule
    share = min(1.0, max(0.0, (step - schedule.random_steps) / schedule.epsilon_steps))
    return schedule.epsilon_start + (schedule.epsilon_end - schedule.epsilon_start) * share


class Turn:
    """A step of a fleet as the device sees it: what came of the last action, a new frame, an action, both stored."""

    def __init__(self, fleet: Fleet) -> None:
        """Nothing has been seen yet."""
        agents, device = len(fleet.seeds), fleet.device
        self._fleet = fleet
        self._inbox = Inbox(
            device,
            {
                "frame": np.zeros((agents, SIDE, SIDE), np.uint8),
                "first": np.ones(agents, np.bool_),
                "reward": np.zeros(agents, np.float32),
                "truncated": np.zeros(agents, np.bool_),
            },
        )
        self._outbox = Outbox(device)
        self.epsilon = torch.zeros((), device=device)
        self._seen = compiled(self._see, device)
        self._greedy = captured(lambda: self._seen(fleet.dice.roll_action(), None), device, fleet.dice.generators)

    def start(self, frame: Frames) -> None:
        """Show the first frame of every game, [S, 84, 84]."""
        self._inbox.send(frame=frame, first=np.ones(len(frame), np.bool_))

    def choose(self, greedy: bool) -> None:
        """Begin the step: pick actions, the best under noise or random ones, and store them with what was seen."""
        action = self._greedy() if greedy else self._see(None, self._fleet.dice.actions())
        self._outbox.post(action)

    def chosen(self) -> NDArray[np.int64]:
        """Wait for the actions, [S]."""
        return self._outbox.read()

    def settle(self, out: Step) -> None:
        """Send what came of the step; it is stored at once, so that the replay is whole between two steps."""
        reward = out.reward.clip(-1, 1)
        self._inbox.send(frame=out.frame, first=out.terminal | out.truncated, reward=reward, truncated=out.truncated)
        self._fleet.replay.settle(self._inbox["reward"], self._inbox["truncated"])

    @torch.no_grad()
    def _see(self, numbers: Numbers | None, action: Tensor | None) -> Tensor:
        """See the newest frame and store it with the action taken, [S]: the given one, or the best by these numbers."""
        fleet, frame, first = self._fleet, self._inbox["frame"], self._inbox["first"]
        fleet.actor.observe(frame[:, None], first[:, None])
        if action is None:
            assert numbers is not None
            action = fleet.actor.greedy(fleet.state.params, fleet.dice.head_noise(numbers.normal))
            action = fleet.dice.explored(action, numbers, self.epsilon)
        fleet.replay.append(frame, first, action[:, 0])
        return action[:, 0]


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
