"""Owns the training loop: act, step, store, learn, in the order of the paper."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spr.actor import Actor
from spr.config import Config
from spr.draws import Dice
from spr.envs import Envs, seeds_for
from spr.errors import UserError
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


def assemble(config: Config, envs: Envs, seeds: Sequence[int], device: torch.device) -> Fleet:
    """Put a fleet together, one agent per seed."""
    learner = Learner(config, envs.actions, device)
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
    config, device = fleet.config, fleet.device
    schedule, replay, dice = config.schedule, fleet.replay, fleet.dice
    games = _Games(len(fleet.seeds), fleet.envs.actions)
    seen = _Running()
    update = Updates(fleet.learner, fleet.state, replay, dice)
    every = max(1, schedule.steps // _ROWS)

    frame = torch.from_numpy(fleet.envs.reset([seeds_for(seed, "train", 1)[0] for seed in fleet.seeds])).to(device)
    first = torch.ones(len(fleet.seeds), dtype=torch.bool, device=device)
    for step in range(schedule.steps):
        learning = step >= schedule.random_steps
        fleet.actor.observe(frame[:, None], first[:, None])
        action = fleet.actor.greedy(fleet.state.params, dice.head_noise()) if learning else dice.actions()
        chosen = action[:, 0].cpu().numpy()
        # The games move while the agents learn. Nothing is reordered by that: see Replay.append.
        fleet.envs.send(chosen)
        replay.append(frame, first, action[:, 0])
        if step == schedule.random_steps and not replay.drawable():
            raise UserError(
                f"no sequence of {config.replay.n_step} steps without a time limit in the first {step:,} steps: "
                "set a smaller replay.n_step, or give the environment a longer limit"
            )
        if learning:
            update.beta.fill_(beta_at(config, step))
            for _ in range(schedule.updates_per_step):
                seen.add(update())
        out = fleet.envs.receive()
        replay.settle(torch.from_numpy(out.reward).to(device).clamp(-1, 1), torch.from_numpy(out.truncated).to(device))
        frame = torch.from_numpy(out.frame).to(device)
        first = torch.from_numpy(out.terminal | out.truncated).to(device)
        games.count(chosen, out.reward, out.game_over)

        done = step + 1
        rows = None
        if done % every == 0 or done == schedule.steps:
            means = seen.take(len(fleet.seeds))
            rows = [{"step": done, **game, **mean} for game, mean in zip(games.rows(), means, strict=True)]
        yield Tick(done, games.recent(), rows)


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


class _Running:
    """Means of what the updates report, kept on the device until a row is written."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, watched: dict[str, Tensor]) -> None:
        self._sums = {name: value + self._sums.get(name, 0) for name, value in watched.items()}
        self._count += 1

    def take(self, agents: int) -> list[dict[str, float]]:
        """Return each agent's means since the last time, and forget them; there are none before learning starts."""
        columns = {name: (total / self._count).tolist() for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return [{name: values[agent] for name, values in columns.items()} for agent in range(agents)]
