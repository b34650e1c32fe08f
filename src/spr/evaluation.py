"""Owns the protocol's evaluation: a fixed number of whole games per agent, each counted from before its first move.

A game depends on its agent, the agent's seed and its own number only: it has a stream of random numbers of its own, and
its emulator a seed. So agents score the same in any company, and games are played wherever and whenever a core is free.
Two games at a time share an emulator's seed, the second following the first: to start one from a seed takes an Atari
emulator as long as 200 steps.
Shapes: S agents, R rows of E emulators, each row lent to one agent; A actions; frames are [C, H, W].
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import Config
from spr.environment import Envs, seeds_for
from spr.envs import make
from spr.errors import UserError
from spr.graphs import Inbox, Outbox, captured
from spr.gym_envs import Argument
from spr.hardware import cores
from spr.networks import crop_actions, networks_without_weights, num_actions_of, pad_actions, valid_actions

_EMULATORS = 2  # of a row: few, since all of them step until the last of their games is over
_THREADS = 1  # of a row
_CHAIN = 2  # games that follow each other in an emulator
_WORTH_STARTING = 2_000  # steps that an agent must have left to play: emulators take about as long to start
_BLOCK = 256  # steps for which a game draws its exploration at once


class Playing(NamedTuple):
    """How far an evaluation has come: every agent's raw scores by game, None where a game is not finished."""

    scores: list[list[float | None]]

    @property
    def finished(self) -> int:
        """Games finished, over all agents."""
        return sum(score is not None for games in self.scores for score in games)


class Agents(NamedTuple):
    """Who plays: S agents, each at its place."""

    games: Sequence[str]
    params: dict[str, Tensor]  # [S, ...] each
    seeds: Sequence[int]
    arguments: Mapping[str, Argument] = MappingProxyType({})  # of their environments


def play(config: Config, agents: Agents, epsilon: float | None = None) -> Iterator[Playing]:
    """Play `evaluation.episodes` games per agent without network noise; the last thing yielded holds every score.

    Rows are in two halves: while the emulators of one half step, the actions of
    the other are selected. A free emulator starts its agent's next game, and a free row goes to the agent with the most
    left to play. Every game that is started is finished and counted, so short games are not favoured, as they would be
    if the first to finish counted.
    """
    games, params, seeds, arguments = agents
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    logs = [_EpisodeLog(seed, config.evaluation.episodes, chance) for seed in seeds]
    size = min(_EMULATORS, config.evaluation.episodes)
    rows = max(len(seeds), cores())  # of a half: with few agents enough for every core
    made: list[_Row] = []
    pool = ThreadPoolExecutor(max(2, cores() // 2))

    def lend(agent: int) -> _Row:
        def open_envs(count: int) -> Envs:
            return make(games[agent], count, _THREADS, config.observation, arguments)

        made.append(row := _Row(agent, logs[agent], open_envs, pool, logs[agent].claim(size)))
        return row

    try:
        turns = [agent for _ in range(math.ceil(2 * rows / len(seeds))) for agent in range(len(seeds))][: 2 * rows]
        first = [lend(agent) for agent in turns if logs[agent].unstarted]
        for row in first:
            row.starting.result()
        params, valid = _with_room(config, games, params, {row.agent: row.envs for row in first})
        halves = [_Half(config, params, valid, (rows, size)) for _ in range(2)]
        for i, row in enumerate(first):
            halves[i // rows].take(row)
        while any(half.rows for half in halves):
            for half in halves:
                half.recv()
                while half.has_room and (agent := _most_left(logs)) is not None:
                    half.take(lend(agent))
                half.act()
            if not any(half.playing for half in halves):
                wait([row.starting for half in halves for row in half.rows.values()], return_when=FIRST_COMPLETED)
            yield Playing([log.scores for log in logs])
    finally:
        pool.shutdown(cancel_futures=True)
        for row in made:
            row.close()


def stream(seed: int, number: int) -> np.random.Generator:
    """Return the random numbers of a game, by its agent's seed and its own number."""
    return np.random.default_rng([seed, number, *b"evaluate"])


def exploration(rng: np.random.Generator, epsilon: float, actions: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Draw for a game's next steps whether each explores, and the action that it then takes."""
    return rng.random(_BLOCK) < epsilon, rng.integers(actions, size=_BLOCK)


def _most_left(logs: Sequence["_EpisodeLog"]) -> int | None:
    """Return the agent with the most steps left to play in games that have not started, if they are worth a row."""
    left = [log.steps_left for log in logs]
    agent = int(np.argmax(left))
    return agent if left[agent] > 0 and left[agent] >= _WORTH_STARTING else None


def _with_room(
    config: Config, games: Sequence[str], params: dict[str, Tensor], envs: dict[int, Envs]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Give agents room for as many actions as their environments do, and return which are valid, [S, A].

    In a fleet they have it already; stored agents have their own actions only.
    """
    room = envs[0].num_actions
    learnt = num_actions_of(config, {name: p.shape for name, p in params.items()})
    own = [(envs[i].own_actions or [room])[0] for i in range(len(games))]
    device = next(iter(params.values())).device
    dims = networks_without_weights(config, room, device).action_dims()
    for i, (game, mine) in enumerate(zip(games, own, strict=True)):
        agent = {name: p[i] for name, p in params.items()}
        if learnt == room:  # what an agent of a fleet has no use for is zero
            again = pad_actions(crop_actions(agent, dims, mine, room), dims, mine, room)
            fits = all(bool((again[name] == agent[name]).all()) for name in dims)
        else:
            fits = learnt == mine
        if not fits:
            raise UserError(f"this agent chooses between {learnt} actions, but {game} has {mine}")
    if learnt != room:
        # One dimension more: that of the agents comes first.
        wider = {name: dim._replace(dim=dim.dim + 1) for name, dim in dims.items()}
        params = pad_actions(params, wider, learnt, room)
    return params, None if envs[0].own_actions is None else valid_actions(own, room, device)


class _EpisodeLog:
    """The games of one agent: how many have started, how long they are, and the scores of those that are over."""

    def __init__(self, seed: int, episodes: int, epsilon: float) -> None:
        self.seed, self.epsilon = seed, epsilon
        self.starts = seeds_for(seed, "evaluate", episodes)
        self.scores: list[float | None] = [None] * episodes
        self.steps = 0
        self._started = 0

    @property
    def unstarted(self) -> int:
        """How many games have not started."""
        return len(self.scores) - self._started

    def claim(self, count: int) -> list[range]:
        """Return the numbers of the next games, in chains of some; at most so many chains, and none if all started."""
        begin = range(self._started, len(self.scores), _CHAIN)[:count]
        chains = [range(first, min(first + _CHAIN, len(self.scores))) for first in begin]
        self._started += sum(map(len, chains))
        return chains

    @property
    def steps_left(self) -> float:
        """How many steps the games that have not started will take, if they are as long as the others."""
        over = sum(score is not None for score in self.scores)
        return self.unstarted * self.steps / max(over, 1)


class _Row:
    """Emulators of one agent that step together: what they show, and which games are played there; arrays [E, ...].

    Starting games takes a while, so a thread of the pool does it, and the other rows play on. Closed once its games are
    over, so that no emulator steps needlessly.
    """

    envs: Envs
    frame: NDArray[np.uint8]

    def __init__(
        self,
        agent: int,
        log: _EpisodeLog,
        open_envs: Callable[[int], Envs],
        pool: ThreadPoolExecutor,
        chains: list[range],
    ) -> None:
        self.agent = agent
        self._log, self._open_envs, self._pool = log, open_envs, pool
        self._opened = False
        count = len(chains)
        self._games = chains  # that each has left, beginning with the one that it plays
        self._running = np.zeros(count)
        self._rng = [self._stream(chain[0]) for chain in chains]
        self._explores, self._other = np.zeros((count, _BLOCK), np.bool_), np.zeros((count, _BLOCK), np.int64)
        self._at = np.full(count, _BLOCK)
        self.is_first = np.ones(count, np.bool_)
        self.starting = pool.submit(self._open)

    def _open(self) -> None:
        self.envs = self._open_envs(len(self._games))
        self._opened = True
        self.frame = self.envs.reset([self._log.starts[chain[0]] for chain in self._games])

    def _restart(self, places: list[int]) -> None:
        frame = self.frame.copy()
        frame[places] = self.envs.restart(places, [self._log.starts[self._games[place][0]] for place in places])
        self.frame = frame

    def _stream(self, number: int) -> np.random.Generator:
        return stream(self._log.seed, number)

    @property
    def ready(self) -> bool:
        """Whether its games have started; what went wrong with that is raised here."""
        return self.starting.done() and self.starting.result() is None

    @property
    def over(self) -> bool:
        """Whether no game is left here."""
        return not any(self._games)

    def send(self, action: NDArray[np.int64]) -> None:
        """Act, epsilon-greedily; an emulator without a game plays on, and nothing of it counts."""
        own = (self.envs.own_actions or [self.envs.num_actions])[0]
        for i in np.flatnonzero(self._at == _BLOCK).tolist():
            self._explores[i], self._other[i] = exploration(self._rng[i], self._log.epsilon, own)
            self._at[i] = 0
        now = (np.arange(len(action)), self._at)
        self.envs.send(np.where(self._explores[now], self._other[now], action))
        self._at += 1

    def recv(self) -> None:
        """Take in one step; note the scores of games that ended by it, and start the next ones."""
        out = self.envs.recv()
        self.frame, self.is_first = out.frame, out.terminal | out.truncated
        self._running += out.reward
        self._log.steps += sum(map(bool, self._games))
        restart: list[int] = []
        for i in np.flatnonzero(out.game_over).tolist():
            if chain := self._games[i]:
                self._log.scores[chain[0]] = float(self._running[i])
                self._games[i] = chain[1:] or next(iter(self._log.claim(1)), range(0))
                if self._games[i]:
                    self._rng[i], self._at[i] = self._stream(self._games[i][0]), _BLOCK
                if self._games[i] and not chain[1:]:
                    restart.append(i)
            self._running[i] = 0
        if restart:
            self.starting = self._pool.submit(self._restart, restart)

    def close(self) -> None:
        """Release the emulators, once."""
        if self._opened:
            self.envs.close()
            self._opened = False


class _Half:
    """Half of the rows, [R, E]: their frames, and a copy of the parameters of the agent that each is lent to."""

    def __init__(self, config: Config, params: dict[str, Tensor], valid: Tensor | None, shape: tuple[int, int]) -> None:
        device = next(iter(params.values())).device
        room = num_actions_of(config, {name: p.shape for name, p in params.items()})
        actor = Actor(config, room, shape, device)
        self.rows: dict[int, _Row] = {}
        self.playing: list[tuple[int, _Row]] = []  # whose emulators are at work
        self._count = shape[0]
        self._frame = np.zeros((*shape, *config.observation.frame), np.uint8)
        self._is_first = np.ones(shape, np.bool_)
        # What each row acts by, and where it is copied from when the row is lent to another agent.
        self._agents = {name: p for name, p in params.items() if name in actor.names}
        self._lent = {name: p.new_zeros((shape[0], *p.shape[1:])) for name, p in self._agents.items()}
        self._valid = valid
        self._lent_valid = None if valid is None else valid.new_zeros((shape[0], room))
        self._moved = np.zeros(shape[0], np.bool_)
        inbox = Inbox(device, {"frame": self._frame, "is_first": self._is_first, "moved": self._moved})

        def act() -> Tensor:
            actor.observe(inbox["frame"], inbox["is_first"], inbox["moved"])
            return actor.greedy(self._lent, noise=(), valid=self._lent_valid)

        self._inbox, self._outbox = inbox, Outbox(device)
        self._act = captured(act, device)

    @property
    def has_room(self) -> bool:
        """Whether a row is free."""
        return len(self.rows) < self._count

    def take(self, row: _Row) -> None:
        """Take in a row, which may still be starting."""
        place = next(i for i in range(self._count) if i not in self.rows)
        self.rows[place] = row
        for name, p in self._agents.items():
            self._lent[name][place].copy_(p[row.agent])
        if self._valid is not None and self._lent_valid is not None:
            self._lent_valid[place].copy_(self._valid[row.agent])

    def act(self) -> None:
        """Select actions, and let the emulators begin; rows that are still starting wait."""
        self.playing = [(place, row) for place, row in self.rows.items() if row.ready]
        if not self.playing:
            return
        self._moved[:] = False
        for place, row in self.playing:
            count = len(row.frame)
            self._frame[place, :count], self._is_first[place, :count] = row.frame, row.is_first
            self._moved[place] = True
        self._inbox.send(frame=self._frame, is_first=self._is_first, moved=self._moved)
        self._outbox.post(self._act())
        action = self._outbox.read()
        for place, row in self.playing:
            row.send(action[place, : len(row.frame)])

    def recv(self) -> None:
        """Wait for the emulators, and close the rows whose games are over."""
        for place, row in self.playing:
            row.recv()
            if row.over:
                row.close()
                del self.rows[place]
        self.playing = []
