"""Owns an Atari emulator in the caller's own thread: it plays the games of `Atari`, to the last pixel, for less.

ale-py's vector hands every step to a thread, steps all of its emulators together and resizes every frame whole. Where
a process has a few emulators of its own (see `elsewhere`), a tenth of a step's time can be spared: here nothing is
handed over, an emulator steps only if it is told to, rows that look as before are not resized again, and what is left
to be resized of all emulators is resized at once.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np
from ale_py import ALEInterface, LoggerMode
from numpy.typing import NDArray

from spr.atari import FRAME_SKIP, HEIGHT, MAX_FRAMES, NOOP_MAX, ROOM, WIDTH, check_actions
from spr.environment import Frames, ObservationConfig, Step
from spr.roms import rom_path


class Saved(NamedTuple):
    """All that a game depends on."""

    console: Any
    seed: int
    lives: int
    steps: int


def noops(seed: int) -> int:
    """Return how many no-ops a game begins with that starts from a seed: games differ in nothing else."""
    return _below(NOOP_MAX, np.random.RandomState(seed))  # C++'s mt19937, seeded by one number, is the same


class Emulator:
    """One environment of the Atari 100k protocol; no game follows one that is over until it is asked for."""

    def __init__(self, game: str, screens: "Screens", place: int = 0) -> None:
        """Find the ROM; a missing one is refused by name. It takes a while to load, so the first game does that."""
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._rom = rom_path(game)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._game, self._actions = game, list[Any]()
        self._loaded: Any = None  # the console as it is when the ROM has been loaded
        self._two: NDArray[np.uint8]  # the last frames of a step
        self._screens, self._place = screens, place
        self._seed = self._lives = self._steps = 0
        self._brought: tuple[NDArray[Any], ...]  # by the last step, beside its frame
        self.num_actions = ROOM
        self.own_actions: list[int] | None = None  # known when the first game has started

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start the game that `Atari` starts from this seed, after as many no-ops, 0 to 29.

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
        self._ale.getScreenGrayscale(self._two[0])
        self._screens.show(self._place, self._two[:1])
        return self._screens.frame(self._place)

    def _load(self) -> None:
        self._ale.setInt("random_seed", 1)  # whichever: left alone, it would be the time of day
        self._ale.loadROM(self._rom)
        self._loaded = self._ale.cloneState()
        self._two = np.zeros((2, *self._ale.getScreenDims()), np.uint8)
        self._actions = self._ale.getMinimalActionSet()
        self.own_actions = [len(self._actions)]

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
            self._screens.show(self._place, self._two)

    def recv(self) -> Step:
        """Return what the step has brought: if this waits until others have stepped, all are resized at once.

        Of a game that has ended by itself the frame is that of the step before.
        """
        return Step(self._screens.frame(self._place), *self._brought)


def _below(end: int, random: np.random.RandomState) -> int:
    """Draw a number from 0 to end - 1 as C++'s uniform_int_distribution does (in libstdc++ by Lemire's method)."""
    while True:
        product = int.from_bytes(random.bytes(4), "little") * end
        if product % 2**32 >= 2**32 % end:
            return product >> 32


class Screens:
    """What some emulators of a game show: the console's gray frames, made smaller as OpenCV's INTER_AREA does it.

    The same float32 sums in the same order, first across and then down, but only of what has changed: a row that looks
    as before is not resized across again, and a small row none of whose rows has changed is kept. All emulators are
    resized at once, their rows below each other: there are few of them, and NumPy's calls take most of the time. All
    play the same game: a frame of another height begins with black screens again.
    Shapes: E emulators, T taps, N rows that have changed. Most games have 210 rows, as written here; those for European
    television sets have 250.
    """

    def __init__(self, obs: ObservationConfig, count: int = 1) -> None:
        """Begin with black screens."""
        self._columns, self._weights_across = _taps(WIDTH, obs.width)
        # A black screen resizes to black.
        self._frame: NDArray[np.uint8] = np.zeros((count, 1, 1, obs.height, obs.width), np.uint8)
        self._tall(HEIGHT)

    def _tall(self, height: int) -> None:
        """Have screens of so many rows, and find out which of them a smaller one is made of."""
        count, _, _, small, width = self._frame.shape
        rows, down = _taps(height, small)
        self._now = np.zeros((count, height, WIDTH), np.uint8)
        # All emulators' rows below each other, from here on; in words of 64 bits, which are compared faster than bytes.
        self._words = self._now.reshape(-1, WIDTH).view(np.uint64)  # [E * 210, 20]
        self._before = self._words.copy()
        self._across = np.zeros((count * height, width), np.float32)  # rows resized across
        self._rows = np.concatenate([rows + height * place for place in range(count)], 1)  # [T, E * 84]
        self._weights_down = np.concatenate([down] * count, 1)[..., None]  # [T, E * 84, 1]
        self._frame[:] = 0
        self._stale = False

    @staticmethod
    def fit(obs: ObservationConfig) -> bool:
        """Whether OpenCV goes this way for gray frames of any game: sides that both shrink by whole numbers go another.

        Heights differ between games, so any width that divides 160 is refused.
        """
        return obs.channels == 1 and obs.height < HEIGHT and obs.width < WIDTH and WIDTH % obs.width != 0

    def show(self, place: int, frames: NDArray[np.uint8]) -> None:
        """Show the brighter of some frames, [F, 210, 160], at every pixel."""
        if frames.shape[1] != self._now.shape[1]:
            self._tall(frames.shape[1])
        np.maximum.reduce(frames, out=self._now[place])
        self._stale = True

    def frame(self, place: int) -> Frames:
        """Return what an emulator shows, [1, 1, H, W], which is good until it shows something else."""
        if self._stale:
            self._resize()
            self._stale = False
        return self._frame[place, :]

    def _resize(self) -> None:
        # Four flags at a time, and column by column: NumPy takes long for many short rows.
        differs = (self._words != self._before).view(np.uint32)  # [E * 210, 5]
        changed = reduce(np.bitwise_or, differs.T).astype(np.bool_)
        (row,) = changed.nonzero()
        if not len(row):
            return
        words = self._words[row]
        self._before[row] = words
        pixels = words.view(np.uint8).astype(np.float32)  # [N, 160]
        self._across[row] = _weighted((pixels[:, where] for where in self._columns), self._weights_across)
        (small,) = reduce(np.logical_or, (changed[where] for where in self._rows)).nonzero()
        down = (self._across.take(where, 0) for where in self._rows[:, small])
        self._frame.reshape(-1, self._frame.shape[-1])[small] = np.rint(_weighted(down, self._weights_down[:, small]))


def _weighted(taps: Iterable[NDArray[np.float32]], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum taps one after the other: another order would round differently."""
    products = (tap * weight for tap, weight in zip(taps, weights, strict=True))
    total: NDArray[np.float32] = next(products)
    for product in products:
        total += product
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
