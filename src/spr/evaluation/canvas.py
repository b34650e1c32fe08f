"""Owns how one moment of a game is drawn as an image: the game beside Q-values, the return, and what was foreseen.

Shapes: A actions, Z atoms, K steps; images [H, W, 3].
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spr.envs.base import Image as Picture

_Colour = tuple[int, int, int]


class Moment(NamedTuple):
    """One step of a game: what there was to see, what the agent made of it, and what it did."""

    step: int  # steps played, with this one
    picture: Picture  # before the action
    q_values: NDArray[np.float32]  # [A]
    action: int
    explores: bool  # whether chance chose the action
    distribution: NDArray[np.float32] | None  # [Z] of the action's return; None where Q-values are learnt directly
    cosines: NDArray[np.float32] | None  # [K] see `Foresight`; None without a transition model
    score: float  # with what the action earned


WIDTH, HEIGHT = 1024, 672  # multiples of 16, as video codecs want them
_MARGIN, _BOX = 16, (512, 640)  # around everything, and of the game's picture
_LEFT, _RIGHT = 552, WIDTH - _MARGIN  # of the column beside it
_NAMES, _VALUES = 124, 62  # widths: of the names before bars, of the values behind them
_HEADING, _GAP, _THIN = 24, 14, 20  # heights: of a panel's title, between panels, of a thin bar
_MOST_ACTIONS, _MOST_AHEAD = 18, 6  # bars that fit
_BACK, _TROUGH, _DIM, _TEXT = (17, 19, 24), (36, 40, 49), (138, 144, 156), (222, 226, 233)
_BAR, _CHOSEN, _RANDOM, _FORESEEN = (92, 118, 166), (255, 166, 54), (240, 92, 84), (84, 180, 140)


class Canvas:
    """Draws moments of one game as pictures of one size; what stays the same is drawn once."""

    def __init__(self, title: str, action_names: Sequence[str], support: NDArray[np.float32]) -> None:
        """Take the title, the names of the actions, and the atoms of return distributions."""
        path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
        self._large, self._font, self._small = (ImageFont.truetype(path, size) for size in (20, 15, 12))
        self._title, self._names, self._support = title, list(action_names), support
        self._spread = 0.0

    def draw(self, moment: Moment) -> Picture:
        """Draw one moment; bars of Q-values are scaled by the largest spread of the last moments."""
        image = Image.new("RGB", (WIDTH, HEIGHT), _BACK)
        _place(image, moment.picture)
        draw = ImageDraw.Draw(image)
        draw.text((_LEFT, 14), self._fit(self._title, _RIGHT - _LEFT, self._large), _TEXT, self._large)
        draw.text((_LEFT, 44), f"step {moment.step:,}", _TEXT, self._font)
        draw.text((_LEFT + _NAMES, 44), f"score {moment.score:,.6g}", _TEXT, self._font)
        top = self._draw_q_values(draw, moment, 80)
        ahead = 0 if moment.cosines is None else _HEADING + _THIN * min(len(moment.cosines), _MOST_AHEAD) + _GAP
        if moment.distribution is not None:
            top = self._draw_distribution(draw, moment.distribution, top, min(HEIGHT - _MARGIN - ahead, top + 300))
        if moment.cosines is not None:
            self._draw_cosines(draw, moment.cosines, top)
        return np.asarray(image)

    def _draw_q_values(self, draw: ImageDraw.ImageDraw, moment: Moment, top: int) -> int:
        q = moment.q_values
        least, largest = float(q.min()), float(q.max())
        self._spread = max(largest - least, 0.98 * self._spread, 1e-6)
        shown: Sequence[int] = range(len(q))
        if len(q) > _MOST_ACTIONS:
            shown = sorted({*np.argsort(-q)[: _MOST_ACTIONS - 1].tolist(), moment.action})
        chosen = _RANDOM if moment.explores else _CHOSEN
        rows = [
            (self._names[i], (q[i] - least) / self._spread, f"{q[i]:.3f}", chosen if i == moment.action else _BAR)
            for i in shown
        ]
        draw.text((_LEFT, top), "Q-values", _TEXT, self._font)
        aside = "chosen at random" if moment.explores else "bars begin at the least of them"
        draw.text((_RIGHT, top + 2), aside, _RANDOM if moment.explores else _DIM, self._small, anchor="ra")
        return self._draw_bars(draw, rows, top + _HEADING, min(26, 288 // len(rows)))

    def _draw_cosines(self, draw: ImageDraw.ImageDraw, cosines: NDArray[np.float32], top: int) -> None:
        depth = len(cosines)
        shown = sorted({round(k) for k in np.linspace(1, depth, min(depth, _MOST_AHEAD))})
        rows = []
        for k in shown:
            value = float(cosines[k - 1])
            text = "-" if math.isnan(value) else f"{value:.3f}"
            rows.append((f"{k} step{'' if k == 1 else 's'} ago", value, text, _FORESEEN))
        draw.text((_LEFT, top), "How well this was foreseen", _TEXT, self._font)
        draw.text((_RIGHT, top + 2), "cosine of latents", _DIM, self._small, anchor="ra")
        self._draw_bars(draw, rows, top + _HEADING, _THIN)

    def _draw_bars(
        self,
        draw: ImageDraw.ImageDraw,
        rows: Sequence[tuple[str, float, str, tuple[int, int, int]]],
        top: int,
        each: int,
    ) -> int:
        """Draw a row for each name, share of the full length, value and colour; return where what follows begins."""
        font = self._font if each > _THIN else self._small
        left, right = _LEFT + _NAMES, _RIGHT - _VALUES
        for i, (name, share, value, colour) in enumerate(rows):
            y = top + i * each
            middle = y + each // 2
            shade = _DIM if colour == _BAR else _TEXT
            draw.text((_LEFT, middle), self._fit(name, _NAMES - 8, font), shade, font, anchor="lm")
            draw.rectangle((left, y + 2, right, y + each - 3), _TROUGH)
            if share >= 0:  # neither NaN nor the other way
                draw.rectangle(
                    (left, y + 2, left + max(1, round(min(share, 1) * (right - left))), y + each - 3), colour
                )
            draw.text((_RIGHT, middle), value, shade, font, anchor="rm")
        return top + len(rows) * each + _GAP

    def _draw_distribution(
        self, draw: ImageDraw.ImageDraw, probabilities: NDArray[np.float32], top: int, end: int
    ) -> int:
        """Draw a column for each atom between two heights, and the mean; return where what follows begins."""
        draw.text((_LEFT, top), "Return of this action", _TEXT, self._font)
        draw.text((_RIGHT, top + 2), f"largest share {probabilities.max():.0%}", _DIM, self._small, anchor="ra")
        high, low = top + _HEADING + 2, end - 18
        draw.rectangle((_LEFT, high, _RIGHT, low), _TROUGH)
        edges = np.linspace(_LEFT, _RIGHT, len(probabilities) + 1).round().astype(int).tolist()
        gap = 1 if len(probabilities) <= 100 else 0
        for i, share in enumerate((probabilities / probabilities.max()).tolist()):
            if tall := round(share * (low - high - 4)):
                draw.rectangle((edges[i] + gap, low - tall, max(edges[i] + gap, edges[i + 1] - 1), low), _CHOSEN)
        first, last = float(self._support[0]), float(self._support[-1])
        mean = float((probabilities * self._support).sum())
        inner = (_RIGHT - _LEFT) / len(probabilities) / 2  # half a column: atoms are in the middle of theirs
        x = _LEFT + inner + (mean - first) / (last - first) * (_RIGHT - _LEFT - 2 * inner)
        draw.line((x, high, x, low), _TEXT, 2)
        for place, text, anchor in ((_LEFT, f"{first:g}", "la"), (_RIGHT, f"{last:g}", "ra")):
            draw.text((place, low + 3), text, _DIM, self._small, anchor=anchor)
        near = min(max(x, _LEFT + 70), _RIGHT - 70)
        draw.text((near, low + 3), f"mean {mean:.3f}", _TEXT, self._small, anchor="ma")
        return end + _GAP

    def _fit(self, text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
        """Cut a text that is too wide."""
        while font.getlength(text) > width:
            text = text.rstrip("…")[:-1] + "…"
        return text


def _place(image: Image.Image, picture: Picture) -> None:
    """Put the game's picture into its box as large as it can be there, by whole steps where it grows."""
    height, width = picture.shape[:2]
    scale = min(_BOX[0] / width, _BOX[1] / height)
    small = scale < 1
    scale = scale if small else math.floor(scale)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    grown = Image.fromarray(picture).resize(size, Image.Resampling.BOX if small else Image.Resampling.NEAREST)
    image.paste(grown, tuple(_MARGIN + (box - side) // 2 for box, side in zip(_BOX, size, strict=True)))
