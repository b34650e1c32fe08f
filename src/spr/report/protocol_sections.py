"""Owns the parts of a report: one for each protocol, with tables, figures, and what they are normalised by."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist

from spr.envs.atari100k import game_names, reference_scores
from spr.report import learning_curves, statistics
from spr.report.plot_style import GREY, LACKING, Drawing, drawing, estimate, key, legend_outside, panels, short, style
from spr.report.records import Record
from spr.report.statistics import Interval
from spr.report.tables import Cell, Method, Table, methods_of


class Section(NamedTuple):
    """What a report says of one protocol."""

    name: str  # in files and links
    title: str
    words: Sequence[str]
    tables: Sequence[Table]
    drawings: Sequence[Drawing]
    missing: Sequence[str]  # figures that could not be drawn, and why


_ZERO = 1e-9  # a score of this size or less is none to divide by


class Scale(NamedTuple):
    """What a game's scores are measured by, as far as it is known."""

    random: float | None
    human: float | None

    @property
    def title(self) -> str:
        """What a score on this scale is called."""
        if self.human is not None:
            return "human-normalised"
        return "relative to random" if self.random is not None and abs(self.random) > _ZERO else "raw score"

    def of(self, score: float) -> float:
        """Return a score on this scale; a raw one where there is none."""
        if self.random is None or self.title == "raw score":
            return score
        size = abs(self.random) if self.human is None else self.human - self.random
        return (score - self.random) / size


_BY_HUMANS = (
    "Human-normalised: (score - random) / (human - random), by the published scores of a random agent and of humans. "
    "0 is random play, 1 a human."
)
_BY_CHANCE = (
    "Relative to random, where no human score exists: (score - random) / |random|, by the mean score of a random "
    "agent that was measured beside the runs. 0 is random play, 1 is better than that by the size of its score."
)
_RAW = "Raw scores only, where the random agent's score is 0 or was not measured: "


def other(number: int, title: str, records: Sequence[Record], draws: int, random: np.random.Generator) -> Section:
    """Return what there is of a protocol that has no published figures."""
    methods = _of_one_set(methods_of(records))
    games = list(dict.fromkeys(game for method in methods for game in method.scores))
    scales = {game: _scale(game, records) for game in games}
    found = {
        (game, method.name): statistics.bootstrap(statistics.mean, [method.scores[game]], draws=draws, random=random)
        for game in games
        for method in methods
        if game in method.scores
    }
    kinds = {scale.title for scale in scales.values()}
    raw = [game for game, scale in scales.items() if scale.title == "raw score"]
    words = ["No published figure can be compared with these."]
    words += [_BY_HUMANS] if "human-normalised" in kinds else []
    words += [_BY_CHANCE] if "relative to random" in kinds else []
    words += [_RAW + ", ".join(raw) + "."] if raw else []
    name = f"other_{number}"
    chance = {game: scale.random for game, scale in scales.items() if scale.random is not None}
    learning = learning_curves.curves(records, methods, f"{name}_curves", chance)
    drawings = [_scores(f"{name}_scores", methods, scales, found), *([learning] if learning else [])]
    missing = [] if learning else [f"Learning curves: needs {learning_curves.NEEDS}"]
    return Section(name, title, words, [_table(name, methods, scales, found)], drawings, missing)


def _of_one_set(methods: Sequence[Method]) -> list[Method]:
    """Hold methods against the whole set: every game that one of them has, with as many runs as any has."""
    games = len({game for method in methods for game in method.scores})
    runs = max(len(scores) for method in methods for scores in method.scores.values())
    return [method._replace(all_games=games, all_runs=runs) for method in methods]


def _scale(game: str, records: Sequence[Record]) -> Scale:
    if game in game_names():
        return Scale(reference_scores("random")[game], reference_scores("human")[game])
    measured = [r.random_score for r in records if r.game == game and r.random_score is not None]
    return Scale(fmean(measured) if measured else None, None)


_Found = Mapping[tuple[str, str], Interval]  # by game and method


def _table(name: str, methods: Sequence[Method], scales: Mapping[str, Scale], found: _Found) -> Table:
    """Return a row for every game and method; columns that would be empty are left out."""
    rows = []
    for game, scale in scales.items():
        mine = [method for method in methods if game in method.scores]
        top = max(found[game, method.name].value for method in mine)
        for method in mine:
            scores, interval = method.scores[game], found[game, method.name]
            runs = Cell(len(scores), digits=0, note="" if method.complete else f"incomplete: {method.part()}")
            score = _cell(interval, len(scores))._replace(best=len(mine) > 1 and interval.value == top)
            scaled = _cell(Interval(*map(scale.of, interval)), len(scores), 3)
            cells = {
                "game": Cell(game),
                "method": Cell(method.name),
                "runs": runs,
                "score": score,
                "random agent": Cell(scale.random, digits=_digits(scale.random or 0.0)),
                "human": Cell(scale.human, digits=1),
                "human-normalised": scaled if scale.human is not None else Cell(),
                "relative to random": scaled if scale.title == "relative to random" else Cell(),
            }
            rows.append(cells)
    columns = [title for title in rows[0] if any(cells[title].value is not None for cells in rows)]
    notes = [
        "Means over runs with the 95% bootstrap interval of the mean, which is too narrow with fewer than five runs. "
        "The best method of a game is in bold type."
    ]
    if not all(method.complete for method in methods):
        notes.append("Methods marked incomplete lack games or runs that others here have.")
    return Table(name, "Scores by game", columns, [[cells[title] for title in columns] for cells in rows], notes)


def _cell(found: Interval, runs: int, digits: int | None = None) -> Cell:
    """Return an estimate; a single run has no interval."""
    digits = _digits(found.value) if digits is None else digits
    return Cell(*found, digits=digits) if runs > 1 else Cell(found.value, digits=digits)


def _digits(value: float) -> int:
    """Return how many decimals distinguish scores of this size."""
    return 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1


def _scores(name: str, methods: Sequence[Method], scales: Mapping[str, Scale], found: _Found) -> Drawing:
    """Draw each game's scores on its scale."""
    height = 0.6 + 0.3 * len(methods)
    figure, grid = panels(len(scales), 2, height, sharey=True)
    for axes, (game, scale) in zip(grid, scales.items(), strict=True):
        axes.set_title(short(game, 28), fontsize=8)
        axes.set_xlabel(scale.title)
        if scale.random is not None:
            axes.axvline(scale.of(scale.random), color=GREY, linestyle=(0, (1, 1)), linewidth=1.2)
        if scale.human is not None:
            axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        for i, method in enumerate(methods):
            if game in method.scores:
                interval = Interval(*map(scale.of, found[game, method.name]))
                estimate(axes, i, interval, style(i, method.complete))
            else:
                where = axes.get_yaxis_transform()
                axes.text(0.5, i, "no runs", transform=where, color=GREY, fontsize=7, ha="center", va="center")
        axes.margins(x=0.08)
    grid[0].set_yticks(range(len(methods)), [short(method.label(), 60).replace(" (", "\n(", 1) for method in methods])
    grid[0].set_ylim(len(methods) - 0.5, -0.5)
    keys: list[Artist] = []
    if any(method.complete for method in methods):
        keys.append(key("filled: all games and runs", marker="o"))
    if not all(method.complete for method in methods):
        keys.append(key(LACKING, complete=False, marker="o"))
    legend_outside(figure, keys)
    words = "Means over runs with 95% bootstrap intervals of the mean; a single run has none."
    words += " The dotted line is the random agent." if any(s.random is not None for s in scales.values()) else ""
    words += " The broken line is a human." if any(s.human is not None for s in scales.values()) else ""
    return drawing(name, "Scores", words, figure)
