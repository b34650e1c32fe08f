"""Owns the figures of a report: each a function from scores to a drawing, readable in grey and for the colour-blind."""

import base64
import io
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from spr import stats
from spr.games import game_names, normalise, reference_scores, reference_table
from spr.methods import PRESETS
from spr.results import Record
from spr.tables import PUBLISHED, Method, published_on

# Okabe and Ito's colours, told apart by people with any kind of colour vision; lines and markers differ as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C3A")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY = "#767676"
_MOST_LINES = 6  # that an eye can follow
_DPI = 150


class Drawing(NamedTuple):
    """A figure as a PNG, with its name in files, its title, and in words what is to be seen."""

    name: str
    title: str
    words: str
    png: bytes

    def base64(self) -> str:
        """Return the picture as a page holds it."""
        return base64.b64encode(self.png).decode()

    def width(self) -> int:
        """Return its width in pixels, from the PNG's first chunk."""
        return int.from_bytes(self.png[16:20])


def style(number: int) -> dict[str, Any]:
    """Return how the n-th method is drawn."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _LINES[number % len(_LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def box_plot(methods: Sequence[Method]) -> Drawing:
    """Draw how human-normalised scores spread over games: ours, and the paper's."""
    ours = [(f"{m.name}\n(ours, {len(m.scores)} games)", [float(s.mean()) for s in m.human()]) for m in methods]
    theirs = [
        (f"{name}\n(paper)", [float(score[0]) for score in published_on(column, game_names())])
        for column, name in PUBLISHED.items()
    ]
    names, values = zip(*[*ours, *theirs], strict=True)
    figure, axes = _axes(7.2, 0.9 + 0.42 * len(names))
    boxes = axes.boxplot(values, orientation="horizontal", patch_artist=True, widths=0.6, showfliers=False)
    for i, box in enumerate(boxes["boxes"]):
        box.set(facecolor=_COLOURS[0] if i < len(ours) else "#D9D9D9", alpha=0.75, edgecolor="black")
        if i < len(ours) and not methods[i].complete:
            box.set(facecolor="white", hatch="////")
    for line in boxes["medians"]:
        line.set(color="black", linewidth=1.6)
    for i, points in enumerate(values, start=1):
        axes.plot(points, [i] * len(points), linestyle="", marker="o", markersize=2.5, color="black", alpha=0.6)
    axes.set_yticks(range(1, len(names) + 1), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color=_GREY, linestyle=":", linewidth=1)
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks([-0.25, 0, 0.25, 0.5, 0.75, 1, 2, 4, 8])
    points = np.concatenate(values)
    axes.set_xlim(min(-0.35, 1.1 * points.min()), max(4.5, 1.2 * points.max()))
    axes.set_xlabel("human-normalised score of a game (logarithmic beyond 1)")
    words = "Each dot is one game's mean score; boxes hold the middle half of the games, the line is the median."
    if not all(method.complete for method in methods):
        words += " Hatched boxes lack games or runs, and can't be compared with the others."
    return _drawing("box_plot", "Spread over games", words, figure)


def profiles(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing:
    """Draw the share of runs above each score, with 95% bands."""
    figure, axes = _axes(7.2, 3.8)
    thresholds = np.linspace(0, 2, 101)
    for i, method in enumerate(methods[:_MOST_LINES]):
        scores = method.human()
        look = style(i)
        axes.plot(
            thresholds, stats.profile(scores, thresholds), label=_label(method), markevery=10, markersize=4, **look
        )
        low, high = _band(scores, thresholds, min(draws, 2_000), random)
        axes.fill_between(thresholds, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("human-normalised score τ")
    axes.set_ylabel("share of runs with a score above τ")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, 2)
    axes.legend(fontsize=8, frameon=False)
    words = "The higher a line, the better the method; bands are 95% stratified bootstrap intervals, point by point."
    words += _not_drawn([method.name for method in methods])
    return _drawing("profiles", "Performance profiles", words, figure)


def iqms(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing:
    """Draw the interquartile means with intervals beside published ones."""
    ours = [(f"{_label(m)}, ours", stats.bootstrap(stats.iqm, m.human(), draws=draws, random=random)) for m in methods]
    known = [row for row in reference_table("published_aggregates") if row["iqm"]]
    figure, axes = _axes(7.2, 0.9 + 0.26 * (len(ours) + len(known)))
    for i, (_, found) in enumerate(ours):
        axes.plot([found.low, found.high], [i, i], color=_COLOURS[0], linewidth=4, alpha=0.5, solid_capstyle="butt")
        inside = _COLOURS[0] if methods[i].complete else "white"
        axes.plot(found.value, i, marker="D", markersize=6, color=_COLOURS[0], markerfacecolor=inside)
    for i, row in enumerate(known, start=len(ours)):
        axes.plot(float(row["iqm"]), i, marker="o", markersize=5, color=_GREY)
    names = [*(name for name, _ in ours), *(f"{row['method']}, published" for row in known)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_xlabel("interquartile mean of human-normalised scores")
    words = "Diamonds with bars are ours with 95% intervals; dots are published values, over 26 games."
    if not all(method.complete for method in methods):
        words += " Hollow diamonds lack games or runs, and can't be compared with the dots."
    return _drawing("iqm", "Interquartile means", words, figure)


def improvement(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing | None:
    """Draw the chance that a run of the first method beats one of another; None where nothing can be compared."""
    first, rows = methods[0], []
    for other in methods[1:]:
        games = [game for game in first.scores if game in other.scores]
        if games:
            pair = first.human(games), other.human(games)
            chance = stats.bootstrap(stats.probability_of_improvement, *pair, draws=min(draws, 10_000), random=random)
            rows.append((f"over {other.name}\n({len(games)} games)", chance))
    if not rows:
        return None
    figure, axes = _axes(7.2, 0.9 + 0.42 * len(rows))
    for i, (_, chance) in enumerate(rows):
        axes.plot([chance.low, chance.high], [i, i], color=_COLOURS[0], linewidth=4, alpha=0.5, solid_capstyle="butt")
        axes.plot(chance.value, i, marker="D", color=_COLOURS[0])
    axes.axvline(0.5, color=_GREY, linestyle=":")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"probability that a run of {first.name} scores higher")
    words = "At one half neither is better; bars are 95% stratified bootstrap intervals, over the games both have."
    return _drawing("improvement", "Probability of improvement", words, figure)


def curves(records: Sequence[Record], methods: Sequence[Method]) -> Drawing | None:
    """Draw the scores of games played while learning: for each game the mean over runs and their range."""
    names = [method.name for method in methods]
    records = [record for record in records if record.method in names[:_MOST_LINES]]
    games = [game for game in game_names() if any(record.game == game and record.curve for record in records)]
    if not games:
        return None
    across = min(4, len(games))
    down = -(-len(games) // across)
    figure = Figure(figsize=(7.2, 0.5 + 1.7 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, game in zip(grid.flat, games, strict=False):
        axes.set_title(game, fontsize=8)
        for i, name in enumerate(names[:_MOST_LINES]):
            mine = [record.curve for record in records if (record.game, record.method) == (game, name) and record.curve]
            if mine:
                _curve(axes, mine, style(i) | {"marker": ""}, name)
        axes.tick_params(labelsize=6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step / 1000:g}k"))
    for axes in list(grid.flat)[len(games) :]:
        axes.set_visible(False)
    figure.supxlabel("environment steps", fontsize=8)
    figure.supylabel("raw score while learning", fontsize=8)
    if len(names) > 1:
        drawn = {
            label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    words = "Means over runs of the last ten games' scores, with the range of the runs; played with learning's noise."
    words += _not_drawn(names)
    return _drawing("learning_curves", "Learning curves", words, figure)


def main_methods(methods: Sequence[Method]) -> list[Method]:
    """Return the methods without those that have a figure of their own, unless there are no others."""
    main = [method for method in methods if not (method.name in PRESETS and PRESETS[method.name].figure)]
    return main or list(methods)


def _points(methods: Sequence[Method], figure: str) -> dict[float, Method]:
    """Return the methods that are points of one of the paper's figures, by their place there."""
    presets = {method.name: PRESETS.get(method.name) for method in methods}
    of_figure = [(presets[method.name], method) for method in methods]
    return {preset.x: method for preset, method in of_figure if preset is not None and preset.figure == figure}


def _not_drawn(names: Sequence[str]) -> str:
    return f" Not drawn, for clarity: {', '.join(names[_MOST_LINES:])}." if len(names) > _MOST_LINES else ""


def depth(methods: Sequence[Method]) -> Drawing | None:
    """Draw the depth figure: SPR-normalised scores against how many steps ahead are predicted."""
    found = {m.name: m for m in methods}
    depths = _points(methods, "depth")
    depths |= {0.0: found["spr_nontemporal"]} if "spr_nontemporal" in found else {}
    if len(depths) < 2:
        return None
    spr = found.get("spr") or found.get("spr_k5")
    reference = {g: float(s.mean()) for g, s in spr.scores.items()} if spr else dict(reference_scores("spr"))
    games = [game for game in game_names() if game in reference and all(game in m.scores for m in depths.values())]
    if not games:
        return None
    shares = {k: _shares(method, games, reference) for k, method in depths.items()}
    whose = "of our spr runs" if spr else "of the paper's SPR"
    words = f"Scores of {len(games)} games, normalised by those {whose}: 0 is random play, 1 equals SPR."
    return _mean_and_median("depth", "Prediction depth", words, shares, "prediction depth K", "SPR-normalised score")


def ema(methods: Sequence[Method]) -> list[Drawing]:
    """Draw the EMA figures: self-normalised scores against tau, with and without augmentation apart."""
    drawings = []
    for suffix, what in (("", "with"), ("_noaug", "without")):
        taus = _points(methods, f"ema{suffix}")
        games = [game for game in game_names() if taus and all(game in m.scores for m in taus.values())]
        if len(taus) < 2 or not games:
            continue
        average = {game: fmean(float(method.scores[game].mean()) for method in taus.values()) for game in games}
        shares = {tau: _shares(method, games, average) for tau, method in taus.items()}
        words = (
            f"Scores of {len(games)} games, each normalised by its average over all τ: 1 is as good as that average."
        )
        title = f"Target encoder's average, {what} augmentation"
        across, up = "constant τ of the moving average", "self-normalised score"
        drawings.append(_mean_and_median(f"ema{suffix}", title, words, shares, across, up))
    return drawings


def _shares(method: Method, games: Sequence[str], reference: Mapping[str, float]) -> list[float]:
    """Return a method's mean scores, 0 at random play and 1 at the reference."""
    return [normalise(game, float(method.scores[game].mean()), reference[game]) for game in games]


def _mean_and_median(
    name: str, title: str, words: str, shares: Mapping[float, Sequence[float]], across: str, up: str
) -> Drawing:
    figure, axes = _axes(5.2, 3.2)
    places = sorted(shares)
    axes.plot(range(len(places)), [fmean(shares[place]) for place in places], label="mean", **style(0))
    axes.plot(range(len(places)), [median(shares[place]) for place in places], label="median", **style(1))
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places], fontsize=8)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(frameon=False, fontsize=8)
    return _drawing(name, title, words, figure)


def _curve(axes: Axes, runs: Sequence[Sequence[tuple[int, float]]], look: dict[str, Any], label: str) -> None:
    """Draw runs where all of them have a point."""
    steps = sorted(set.intersection(*({step for step, _ in run} for run in runs)))
    values = np.array([[dict(run)[step] for step in steps] for run in runs])
    axes.plot(steps, values.mean(0), label=label, linewidth=1.2, **look)
    axes.fill_between(steps, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0)


def _band(
    scores: list[NDArray[np.float64]], thresholds: NDArray[np.float64], draws: int, random: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    found = stats.replicates(lambda again: stats.profile(again, thresholds), scores, draws=draws, random=random)
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    return low, high


def _label(method: Method) -> str:
    if len(method.scores) < len(game_names()):
        return f"{method.name} ({len(method.scores)} of 26 games)"
    return method.name if method.complete else f"{method.name} (runs missing)"


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    return figure, axes


def _drawing(name: str, title: str, words: str, figure: Figure) -> Drawing:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
    return Drawing(name, title, words, data.getvalue())
