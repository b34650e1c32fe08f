"""Owns environments in this process, of any family: rows that step together, whose games a pool of threads starts.

Starting a game takes a while, and the others play on meanwhile. Beside a GPU Atari's are in `subprocess_backend`.
Shapes: H halves of R rows of E environments; frames are [C, H, W].
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as first_of
from functools import partial

import numpy as np

from spr.common.hardware import cores
from spr.envs.base import Envs, ObservationConfig
from spr.envs.gymnasium_adapter import Argument
from spr.envs.registry import make
from spr.evaluation.episodes import Arrays, EpisodeBatch, EpisodeResult, EpisodeSpec, Rules

_THREADS = 1  # of a row


class InProcessBackend:
    """Emulators in this process; a pool of threads starts games, which takes a while, and the others play on."""

    idle_rest = False

    def __init__(self, shape: tuple[int, int, int], obs: ObservationConfig, arguments: Mapping[str, Argument]) -> None:
        self._obs, self._arguments = obs, arguments
        self.arrays = Arrays(
            np.zeros((*shape, *obs.frame), np.uint8), np.ones(shape, np.bool_), np.zeros(shape, np.int64)
        )
        self._pool = ThreadPoolExecutor(max(2, cores() // 2))
        self._rows: list[LocalEnvGroup] = []

    def group_identical_starts(self, starts: Sequence[int]) -> list[list[int]]:
        """Every game is played by itself: environments can't go back."""
        return [[place] for place in range(len(starts))]

    def open(
        self, where: tuple[int, int], game: str, rules: Rules, groups: Sequence[Sequence[EpisodeSpec]]
    ) -> "LocalEnvGroup":
        """Begin to make a row's emulators and to start their games."""
        make_envs = partial(make, game, len(groups), _THREADS, self._obs, self._arguments)
        mine = Arrays(*(array[where][: len(groups)] for array in self.arrays))
        self._rows.append(row := LocalEnvGroup(mine, self._pool, make_envs, rules, groups))
        return row

    def look(self, wait: bool) -> None:
        """Rows know themselves whether they are done; wait for games to start, if no row steps."""
        starting = [row.starting for row in self._rows if row.starting is not None]
        if wait and starting and not any(row.stepping for row in self._rows):
            first_of(starting, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Release every emulator."""
        self._pool.shutdown(cancel_futures=True)
        for row in self._rows:
            row.close()


class LocalEnvGroup:
    """Emulators of one agent in this process that step together: busy from every order until `take` is over."""

    def __init__(
        self,
        arrays: Arrays,
        pool: ThreadPoolExecutor,
        make_envs: Callable[[], Envs],
        rules: Rules,
        groups: Sequence[Sequence[EpisodeSpec]],
    ) -> None:
        self._arrays, self._pool = arrays, pool
        self._envs: Envs | None = None
        self._games: EpisodeBatch
        self.stepping = False
        self.starting: Future[None] | None = pool.submit(self._start, make_envs, rules, groups)

    def _start(self, make_envs: Callable[[], Envs], rules: Rules, groups: Sequence[Sequence[EpisodeSpec]]) -> None:
        self._envs = make_envs()
        self._games = EpisodeBatch(self._envs, rules, groups)

    @property
    def num_actions(self) -> int:
        """How many actions an agent has room for."""
        return self._games.envs.num_actions

    @property
    def game_num_actions(self) -> int | None:
        """How many of them its game has, if it may have fewer."""
        own = self._games.envs.game_num_actions
        return own[0] if own else None

    @property
    def height(self) -> None:
        """It shows frames."""

    @property
    def idle(self) -> list[int]:
        """The places that have no game left."""
        return self._games.idle

    @property
    def playing(self) -> int:
        """How many places have one."""
        return len(self._arrays.action) - len(self.idle)

    @property
    def over(self) -> bool:
        """Whether no game is left at all."""
        return self.playing == 0

    @property
    def done(self) -> bool:
        """Whether its games have started; a step is waited for."""
        return self.starting is None or self.starting.done()

    def go_on(self, groups: Mapping[int, Sequence[EpisodeSpec]]) -> None:
        """Begin to start other games in some places."""
        self.starting = self._pool.submit(self._games.go_on, groups)

    def send(self) -> None:
        """Begin a step, with the actions that lie in its places."""
        self._games.send(self._arrays.action)
        self.stepping = True

    def take(self) -> list[EpisodeResult]:
        """Wait for what was begun last, and return the games that ended by it; what went wrong is raised."""
        ended: list[EpisodeResult] = []
        if self.starting is None:
            ended = self._games.recv()
            self.stepping = False
        else:
            self.starting.result()
            self.starting = None
        self._arrays.frame[:], self._arrays.is_first[:] = self._games.frame, self._games.is_first
        return ended

    def close(self) -> None:
        """Release the emulators, once."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None
