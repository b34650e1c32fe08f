"""Owns how a console's gray screens become the frames that an agent sees: made smaller as OpenCV's INTER_AREA does it.

The same float32 sums in the same order, first across and then down, so frames are those of `Atari` to the last bit.
That holds where every product is rounded before it is added: a compiler would join the two, so this is not compiled.
Shapes: R rows of E emulators, each row's of one game; T taps: the pixels that one of a shorter line is made of.
"""

from collections.abc import Iterable
from functools import cache
from math import ceil, floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.envs.ale_emulator import TALLEST
from spr.envs.atari import WIDTH
from spr.envs.base import ObservationConfig


class Resizer:
    """Makes the screens of R rows of emulators smaller; games differ in height, so each row has its own taps."""

    def __init__(self, rows: int, obs: ObservationConfig, device: torch.device) -> None:
        """No row has a game yet."""
        self._height = obs.height
        columns, across = taps(WIDTH, obs.width)
        self._columns, self._across = torch.from_numpy(columns).to(device), torch.from_numpy(across).to(device)
        most = ceil(TALLEST / obs.height) + 1
        self._lines = torch.zeros(rows, most, obs.height, dtype=torch.int64, device=device)  # of a screen, [R, T, H]
        self._down = torch.zeros(rows, most, obs.height, device=device)

    def lend(self, place: int, height: int) -> None:
        """Expect screens of so many lines from a row of emulators."""
        lines, down = map(torch.from_numpy, taps(height, self._height))
        for table, own in ((self._lines, lines), (self._down, down)):
            table[place].zero_()
            table[place, : len(own)].copy_(own)

    def __call__(self, screen: Tensor) -> Tensor:
        """Return frames [R, E, 1, H, W] of screens [R, E, 1, 250, 160]; nothing below a lower one counts."""
        pixels = screen[:, :, 0].float()
        columns = zip(self._columns, self._across, strict=True)
        across = _weighted((pixels.index_select(-1, where), part) for where, part in columns)  # [R, E, 250, W]
        shape = (*screen.shape[:2], self._height, across.shape[-1])
        down = (
            (across.take_along_dim(where[:, None, :, None].expand(shape), 2), part[:, None, :, None])
            for where, part in zip(self._lines.unbind(1), self._down.unbind(1), strict=True)
        )
        return _weighted(down).round_().to(torch.uint8)[:, :, None]


def _weighted(taps: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum pixels by their weights, one after the other: another order would round differently."""
    products = (pixels * weight for pixels, weight in taps)
    total = next(products)
    for product in products:
        total += product
    return total


@cache
def taps(source: int, target: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return which pixels of a line each one of a shorter line is made of, and their weights: [T, target] both.

    Where one is made of fewer than T, the others have no weight.
    """
    scale = source / target
    found: list[list[tuple[int, float]]] = []
    for pixel in range(target):
        begin, end = pixel * scale, (pixel + 1) * scale
        last = min(floor(end), source - 1)
        first = min(ceil(begin), last)
        parts = [(first - 1, first - begin)] if first - begin > 1e-3 else []
        parts += [(whole, 1.0) for whole in range(first, last)]
        parts += [(last, min(end - last, 1.0))] if end - last > 1e-3 else []
        found.append([(where, part / min(scale, source - begin)) for where, part in parts])
    most = max(map(len, found))
    table = np.array([parts + [(0, 0.0)] * (most - len(parts)) for parts in found])  # [target, T, 2]
    return table[..., 0].T.astype(np.intp), table[..., 1].T.astype(np.float32)
