"""Owns the games of an evaluation where they are played: which action is taken, what a game scores.

A game depends on its agent, the agent's seed and its own number only: it has a stream of random numbers of its own, and
its emulator starts from a seed of its own. Nothing here needs PyTorch, which small processes do without.
Shapes: E emulators, one agent's; frames are [C, H, W].
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spr.envs.base import Frames, Step

_BLOCK = 256  # steps for which a game draws its exploration at once


class EpisodeSpec(NamedTuple):
    """A game that is to be played."""

    number: int  # of its agent's games
    start: int  # the emulator's seed


class EpisodeResult(NamedTuple):
    """A game that is over."""

    number: int
    score: float  # raw
    length: int  # steps


class Rules(NamedTuple):
    """What all games of an agent have in common."""

    seed: int  # the agent's
    epsilon: float
    limit: int  # steps after which a game is over, whatever the emulator says


class SteppedEnvs(Protocol):
    """What games are played by: so much of `Envs`."""

    @property
    def num_actions(self) -> int:
        """How many actions an agent has room for."""

    @property
    def game_num_actions(self) -> list[int] | None:
        """How many of them each emulator's game has, if it may have fewer; known once the first games have started."""

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start a game in each emulator."""

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin a step of all."""

    def recv(self) -> Step:
        """Wait for it."""


class RestartableEnvs(SteppedEnvs, Protocol):
    """Emulators that step together, of which some can start new games."""

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some of them."""


class Arrays(NamedTuple):
    """What emulators show, and what they are to do: [..., E] each, of any number of rows."""

    frame: NDArray[np.uint8]  # [..., E, C, H, W]; or the console's screens
    is_first: NDArray[np.bool_]
    action: NDArray[np.int64]


class Row(Protocol):
    """Emulators of one agent that step together, wherever they live: busy from every order until `take` is over."""

    @property
    def num_actions(self) -> int:
        """How many actions an agent has room for; known once the first games have started."""

    @property
    def game_num_actions(self) -> int | None:
        """How many of them its game has, if it may have fewer."""

    @property
    def height(self) -> int | None:
        """How many rows its screens have, if it shows those of the console, and no frames."""

    @property
    def idle(self) -> list[int]:
        """The places that have no game left."""

    @property
    def playing(self) -> int:
        """How many places have one."""

    @property
    def over(self) -> bool:
        """Whether no place has one."""

    @property
    def done(self) -> bool:
        """Whether `take` would not wait for long."""

    def go_on(self, groups: Mapping[int, Sequence[EpisodeSpec]]) -> None:
        """Begin to play other games in some places: a group that begins alike in each."""

    def send(self) -> None:
        """Begin a step, with the actions that lie in its places."""

    def take(self) -> list[EpisodeResult]:
        """Wait for what was begun last, and return the games that ended by it; what went wrong is raised."""

    def close(self) -> None:
        """Release the emulators."""


class EmulatorBackend(Protocol):
    """Where the emulators of H halves of R rows live."""

    arrays: Arrays  # [H, R, ...]
    idle_rest: bool  # whether an emulator without a game costs nothing while others of its row play

    def group_identical_starts(self, starts: Sequence[int]) -> list[list[int]]:
        """Say which games of an agent begin alike, by their places among these starts, and may be played in a group."""

    def open(self, where: tuple[int, int], game: str, rules: Rules, groups: Sequence[Sequence[EpisodeSpec]]) -> Row:
        """Begin to make a row's emulators, for that half and place, and to start a group of games in each."""

    def look(self, wait: bool) -> None:
        """Find out which rows are done; wait for one of them, if nothing else is to be done."""

    def close(self) -> None:
        """Release every emulator."""


class Exploration:
    """When a game explores, and what it does then: from a stream of its own, by its agent's seed and its number."""

    def __init__(self, rules: Rules, number: int, actions: int) -> None:
        """Nothing has been drawn yet."""
        self._rng = np.random.default_rng([rules.seed, number, *b"evaluate"])
        self._epsilon, self._actions = rules.epsilon, actions
        self._drawn: list[int | None] = []

    def at(self, step: int) -> int | None:
        """Return the action that a step takes to explore, or None where it does not."""
        while step >= len(self._drawn):
            explores = self._rng.random(_BLOCK) < self._epsilon
            drawn = zip(explores.tolist(), self._rng.integers(self._actions, size=_BLOCK).tolist(), strict=True)
            self._drawn += [action if yes else None for yes, action in drawn]
        return self._drawn[step]


class EpisodeBatch:
    """Emulators that step together, and the game that is played in each; arrays [E, ...].

    Groups are of one game each: these environments can't go back to an earlier state (see `shared_prefix`).
    """

    def __init__(self, envs: RestartableEnvs, rules: Rules, groups: Sequence[Sequence[EpisodeSpec]]) -> None:
        """Start a game in each emulator."""
        self.envs, self._rules = envs, rules
        games = [game for (game,) in groups]
        self.frame = envs.reset([game.start for game in games]).copy()
        self._own = (envs.game_num_actions or [envs.num_actions])[0]
        self.is_first = np.ones(len(games), np.bool_)
        self._games: list[EpisodeSpec | None] = list(games)
        # Of each emulator, in Python's own numbers: there are few, and NumPy takes as long for one as for a hundred.
        self._score, self._length = [0.0] * len(games), [0] * len(games)
        self._explores = [Exploration(rules, game.number, self._own) for game in games]

    @property
    def idle(self) -> list[int]:
        """The emulators that have no game left; they play on, and nothing of it counts."""
        return [place for place, game in enumerate(self._games) if game is None]

    def go_on(self, groups: Mapping[int, Sequence[EpisodeSpec]]) -> None:
        """Start other games in some emulators."""
        games = {place: game for place, (game,) in groups.items()}
        for place, game in games.items():
            self._games[place], self._score[place], self._length[place] = game, 0.0, 0
            self._explores[place] = Exploration(self._rules, game.number, self._own)
        places = list(games)
        self.frame = self.frame.copy()
        self.frame[places] = self.envs.restart(places, [game.start for game in games.values()])
        self.is_first[places] = True

    def send(self, action: NDArray[np.int64]) -> None:
        """Act, epsilon-greedily."""
        taken = action.tolist()
        for place, (game, length) in enumerate(zip(self._games, self._length, strict=True)):
            if game is not None and (other := self._explores[place].at(length)) is not None:
                taken[place] = other
        self.envs.send(np.array(taken))

    def recv(self) -> list[EpisodeResult]:
        """Take in one step, and return the games that ended by it."""
        out = self.envs.recv()
        self.frame, self.is_first = out.frame, out.terminal | out.truncated
        ended: list[EpisodeResult] = []
        for place, (reward, game_over) in enumerate(zip(out.reward.tolist(), out.game_over.tolist(), strict=True)):
            if (game := self._games[place]) is None:
                continue
            self._score[place] += reward
            self._length[place] += 1
            if game_over or self._length[place] >= self._rules.limit:
                ended.append(EpisodeResult(game.number, self._score[place], self._length[place]))
                self._games[place] = None
        return ended
