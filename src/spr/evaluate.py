"""Owns the protocol's evaluation: a fixed number of whole games per agent, settled before the first move."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spr.actor import Actor
from spr.config import SIDE, Config
from spr.envs import make, seeds_for

_TABLES = 25  # environments of one agent that play at the same time


class Playing(NamedTuple):
    """How far an evaluation has come: every agent's raw scores by game, None where a game is not finished."""

    scores: list[list[float | None]]

    @property
    def finished(self) -> int:
        """Games finished, over all agents."""
        return sum(score is not None for games in self.scores for score in games)


def play(
    config: Config, game: str, params: dict[str, Tensor], seeds: Sequence[int], epsilon: float | None = None
) -> Iterator[Playing]:
    """Play `evaluation.episodes` games per agent without network noise; the last thing yielded holds every score.

    Which games count is fixed up front: table j of an agent plays games j, j + tables, j + 2 tables ... each to its
    end, and then waits. Counting the first games to finish instead would favour short ones.
    """
    episodes = config.evaluation.episodes
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    device = next(iter(params.values())).device
    agents, tables = len(seeds), min(episodes, _TABLES)
    envs = make(game, agents * tables)
    actor = Actor(config, envs.actions, (agents, tables), device)
    dice = [np.random.default_rng([seed, *b"evaluate"]) for seed in seeds]

    scores: list[list[float | None]] = [[None] * episodes for _ in seeds]
    running = np.zeros((agents, tables))
    playing = np.tile(np.arange(tables), (agents, 1))  # the game that each table plays now
    frame = envs.reset([s for seed in seeds for s in seeds_for(seed, "evaluate", tables)])
    first = np.ones(agents * tables, np.bool_)
    try:
        while (playing < episodes).any():
            shape = (agents, tables)
            seen = torch.from_numpy(frame).to(device).view(*shape, SIDE, SIDE)
            actor.observe(seen, torch.from_numpy(first).to(device).view(shape))
            action = actor.greedy(params, noise=None).cpu().numpy()
            for i, random in enumerate(dice):
                explore = random.random(tables) < chance
                action[i] = np.where(explore, random.integers(envs.actions, size=tables), action[i])
            out = envs.step(action.reshape(-1))
            frame, first = out.frame, out.terminal | out.truncated
            running += out.reward.reshape(shape)
            for i, j in zip(*np.nonzero(out.game_over.reshape(shape)), strict=True):
                if playing[i, j] < episodes:
                    scores[i][playing[i, j]] = float(running[i, j])
                running[i, j] = 0
                playing[i, j] += tables
            yield Playing(scores)
    finally:
        envs.close()
