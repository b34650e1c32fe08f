"""Owns learning curves: the scores of games played while learning, for the games and methods of any protocol."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from spr.common.errors import plural
from spr.report.plot_style import (
    GREY,
    LACKING,
    MOST_LINES,
    Drawing,
    drawing,
    key,
    legend_outside,
    not_drawn,
    panels,
    short,
    style,
)
from spr.report.records import Record
from spr.report.tables import Method

Points = Sequence[tuple[int, float]]  # steps and scores

NEEDS = "metrics.jsonl beside the results, with two points or more that a game's runs share"


class _Curve(NamedTuple):
    """The runs of one method and game, where all of them have a point."""

    steps: list[int]
    values: NDArray[np.float64]  # [runs, steps]


def curves(
    records: Sequence[Record],
    methods: Sequence[Method],
    name: str = "learning_curves",
    chance: Mapping[str, float] = {},
    published: Mapping[str, Points] = {},
) -> Drawing | None:
    """Draw for each game the mean over runs and their range; a random agent's score and a published curve where given.

    None where nothing can be drawn.
    """
    shown = methods[:MOST_LINES]
    games = list(dict.fromkeys(game for method in methods for game in method.scores))
    drawn = {
        (game, method.name): found
        for game in games
        for method in shown
        if (found := _shared(records, game, method.name)) is not None
    }
    games = [game for game in games if any((game, method.name) in drawn for method in shown)]
    if not games:
        return None
    figure, grid = panels(len(games), 2 if len(games) <= 4 else 3, 2.8 if len(games) == 1 else 1.5)
    for axes, game in zip(grid, games, strict=True):
        axes.set_title(short(game, 28), fontsize=8)
        for i, method in enumerate(shown):
            if (game, method.name) in drawn:
                _draw(axes, drawn[game, method.name], i, method.complete)
        if game in chance:
            axes.axhline(chance[game], color=GREY, linestyle=(0, (1, 1)), linewidth=1.2)
        if game in published:
            axes.plot(*zip(*published[game], strict=True), color=GREY, linewidth=1, marker="x", markersize=2.5)
        far = max(drawn[game, method.name].steps[-1] for method in shown if (game, method.name) in drawn)
        if far >= 10_000:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step / 1000:g}k" if step else "0"))
        axes.xaxis.set_major_locator(MaxNLocator(6 if len(games) == 1 else 4, steps=[1, 2, 5, 10]))
    figure.supxlabel("environment steps", fontsize=8)
    figure.supylabel("raw score while learning", fontsize=8)
    legend_outside(figure, _legend(shown, games, chance, published), above=True)  # below is the name of the steps
    words = _words(records, methods, any(game in published for game in games))
    return drawing(name, "Learning curves", words, figure)


def _words(records: Sequence[Record], methods: Sequence[Method], compared: bool) -> str:
    words = "Means over runs of the last ten games' scores, with the range of the runs; played with learning's noise."
    if compared:
        words += " Grey: the published means of evaluations, which are played without that noise."
    names = {method.name for method in methods}
    if without := sum(record.method in names and not record.curve for record in records):
        words += f" Without metrics.jsonl, and so not in here: {plural(without, 'run')}."
    if lossy := sum(record.method in names and bool(record.lost) for record in records):
        words += f" With lines of metrics.jsonl lost or changed: {plural(lossy, 'run')}, see the notes."
    return words + not_drawn([method.name for method in methods])


def _shared(records: Sequence[Record], game: str, method: str) -> _Curve | None:
    """Return a method's runs of a game, if there are enough points for a line."""
    runs = [dict(r.curve) for r in records if (r.game, r.method) == (game, method) and r.curve]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    return _Curve(steps, np.array([[run[step] for step in steps] for run in runs])) if len(steps) > 1 else None


def _draw(axes: Axes, curve: _Curve, number: int, complete: bool) -> None:
    look = style(number, complete) | ({"marker": ""} if complete else {})
    every = max(1, len(curve.steps) // 6)
    axes.plot(curve.steps, curve.values.mean(0), linewidth=1.2, markersize=3.5, markevery=every, **look)
    axes.fill_between(
        curve.steps, curve.values.min(0), curve.values.max(0), color=look["color"], alpha=0.15, linewidth=0
    )


def _legend(
    methods: Sequence[Method], games: Sequence[str], chance: Mapping[str, float], published: Mapping[str, Points]
) -> list[Artist]:
    lines: list[Artist] = []
    for i, method in enumerate(methods):
        look = style(i, method.complete) | ({"marker": ""} if method.complete else {})
        lines.append(Line2D([], [], label=short(method.label(), 60), markersize=4, **look))
    if any(game in chance for game in games):
        lines.append(Line2D([], [], color=GREY, linestyle=(0, (1, 1)), label="random agent"))
    if any(game in published for game in games):
        lines.append(Line2D([], [], color=GREY, linewidth=1, marker="x", markersize=3, label="SPR in JAX, published"))
    if not all(method.complete for method in methods):
        lines.append(key(LACKING, complete=False, marker="o"))
    return lines
