"""Owns an Atari emulator in the caller's own thread: it plays the games of `Atari`, for less.

ale-py's vector hands every step to a thread, steps all of its emulators together and resizes every frame. This
emulator, for processes with a few of their own (`evaluation.subprocess_backend`), does none of that. It steps when it
is called, and returns the console's gray screens: a GPU resizes them (`evaluation.screen_resize`).
Screens are [1, 1, H, 160]; most games have 210 rows, and those for European television sets up to 250.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ale_py import ALEInterface, LoggerMode
from numpy.typing import NDArray

from spr.envs.atari import FRAME_SKIP, HEIGHT, MAX_FRAMES, NOOP_MAX, ROOM, WIDTH, check_actions
from spr.envs.base import Frames, ObservationConfig, Step
from spr.envs.roms import rom_path

TALLEST = 250  # rows that a screen may have


class Saved(NamedTuple):
    """All that a game depends on."""

    console: Any
    seed: int
    lives: int
    steps: int


def shows(obs: ObservationConfig) -> bool:
    """Whether frames of this kind can be made of the screens of any game: gray ones that are smaller both ways.

    OpenCV goes another way where both sides shrink by whole numbers. Heights differ between games, so any width that
    divides 160 is refused.
    """
    return obs.channels == 1 and obs.height < HEIGHT and obs.width < WIDTH and WIDTH % obs.width != 0


def noops(seed: int) -> int:
    """Return how many no-ops a game begins with that starts from a seed: games differ in nothing else."""
    return _below(NOOP_MAX, np.random.RandomState(seed))  # C++'s mt19937, seeded by one number, is the same


class Emulator:
    """One environment of the Atari 100k protocol; no game follows one that is over until it is asked for."""

    def __init__(self, game: str) -> None:
        """Find the ROM; a missing one is refused by name. It takes a while to load, so the first game does that."""
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._rom = rom_path(game)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._game, self._actions = game, list[Any]()
        self._loaded: Any = None  # the console as it is when the ROM has been loaded
        self._two: NDArray[np.uint8]  # the last frames of a step, [2, H, 160]
        self._screen: Frames  # the brighter of them at every pixel
        self._seed = self._lives = self._steps = 0
        self._brought: tuple[NDArray[Any], ...]  # by the last step, beside its screen
        self.num_actions = ROOM
        self.game_num_actions: list[int] | None = None  # known when the first game has started

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start the game that `Atari` starts from this seed, after as many no-ops, 0 to 29, and return its screen.

        `Atari` loads the ROM again for a seed, which takes as long as 200 steps, nearly all of it for palettes. A seed
        changes nothing that a game could see, in any that was looked at; so here the console is brought back to where
        it was when the ROM had been loaded, and only the no-ops depend on the seed.
        """
        (seed,) = seeds
        if self._loaded is None:
            self._load()
        else:
            self._ale.restoreState(self._loaded)
        self._ale.reset_game()
        for _ in range(noops(seed)):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        self._seed, self._lives, self._steps = seed, self._ale.lives(), 0
        self._ale.getScreenGrayscale(self._screen[0, 0])
        return self._screen

    def _load(self) -> None:
        self._ale.setInt("random_seed", 1)  # whichever: left alone, it would be the time of day
        self._ale.loadROM(self._rom)
        self._loaded = self._ale.cloneState()
        height, width = self._ale.getScreenDims()
        if height > TALLEST or width != WIDTH:
            raise ValueError(f"{self._game} has {height} rows of {width} pixels, not {TALLEST} of {WIDTH} at most")
        self._two = np.zeros((2, height, width), np.uint8)
        self._screen = np.zeros((1, 1, height, width), np.uint8)
        self._actions = self._ale.getMinimalActionSet()
        self.game_num_actions = [len(self._actions)]

    @property
    def height(self) -> int:
        """Rows of its screens; known when the first game has started."""
        return len(self._screen[0, 0])

    def save(self) -> Saved:
        """Return all that the game depends on, but for what the emulator shows."""
        return Saved(self._ale.cloneState(), self._seed, self._lives, self._steps)

    def restore(self, saved: Saved) -> None:
        """Go back to what was saved; nothing is shown until the next step.

        Whether a console is in the middle of a frame is not part of its state. After a reset it may be (Q*bert's is),
        so a game that has not moved starts again.
        """
        console, seed, self._lives, self._steps = saved
        if self._steps == 0:
            self.reset([seed])
        else:
            self._ale.restoreState(console)

    def send(self, action: NDArray[np.int64]) -> None:
        """Repeat the action for four frames, or until the game is over."""
        check_actions(self._game, len(self._actions), action)
        ale, button = self._ale, self._actions[action[0]]
        reward, over = 0, False
        for left in reversed(range(FRAME_SKIP)):
            reward += ale.act(button)
            over = ale.game_over()
            if over:
                break
            if left < 2:
                ale.getScreenGrayscale(self._two[left])
        lives = ale.lives()
        terminal = over or 0 < lives < self._lives
        self._lives = lives
        self._steps += 1
        truncated = self._steps * FRAME_SKIP >= MAX_FRAMES
        self._brought = np.array([reward], np.float32), *np.array([[terminal], [truncated], [over or truncated]])
        if not over:
            np.maximum(self._two[0], self._two[1], out=self._screen[0, 0])

    def recv(self) -> Step:
        """Return what the step has brought, with a screen that is good until the next one.

        Of a game that has ended by itself it is that of the step before.
        """
        return Step(self._screen, *self._brought)


def _below(end: int, random: np.random.RandomState) -> int:
    """Draw a number from 0 to end - 1 as C++'s uniform_int_distribution does (in libstdc++ by Lemire's method)."""
    while True:
        product = int.from_bytes(random.bytes(4), "little") * end
        if product % 2**32 >= 2**32 % end:
            return product >> 32
