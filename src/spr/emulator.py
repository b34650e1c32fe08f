"""Owns an Atari emulator in the caller's own thread: it plays the games of `Atari`, to the last pixel, for less.

ale-py's vector hands every step to a thread, steps all of its emulators together and resizes every frame whole. Where
a process has a few emulators of its own (see `elsewhere`), a tenth of a step's time can be spared: here nothing is
handed over, an emulator steps only if it is told to, and rows that look as before are not resized again.
"""

from collections.abc import Sequence
from math import ceil, floor, gcd
from typing import Any

import numpy as np
from ale_py import ALEInterface, LoggerMode
from numpy.typing import NDArray

from spr.atari import FRAME_SKIP, HEIGHT, MAX_FRAMES, NOOP_MAX, ROOM, WIDTH, check_actions
from spr.environment import Frames, ObservationConfig, Step
from spr.roms import rom_path


class Emulator:
    """One environment of the Atari 100k protocol."""

    def __init__(self, game: str, obs: ObservationConfig) -> None:
        """Find the ROM; a missing one is refused by name. It takes a while to load, so the first game does that."""
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._rom = rom_path(game)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._game, self._actions = game, list[Any]()
        self._noops = np.random.RandomState()  # of C++'s mt19937, seeded by one number: the same
        self._two = np.zeros((2, HEIGHT, WIDTH), np.uint8)  # the last frames of a step
        self._resized = Resized(obs.height, obs.width)
        self._action = self._lives = self._steps = 0
        self.num_actions = ROOM
        self.own_actions: list[int] | None = None  # known when the first game has started

    @staticmethod
    def shows(obs: ObservationConfig) -> bool:
        """Whether frames of this kind can be had from it."""
        return obs.channels == 1 and Resized.fits(obs.height, obs.width)

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start the game that `Atari` starts from this seed, after as many no-ops, 0 to 29."""
        (seed,) = seeds
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(self._rom)
        self._actions = self._ale.getMinimalActionSet()
        self.own_actions = [len(self._actions)]
        self._noops.seed(seed)
        return self._start()

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start a new game."""
        assert list(places) == [0]
        return self.reset(seeds)

    def send(self, action: NDArray[np.int64]) -> None:
        """Note the action: the step is made by whoever waits for it."""
        check_actions(self._game, len(self._actions), action)
        self._action = int(action[0])

    def recv(self) -> Step:
        """Repeat the action for four frames, or until the game is over."""
        ale, action = self._ale, self._actions[self._action]
        reward, over = 0, False
        for left in reversed(range(FRAME_SKIP)):
            reward += ale.act(action)
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
        frame = self._start() if over or truncated else self._resized(np.maximum(*self._two))[None, None]
        flags = np.array([[terminal], [truncated], [over or truncated]])
        return Step(frame, np.array([reward], np.float32), *flags)

    def _start(self) -> Frames:
        self._ale.reset_game()
        for _ in range(_below(NOOP_MAX, self._noops)):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        self._lives, self._steps = self._ale.lives(), 0
        self._ale.getScreenGrayscale(self._two[0])
        return self._resized(self._two[0])[None, None]


def _below(end: int, random: np.random.RandomState) -> int:
    """Draw a number from 0 to end - 1 as C++'s uniform_int_distribution does (in libstdc++ by Lemire's method)."""
    while True:
        product = int.from_bytes(random.bytes(4), "little") * end
        if product % 2**32 >= 2**32 % end:
            return product >> 32


class Resized:
    """The console's gray frames as OpenCV's INTER_AREA makes them smaller: the same float32 sums in the same order.

    Heights have a common divisor, 42 of 210 and 84 rows: so many blocks of rows do not depend on each other, and those
    that look as they did in the frame before are kept.
    """

    def __init__(self, height: int, width: int) -> None:
        """Find out which pixels a smaller one is made of."""
        blocks = gcd(HEIGHT, height)
        self._columns, self._across = _taps(WIDTH, width)
        rows, down = _taps(HEIGHT, height)
        self._rows, self._down = rows[:, : height // blocks], down[:, : height // blocks, None]
        self._before = np.zeros((blocks, HEIGHT // blocks, WIDTH), np.uint8)
        self._frame = np.zeros((blocks, height // blocks, width), np.uint8)  # of a black one: black as well

    @staticmethod
    def fits(height: int, width: int) -> bool:
        """Whether OpenCV goes this way: larger frames, and sides that both shrink by whole numbers, have others."""
        return height < HEIGHT and width < WIDTH and bool(HEIGHT % height or WIDTH % width)

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a smaller frame, [H, W], which is good until the next one."""
        blocks = frame.reshape(self._before.shape)
        (changed,) = (blocks != self._before).any((1, 2)).nonzero()
        if len(changed):
            self._before[changed] = new = blocks[changed]
            across = _weighted(new.astype(np.float32), self._columns, self._across, -1)
            self._frame[changed] = np.rint(_weighted(across, self._rows, self._down, -2))
        return self._frame.reshape(-1, self._frame.shape[-1])


def _weighted(
    x: NDArray[np.float32], where: NDArray[np.intp], weight: NDArray[np.float32], axis: int
) -> NDArray[np.float32]:
    """Sum the taps of every new pixel of a dimension, one after the other."""
    total: NDArray[np.float32] = x.take(where[0], axis) * weight[0]
    for tap in range(1, len(where)):
        total += x.take(where[tap], axis) * weight[tap]
    return total


def _taps(source: int, target: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return which pixels of a line each one of a shorter line is made of, and their weights: [T, target] both.

    Where one is made of fewer than T, the others have no weight.
    """
    scale = source / target
    taps: list[list[tuple[int, float]]] = []
    for pixel in range(target):
        begin, end = pixel * scale, (pixel + 1) * scale
        last = min(floor(end), source - 1)
        first = min(ceil(begin), last)
        parts = [(first - 1, first - begin)] if first - begin > 1e-3 else []
        parts += [(whole, 1.0) for whole in range(first, last)]
        parts += [(last, min(end - last, 1.0))] if end - last > 1e-3 else []
        taps.append([(where, part / min(scale, source - begin)) for where, part in parts])
    most = max(map(len, taps))
    table = np.array([parts + [(0, 0.0)] * (most - len(parts)) for parts in taps])  # [target, T, 2]
    return table[..., 0].T.astype(np.intp), table[..., 1].T.astype(np.float32)
