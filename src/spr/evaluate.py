"""Owns the protocol's evaluation: a fixed number of whole games per agent, each counted from before its first move."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import SIDE, Config
from spr.envs import Envs, make, seeds_for
from spr.errors import UserError
from spr.graphs import Inbox, Outbox, captured
from spr.machine import cores
from spr.networks import outputs_per_action

# Games of one agent that are played at the same time: enough for one agent to keep a machine busy, and few enough for
# the emulators of ten to start soon, at a tenth of a second each.
_TABLES = 16
_STARTING = 4  # groups of emulators that are started at the same time


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

    A table that is free begins its agent's next game, as long as there is one; every game begun is finished and counts.
    So no score depends on how long its game takes, as it would if the first games to finish counted, and no table waits
    for a long game at another. Tables are on two sides, which play in turn: while the emulators of one side step, the
    actions of the other are chosen.
    """
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    tables = min(config.evaluation.episodes, _TABLES)
    books = [_Book(config.evaluation.episodes, begun=tables) for _ in seeds]
    halves = [half for half in (range(0, tables, 2), range(1, tables, 2)) if half]
    # With many more threads than cores the one that chooses the actions would wait for its turn; with one thread for
    # each group the games of the last agent would be slow.
    threads = max(2, cores() // (len(halves) * len(seeds)))

    def seated(where: tuple[range, int]) -> _Group:
        half, agent = where
        envs = make(game, len(half), threads=min(threads, len(half)))
        return _Group(envs, agent, seeds[agent], half, books[agent], chance)

    groups: list[_Group] = []
    try:
        # Making several emulators at once gains little, but putting them into their first states does.
        with ThreadPoolExecutor(_STARTING) as pool:
            groups += pool.map(seated, [(half, agent) for half in halves for agent in range(len(seeds))])
        actions, learnt = groups[0].envs.actions, params["head.advantage.bias"].shape[-1] // outputs_per_action(config)
        if learnt != actions:
            raise UserError(f"this agent chooses between {learnt} actions, but {game} has {actions}")
        of_each = [groups[i : i + len(seeds)] for i in range(0, len(groups), len(seeds))]
        sides = [
            _Side(config, actions, params, (len(seeds), len(half)), members)
            for half, members in zip(halves, of_each, strict=True)
        ]
        for side in sides:
            side.act()
        while sides:
            for side in sides:
                side.receive()
                side.act()
            sides = [side for side in sides if side.groups]
            yield Playing([book.scores for book in books])
    finally:
        for group in groups:
            group.close()


class _Book:
    """The games of one agent: how many have begun, and the scores of those that are over."""

    def __init__(self, games: int, begun: int) -> None:
        self.scores: list[float | None] = [None] * games
        self._begun = begun

    def begin(self) -> int | None:
        """Return the number of the next game, or None when all have begun."""
        if self._begun == len(self.scores):
            return None
        self._begun += 1
        return self._begun - 1


class _Group:
    """One agent's tables on one side: what they show, and which games are played there; arrays [E, ...].

    It is closed when they are over, so that nothing steps in vain while other agents' games go on.
    """

    def __init__(self, envs: Envs, agent: int, seed: int, tables: range, book: _Book, chance: float) -> None:
        self.agent = agent
        self.envs = envs
        self._open = True
        self._book, self._chance = book, chance
        self._games: list[int | None] = list(tables)
        self._running = np.zeros(len(tables))
        # An agent's draws do not depend on its neighbours' games, nor on those of the other side.
        self._dice = np.random.default_rng([seed, tables.start, *b"evaluate"])
        starts = seeds_for(seed, "evaluate", tables.stop)
        self.frame = self.envs.reset([starts[table] for table in tables])
        self.first = np.ones(len(tables), np.bool_)

    @property
    def over(self) -> bool:
        """Whether no game is left here."""
        return all(game is None for game in self._games)

    def send(self, action: NDArray[np.int64]) -> None:
        """Move, now and then at random; a table without a game plays on, and nothing of it counts."""
        explore = self._dice.random(len(action)) < self._chance
        self.envs.send(np.where(explore, self._dice.integers(self.envs.actions, size=len(action)), action))

    def receive(self) -> None:
        """Take in one step; write down the scores of games that ended by it, and begin the next ones."""
        out = self.envs.receive()
        self.frame, self.first = out.frame, out.terminal | out.truncated
        self._running += out.reward
        for table in np.flatnonzero(out.game_over).tolist():
            if (game := self._games[table]) is not None:
                self._book.scores[game] = float(self._running[table])
                self._games[table] = self._book.begin()
            self._running[table] = 0

    def close(self) -> None:
        """Release the emulators, once."""
        if self._open:
            self.envs.close()
            self._open = False


class _Side:
    """Half of the tables of every agent, [S, E]: what is seen there and what is done; closed ones keep their last."""

    def __init__(
        self, config: Config, actions: int, params: dict[str, Tensor], shape: tuple[int, int], groups: list[_Group]
    ) -> None:
        device = next(iter(params.values())).device
        self.groups = groups
        self._frame = np.zeros((*shape, SIDE, SIDE), np.uint8)
        self._first = np.ones(shape, np.bool_)
        actor = Actor(config, actions, shape, device)
        inbox = Inbox(device, {"frame": self._frame, "first": self._first})

        def act() -> Tensor:
            actor.observe(inbox["frame"], inbox["first"])
            return actor.greedy(params, noise=())

        self._inbox, self._outbox = inbox, Outbox(device)
        self._act = captured(act, device)

    def act(self) -> None:
        """Choose the actions of all tables, and let the emulators begin."""
        if not self.groups:
            return
        for group in self.groups:
            self._frame[group.agent], self._first[group.agent] = group.frame, group.first
        self._inbox.send(frame=self._frame, first=self._first)
        self._outbox.post(self._act())
        action = self._outbox.read()
        for group in self.groups:
            group.send(action[group.agent])

    def receive(self) -> None:
        """Wait for the emulators, and close the groups whose games are over."""
        for group in self.groups:
            group.receive()
        for group in self.groups:
            if group.over:
                group.close()
        self.groups = [group for group in self.groups if not group.over]
