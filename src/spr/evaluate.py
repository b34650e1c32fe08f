"""Owns the protocol's evaluation: a fixed number of whole games per agent, each counted from before its first move.

Shapes: S agents, E slots (environments) per agent; frames are [C, H, W].
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import Config
from spr.envs import ATARI_ACTIONS, Envs, make, seeds_for
from spr.errors import UserError
from spr.graphs import Inbox, Outbox, captured
from spr.hardware import cores
from spr.networks import num_actions_of, valid_actions

# Games of one agent that are played at the same time: enough for one agent to keep a machine busy, and few enough for
# the emulators of ten to start soon, at a tenth of a second each.
_SLOTS = 16
_STARTING = 4  # groups of emulators that are started at the same time


class Playing(NamedTuple):
    """How far an evaluation has come: every agent's raw scores by game, None where a game is not finished."""

    scores: list[list[float | None]]

    @property
    def finished(self) -> int:
        """Games finished, over all agents."""
        return sum(score is not None for games in self.scores for score in games)


def play(
    config: Config,
    game: str | Sequence[str],
    params: dict[str, Tensor],
    seeds: Sequence[int],
    epsilon: float | None = None,
) -> Iterator[Playing]:
    """Play `evaluation.episodes` games per agent without network noise; the last thing yielded holds every score.

    All agents play one game, or each the one at its place.

    A free slot starts its agent's next game. Every game started is finished and counted, so short games are not
    favoured, as they would be if the first to finish counted. Slots are double-buffered in two halves: while the
    emulators of one half step, the actions of the other are selected.
    """
    games = [game] * len(seeds) if isinstance(game, str) else list(game)
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    slots = min(config.evaluation.episodes, _SLOTS)
    logs = [_EpisodeLog(config.evaluation.episodes, started=slots) for _ in seeds]
    parts = [part for part in (range(0, slots, 2), range(1, slots, 2)) if part]
    # With many more threads than cores the one that chooses the actions would wait for its turn; with one thread for
    # each group the games of the last agent would be slow.
    threads = max(2, cores() // (len(parts) * len(seeds)))

    def make_group(where: tuple[range, int]) -> _Group:
        part, agent = where
        envs = make(games[agent], len(part), min(threads, len(part)), config.observation)
        return _Group(envs, agent, seeds[agent], part, logs[agent], chance)

    groups: list[_Group] = []
    try:
        # Making several emulators at once gains little, but putting them into their first states does.
        with ThreadPoolExecutor(_STARTING) as pool:
            groups += pool.map(make_group, [(part, agent) for part in parts for agent in range(len(seeds))])
        own = [group.envs.num_actions for group in groups[: len(seeds)]]
        room = num_actions_of(config, {name: p.shape for name, p in params.items()})
        for name, here in zip(games, own, strict=True):
            if here > room or (isinstance(game, str) and room not in (here, ATARI_ACTIONS)):
                raise UserError(f"this agent chooses between {room} actions, but {name} has {here}")
        device = next(iter(params.values())).device
        valid = None if isinstance(game, str) and min(own) == room else valid_actions(own, room, device)
        of_each = [groups[i : i + len(seeds)] for i in range(0, len(groups), len(seeds))]
        halves = [
            _Half(config, params, valid, (len(seeds), len(part)), members)
            for part, members in zip(parts, of_each, strict=True)
        ]
        for half in halves:
            half.act()
        while halves:
            for half in halves:
                half.recv()
                half.act()
            halves = [half for half in halves if half.groups]
            yield Playing([log.scores for log in logs])
    finally:
        for group in groups:
            group.close()


class _EpisodeLog:
    """The games of one agent: how many have started, and the scores of those that are over."""

    def __init__(self, games: int, started: int) -> None:
        self.scores: list[float | None] = [None] * games
        self._started = started

    def start(self) -> int | None:
        """Return the number of the next game, or None when all have started."""
        if self._started == len(self.scores):
            return None
        self._started += 1
        return self._started - 1


class _Group:
    """One agent's slots in one half: what they show, and which games are played there; arrays [E, ...].

    Closed once its games are over, so that no emulator steps needlessly.
    """

    def __init__(self, envs: Envs, agent: int, seed: int, slots: range, log: _EpisodeLog, epsilon: float) -> None:
        self.agent = agent
        self.envs = envs
        self._open = True
        self._log, self._epsilon = log, epsilon
        self._games: list[int | None] = list(slots)
        self._running = np.zeros(len(slots))
        # An agent's draws do not depend on its neighbours' games, nor on those of the other half.
        self._rng = np.random.default_rng([seed, slots.start, *b"evaluate"])
        starts = seeds_for(seed, "evaluate", slots.stop)
        self.frame = self.envs.reset([starts[slot] for slot in slots])
        self.is_first = np.ones(len(slots), np.bool_)

    @property
    def over(self) -> bool:
        """Whether no game is left here."""
        return all(game is None for game in self._games)

    def send(self, action: NDArray[np.int64]) -> None:
        """Act, epsilon-greedily; a slot without a game plays on, and nothing of it counts."""
        explore = self._rng.random(len(action)) < self._epsilon
        self.envs.send(np.where(explore, self._rng.integers(self.envs.num_actions, size=len(action)), action))

    def recv(self) -> None:
        """Take in one step; note the scores of games that ended by it, and start the next ones."""
        out = self.envs.recv()
        self.frame, self.is_first = out.frame, out.terminal | out.truncated
        self._running += out.reward
        for slot in np.flatnonzero(out.game_over).tolist():
            if (game := self._games[slot]) is not None:
                self._log.scores[game] = float(self._running[slot])
                self._games[slot] = self._log.start()
            self._running[slot] = 0

    def close(self) -> None:
        """Release the emulators, once."""
        if self._open:
            self.envs.close()
            self._open = False


class _Half:
    """Half of the slots of every agent, [S, E]: their frames and actions; closed groups keep their last."""

    def __init__(
        self,
        config: Config,
        params: dict[str, Tensor],
        valid: Tensor | None,
        shape: tuple[int, int],
        groups: list[_Group],
    ) -> None:
        device = next(iter(params.values())).device
        self.groups = groups
        self._frame = np.zeros((*shape, *config.observation.frame), np.uint8)
        self._is_first = np.ones(shape, np.bool_)
        room = num_actions_of(config, {name: p.shape for name, p in params.items()})
        actor = Actor(config, room, shape, device)
        inbox = Inbox(device, {"frame": self._frame, "is_first": self._is_first})

        def act() -> Tensor:
            actor.observe(inbox["frame"], inbox["is_first"])
            return actor.greedy(params, noise=(), valid=valid)

        self._inbox, self._outbox = inbox, Outbox(device)
        self._act = captured(act, device)

    def act(self) -> None:
        """Select the actions of all slots, and let the emulators begin."""
        if not self.groups:
            return
        for group in self.groups:
            self._frame[group.agent], self._is_first[group.agent] = group.frame, group.is_first
        self._inbox.send(frame=self._frame, is_first=self._is_first)
        self._outbox.post(self._act())
        action = self._outbox.read()
        for group in self.groups:
            group.send(action[group.agent])

    def recv(self) -> None:
        """Wait for the emulators, and close the groups whose games are over."""
        for group in self.groups:
            group.recv()
        for group in self.groups:
            if group.over:
                group.close()
        self.groups = [group for group in self.groups if not group.over]
