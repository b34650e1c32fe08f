"""Owns the protocol's evaluation: a fixed number of whole games per agent, settled before the first move."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import SIDE, Config
from spr.envs import make, seeds_for
from spr.errors import UserError
from spr.graphs import Inbox, Outbox, captured
from spr.networks import outputs_per_action

_TABLES = 20  # games of one agent that are played at the same time
_THREADS = 4  # that step the environments of one group, at most


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
    end. Counting the first games to finish instead would favour short ones. A group is one table of every agent; it is
    released when its games are over, so that one long game does not keep hundreds of idle emulators running.
    """
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    agents, tables = len(seeds), min(config.evaluation.episodes, _TABLES)
    scores: list[list[float | None]] = [[None] * config.evaluation.episodes for _ in seeds]
    dice = [np.random.default_rng([seed, *b"evaluate"]) for seed in seeds]
    groups: list[_Group] = []
    try:
        # An emulator takes a tenth of a second to start, and part of that can be done for several at once.
        with ThreadPoolExecutor(_THREADS) as pool:
            groups += pool.map(lambda table: _Group(game, seeds, table, tables, scores), range(tables))
        actions, learnt = groups[0].envs.actions, params["head.advantage.bias"].shape[-1] // outputs_per_action(config)
        if learnt != actions:
            raise UserError(f"this agent chooses between {learnt} actions, but {game} has {actions}")
        table = _Table(config, actions, params, (agents, tables))
        while groups:
            for group in groups:
                table.frame[:, group.table] = group.frame
                table.first[:, group.table] = group.first
            action = table.greedy()
            for i, random in enumerate(dice):
                # Drawn for every table, seated or not: an agent's draws do not depend on its neighbours' games.
                explore, other = random.random(tables) < chance, random.integers(table.actions, size=tables)
                action[i] = np.where(explore, other, action[i])
            for group in groups:
                group.envs.send(action[:, group.table])
            for group in groups:
                group.receive()
            over = [group for group in groups if group.over]
            groups = [group for group in groups if not group.over]
            for group in over:
                group.envs.close()
            yield Playing(scores)
    finally:
        for group in groups:
            group.envs.close()


class _Table:
    """What all agents see at all their tables, [S, E], and what they do; empty seats keep their last frame."""

    def __init__(self, config: Config, actions: int, params: dict[str, Tensor], shape: tuple[int, int]) -> None:
        device = next(iter(params.values())).device
        self.actions = actions
        self.frame = np.zeros((*shape, SIDE, SIDE), np.uint8)
        self.first = np.ones(shape, np.bool_)
        actor = Actor(config, actions, shape, device)
        inbox = Inbox(device, {"frame": self.frame, "first": self.first})

        def act() -> Tensor:
            actor.observe(inbox["frame"], inbox["first"])
            return actor.greedy(params, noise=())

        self._inbox, self._outbox = inbox, Outbox(device)
        self._act = captured(act, device)

    def greedy(self) -> NDArray[np.int64]:
        self._inbox.send(frame=self.frame, first=self.first)
        self._outbox.post(self._act())
        return self._outbox.read()


class _Group:
    """One table of every agent: the environments there, what they show, the games they are at; arrays [S, ...]."""

    def __init__(
        self, game: str, seeds: Sequence[int], table: int, tables: int, scores: list[list[float | None]]
    ) -> None:
        agents = len(seeds)
        self.table = table
        self.envs = make(game, agents, threads=min(agents, _THREADS))
        self._stride = tables
        self._scores = scores
        self._game = np.full(agents, table)
        self._running = np.zeros(agents)
        self.frame = self.envs.reset([seeds_for(seed, "evaluate", tables)[table] for seed in seeds])
        self.first = np.ones(agents, np.bool_)

    @property
    def over(self) -> bool:
        """Whether every agent has finished its last game here."""
        return bool((self._game >= len(self._scores[0])).all())

    def receive(self) -> None:
        """Take in one step, and write down the scores of games that ended by it."""
        out = self.envs.receive()
        self.frame = out.frame
        self.first = out.terminal | out.truncated
        self._running += out.reward
        for i in np.flatnonzero(out.game_over):
            if self._game[i] < len(self._scores[i]):
                self._scores[i][self._game[i]] = float(self._running[i])
            self._running[i] = 0
            self._game[i] += self._stride
