"""Owns catch, the built-in game: small enough to be learnt on a CPU in minutes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spr.common.errors import UserError
from spr.envs.base import USUAL_OBSERVATION, Frames, Image, ObservationConfig, Step, to_image


class Catch:
    """The built-in game: ten balls fall, one after another, down a grid of 4x4 cells; move the paddle under each.

    Three actions (left, stay, right). A caught ball scores 1. Each ball is a life: its landing ends an episode for
    learning while the game goes on, and the tenth ends the game. A random agent catches about one in four.
    """

    CELLS, BALLS = 4, 10

    def __init__(self, count: int, obs: ObservationConfig = USUAL_OBSERVATION) -> None:
        """Set `count` boards."""
        if obs.height % self.CELLS or obs.width % self.CELLS:
            raise UserError(
                f"catch has {self.CELLS}x{self.CELLS} cells: observation.height, width must be multiples of 4"
            )
        self._obs = obs
        self.num_actions = 3
        self.action_names = ["left", "stay", "right"]
        self.game_num_actions: list[int] | None = None
        self.deterministic = True
        self.notice = ""
        self.protocols = [{"name": "catch", "version": 1, "balls": self.BALLS}] * count
        self._count = count
        self._random: list[np.random.Generator] = []
        self._paddle = np.zeros(count, np.int64)
        self._column = np.zeros(count, np.int64)
        self._row = np.zeros(count, np.int64)
        self._played = np.zeros(count, np.int64)

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game from its own seed."""
        self._random = [np.random.default_rng() for _ in seeds]
        return self.restart(range(self._count), seeds)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games on some boards."""
        for place, seed in zip(places, seeds, strict=True):
            self._random[place] = np.random.default_rng(seed)
            self._new_game(place)
        return self._draw()[list(places)]

    def send(self, action: NDArray[np.int64]) -> None:
        """Move the paddles."""
        self._paddle = np.clip(self._paddle + np.asarray(action) - 1, 0, self.CELLS - 1)

    def recv(self) -> Step:
        """Let the balls fall one cell; one that reaches the paddle's row is caught or missed."""
        self._row += 1
        landed = self._row == self.CELLS - 1
        caught = landed & (self._paddle == self._column)
        self._played += landed
        game_over = self._played == self.BALLS
        for i in np.flatnonzero(landed).tolist():
            if game_over[i]:
                self._new_game(i)
            else:
                self._drop(i)
        return Step(self._draw(), caught.astype(np.float32), landed, np.zeros_like(landed), game_over)

    def close(self) -> None:
        """Nothing is held."""

    def picture(self) -> Image:
        """Return the first board."""
        return to_image(self._draw()[0].transpose(1, 2, 0))

    def _new_game(self, i: int) -> None:
        self._played[i] = 0
        self._paddle[i] = self._random[i].integers(self.CELLS)
        self._drop(i)

    def _drop(self, i: int) -> None:
        self._row[i] = 0
        self._column[i] = self._random[i].integers(self.CELLS)

    def _draw(self) -> Frames:
        cells = np.zeros((self._count, self.CELLS, self.CELLS), np.uint8)
        boards = np.arange(self._count)
        cells[boards, self.CELLS - 1, self._paddle] = 160
        cells[boards, self._row, self._column] = 255
        frame = cells.repeat(self._obs.height // self.CELLS, 1).repeat(self._obs.width // self.CELLS, 2)
        return frame[:, None].repeat(self._obs.channels, 1)
