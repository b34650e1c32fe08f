"""Owns the games of an evaluation where they are played: which action is taken, what a game scores, what follows it.

A game depends on its agent, the agent's seed and its own number only: it has a stream of random numbers of its own, and
its emulator a seed. Two games at a time share an emulator's seed, the second following the first: to start one from a
seed takes ale-py's vector as long as 200 steps. Nothing here needs PyTorch, which small processes do without.
Shapes: E emulators, one agent's; frames are [C, H, W].
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spr.environment import Frames, Step

CHAIN = 2  # games that follow each other in an emulator
_BLOCK = 256  # steps for which a game draws its exploration at once


class Game(NamedTuple):
    """A game that is to be played."""

    number: int  # of its agent's games
    start: int  # the emulator's seed, where it does not follow another game


class Ended(NamedTuple):
    """A game that is over."""

    number: int
    score: float  # raw
    length: int  # steps


class Rules(NamedTuple):
    """What all games of an agent have in common."""

    seed: int  # the agent's
    epsilon: float
    limit: int  # steps after which a game is over, whatever the emulator says


class Played(Protocol):
    """What games are played by: so much of `Envs`."""

    @property
    def num_actions(self) -> int:
        """How many actions an agent has room for."""

    @property
    def own_actions(self) -> list[int] | None:
        """How many of them each emulator's game has, if it may have fewer; known once the first games have started."""

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start a game in each emulator."""

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some of them."""

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin a step of all."""

    def recv(self) -> Step:
        """Wait for it."""


class Arrays(NamedTuple):
    """What emulators show, and what they are to do: [..., E] each, of any number of rows."""

    frame: NDArray[np.uint8]  # [..., E, C, H, W]
    is_first: NDArray[np.bool_]
    action: NDArray[np.int64]


class Row(Protocol):
    """Emulators of one agent that step together, wherever they live: busy from every order until `take` is over."""

    @property
    def num_actions(self) -> int:
        """How many actions an agent has room for; known once the first games have started."""

    @property
    def own_actions(self) -> int | None:
        """How many of them its game has, if it may have fewer."""

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

    def go_on(self, chains: Mapping[int, Sequence[Game]]) -> None:
        """Begin to start the next games in some places."""

    def send(self) -> None:
        """Begin a step, with the actions that lie in its places."""

    def take(self) -> list[Ended]:
        """Wait for what was begun last, and return the games that ended by it; what went wrong is raised."""

    def close(self) -> None:
        """Release the emulators."""


class Home(Protocol):
    """Where the emulators of H halves of R rows live."""

    arrays: Arrays  # [H, R, ...]
    idle_rest: bool  # whether an emulator without a game costs nothing while others of its row play

    def open(self, where: tuple[int, int], game: str, rules: Rules, chains: Sequence[Sequence[Game]]) -> Row:
        """Begin to make a row's emulators, for that half and place, and to start their first games."""

    def look(self, wait: bool) -> None:
        """Find out which rows are done; wait for one of them, if nothing else is to be done."""

    def close(self) -> None:
        """Release every emulator."""


def stream(seed: int, number: int) -> np.random.Generator:
    """Return the random numbers of a game, by its agent's seed and its own number."""
    return np.random.default_rng([seed, number, *b"evaluate"])


def exploration(rng: np.random.Generator, epsilon: float, actions: int) -> list[int | None]:
    """Draw for each of a game's next steps the action that it takes to explore, or None where it does not."""
    explores, other = rng.random(_BLOCK) < epsilon, rng.integers(actions, size=_BLOCK)
    return [action if yes else None for yes, action in zip(explores.tolist(), other.tolist(), strict=True)]


class Games:
    """Emulators that step together, and the games that are played there; arrays [E, ...]."""

    def __init__(self, envs: Played, rules: Rules, chains: Sequence[Sequence[Game]]) -> None:
        """Start the first game of a chain in each emulator."""
        count = len(chains)
        self.envs, self._rules = envs, rules
        self._chains = [list(chain) for chain in chains]  # what each has left, beginning with the game it plays
        self._rng = [stream(rules.seed, chain[0].number) for chain in chains]
        # Of each emulator, in Python's own numbers: there are few, and NumPy takes as long for one as for a hundred.
        self._score, self._length = [0.0] * count, [0] * count
        self._explores: list[list[int | None]] = [[]] * count  # in the present block of steps
        self.frame = envs.reset([chain[0].start for chain in chains]).copy()
        self._own = (envs.own_actions or [envs.num_actions])[0]
        self.is_first = np.ones(count, np.bool_)

    @property
    def idle(self) -> list[int]:
        """The emulators that have no game left; they play on, and nothing of it counts."""
        return [place for place, chain in enumerate(self._chains) if not chain]

    def go_on(self, chains: Mapping[int, Sequence[Game]]) -> None:
        """Start the first games of new chains in some emulators."""
        for place, chain in chains.items():
            self._chains[place] = list(chain)
            self._begin(place)
        self._restart(list(chains))

    def send(self, action: NDArray[np.int64]) -> None:
        """Act, epsilon-greedily."""
        taken = action.tolist()
        for place, length in enumerate(self._length):
            at = length % _BLOCK
            if at == 0:
                self._explores[place] = exploration(self._rng[place], self._rules.epsilon, self._own)
            if (other := self._explores[place][at]) is not None:
                taken[place] = other
        self.envs.send(np.array(taken))

    def recv(self) -> list[Ended]:
        """Take in one step, and return the games that ended by it."""
        out = self.envs.recv()
        self.frame, self.is_first = out.frame, out.terminal | out.truncated
        ended: list[Ended] = []
        cut: list[int] = []
        for place, (reward, game_over) in enumerate(zip(out.reward.tolist(), out.game_over.tolist(), strict=True)):
            self._score[place] += reward
            self._length[place] += 1
            if not game_over and self._length[place] < self._rules.limit:
                continue
            if chain := self._chains[place]:
                ended.append(Ended(chain.pop(0).number, self._score[place], self._length[place]))
                if chain and not game_over:
                    cut.append(place)
            self._begin(place)
        if cut:
            self._restart(cut)
        return ended

    def _begin(self, place: int) -> None:
        """Count from zero again."""
        self._score[place], self._length[place] = 0.0, 0
        if chain := self._chains[place]:
            self._rng[place] = stream(self._rules.seed, chain[0].number)

    def _restart(self, places: list[int]) -> None:
        self.frame = self.frame.copy()
        self.frame[places] = self.envs.restart(places, [self._chains[place][0].start for place in places])
        self.is_first[places] = True
