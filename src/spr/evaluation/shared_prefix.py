"""Owns games that begin alike, in one emulator: what they have in common is played once.

Nothing is left to chance but the no-ops before a game and the steps that explore. So games of an agent that begin with
as many no-ops are one game until one of them explores. They are played as one until then; the console is kept as it is,
that game is played to its end, and the others go on from where it left them. What ends before any of them explores has
ended for all of them. The shorter the games and the smaller epsilon, the more is spared.
Shapes: one emulator, so arrays are [1, ...]; frames are [C, H, W], or the console's screens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spr.envs.base import Frames
from spr.evaluation.episodes import EpisodeResult, EpisodeSpec, Exploration, Rules, SteppedEnvs

_Shown = tuple[Frames, NDArray[np.bool_]]  # a frame, and whether an episode began with it


class Resumable(SteppedEnvs, Protocol):
    """An emulator that can go back."""

    def save(self) -> Any:
        """Return all that its game depends on."""

    def restore(self, saved: Any) -> None:
        """Go back to what was saved; nothing is shown until the next step."""


class _Parting(NamedTuple):
    """Where a game has left the others."""

    console: Any
    score: float
    length: int
    seen: tuple[_Shown, ...]  # the last of what the agent saw


class SharedPrefixEpisodes:
    """A group of games that begin alike: those that are still one game, and the one that has parted, if one has."""

    def __init__(self, emulator: Resumable, rules: Rules, groups: Sequence[Sequence[EpisodeSpec]], stack: int) -> None:
        """Start the group's games; `stack` is how many frames an agent sees at once."""
        self._emulator, self._rules = emulator, rules
        self._seen: deque[_Shown] = deque(maxlen=stack)
        (group,) = groups
        self.go_on({0: group})

    def go_on(self, groups: Mapping[int, Sequence[EpisodeSpec]]) -> None:
        """Start another group's games."""
        (group,) = groups.values()
        frame = self._emulator.reset([group[0].start])
        own = (self._emulator.game_num_actions or [self._emulator.num_actions])[0]
        self._together = {game.number: Exploration(self._rules, game.number, own) for game in group}
        self._alone: tuple[int, Exploration] | None = None
        self._parting: _Parting | None = None
        self._again: deque[_Shown] = deque()  # what is shown once more, before games go on
        self._score, self._length = 0.0, 0
        self._seen.clear()
        self._see(frame, np.ones(1, np.bool_))

    @property
    def idle(self) -> list[int]:
        """The emulator, if it has no game left."""
        return [] if self._together or self._alone else [0]

    def send(self, action: NDArray[np.int64]) -> None:
        """Act, epsilon-greedily."""
        if self._again:
            return  # the agent has not seen all of what its choice depends on
        if self._alone is None:
            self._part()
        if self._alone is not None and (other := self._alone[1].at(self._length)) is not None:
            action = np.array([other])
        self._emulator.send(action)

    def _part(self) -> None:
        """Let the first of the games that explore now leave the others."""
        exploring = [number for number, game in self._together.items() if game.at(self._length) is not None]
        if not exploring:
            return
        self._alone = exploring[0], self._together.pop(exploring[0])
        if self._together:
            self._parting = _Parting(self._emulator.save(), self._score, self._length, tuple(self._seen))

    def recv(self) -> list[EpisodeResult]:
        """Take in one step, and return the games that ended by it."""
        if self._again:
            self.frame, self.is_first = self._again.popleft()
            return []
        out = self._emulator.recv()
        self._score += float(out.reward[0])
        self._length += 1
        if not out.game_over[0] and self._length < self._rules.limit:
            self._see(out.frame, out.terminal | out.truncated)
            return []
        numbers = list(self._together) if self._alone is None else [self._alone[0]]
        ended = [EpisodeResult(number, self._score, self._length) for number in numbers]
        if self._alone is None:
            self._together.clear()
        self._alone = None
        if self._together:
            self._go_back()
        return ended

    def _go_back(self) -> None:
        """Go back to where the last game has left the others, and show the agent again what it saw there."""
        assert self._parting is not None
        console, self._score, self._length, seen = self._parting
        self._emulator.restore(console)
        self._seen.clear()
        self._seen.extend(seen)
        self._again.extend(seen)
        self.frame, self.is_first = self._again.popleft()

    def _see(self, frame: Frames, is_first: NDArray[np.bool_]) -> None:
        """Show a frame: the emulator's own array, good until it steps again."""
        self.frame, self.is_first = frame, is_first
        if len(self._together) > 1 and self._alone is None:  # some may come back to it
            self._seen.append((frame.copy(), is_first))
