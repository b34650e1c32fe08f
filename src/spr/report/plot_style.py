"""Owns how a report's figures look: their width, colours, markers and legends, readable in grey and on a phone."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's colours, distinguishable with any kind of colour vision; lines and markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C3A")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#767676"
MOST_LINES = 6  # that an eye can follow
_WIDTH = 5.4  # inches of every figure: its letters can be read where it fills half a page, and on a phone
_DPI = 200
LACKING = "hollow: lacks games or runs"


class Drawing(NamedTuple):
    """A figure as a PNG, with its name in files, its title, and in words what is to be seen."""

    name: str
    title: str
    words: str
    png: bytes

    def base64(self) -> str:
        """Return the picture as a page holds it."""
        return base64.b64encode(self.png).decode()

    def size(self) -> tuple[int, int]:
        """Return its width and height in pixels, from the PNG's first chunk."""
        return int.from_bytes(self.png[16:20]), int.from_bytes(self.png[20:24])


def drawing(name: str, title: str, words: str, figure: Figure) -> Drawing:
    """Finish a figure."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
    return Drawing(name, title, words, data.getvalue())


def style(number: int, complete: bool = True) -> dict[str, Any]:
    """Return how the n-th method is drawn; the markers of an incomplete set are hollow."""
    colour = COLOURS[number % len(COLOURS)]
    return {
        "color": colour,
        "linestyle": _LINES[number % len(_LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": colour if complete else "white",
    }


def estimate(axes: Axes, row: float, found: tuple[float, float, float], look: Mapping[str, Any]) -> None:
    """Draw a value with its interval; that of an incomplete set is a thin broken line with a hollow marker."""
    value, low, high = found
    whole = look["markerfacecolor"] != "white"
    bar = {"linewidth": 4, "alpha": 0.5} if whole else {"linewidth": 1.2, "linestyle": "--"}
    axes.plot([low, high], [row, row], color=look["color"], solid_capstyle="butt", **bar)
    axes.plot(value, row, markersize=6, **(dict(look) | {"linestyle": ""}))


def panels(count: int, across: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, so many of them side by side, each of a height in inches."""
    across = min(across, count)
    down = -(-count // across)
    figure = Figure(figsize=(_WIDTH, 0.5 + height * down), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False, **options).flat)
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8 if count == 1 else 7)
        axes.xaxis.label.set_fontsize(9 if count == 1 else 7)
        axes.yaxis.label.set_fontsize(9)
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid[:count]


def one_panel(height: float) -> tuple[Figure, Axes]:
    """Return a figure with a single panel."""
    figure, (axes,) = panels(1, 1, height - 0.5)
    return figure, axes


def key(text: str, complete: bool = True, marker: str = "D") -> Line2D:
    """Return a legend's entry that says what a kind of marker means."""
    inside = GREY if complete else "white"
    return Line2D([], [], linestyle="", marker=marker, color=GREY, markerfacecolor=inside, markersize=6, label=text)


def legend_outside(figure: Figure, handles: Sequence[Artist], above: bool = False) -> None:
    """Put a legend under a figure or above it, where it hides nothing."""
    labels = [str(handle.get_label()) for handle in handles]
    columns = 1 if max(map(len, labels)) > 34 else 2
    place: Literal["outside upper center", "outside lower center"] = (
        "outside upper center" if above else "outside lower center"
    )
    figure.legend(handles, labels, loc=place, ncols=columns, fontsize=7.5, frameon=False)


def short(text: str, most: int = 40) -> str:
    """Return a name from a file as a figure can hold it; matplotlib would hide one that begins with a _."""
    text = text.lstrip("_") or "?"
    return text if len(text) <= most else text[: most - 1] + "…"


def not_drawn(names: Sequence[str]) -> str:
    """Say which methods had no room."""
    return f" Not drawn, for clarity: {', '.join(names[MOST_LINES:])}." if len(names) > MOST_LINES else ""
