"""Owns the figures of Atari 100k: each a function from scores to a drawing, beside published figures."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from spr.common.errors import plural
from spr.config.presets import PRESETS
from spr.envs.atari100k import game_names, normalise, reference_scores, reference_table
from spr.report import statistics
from spr.report.plot_style import (
    COLOURS,
    GREY,
    LACKING,
    MOST_LINES,
    Drawing,
    drawing,
    estimate,
    key,
    legend_outside,
    not_drawn,
    one_panel,
    short,
    style,
)
from spr.report.published import IN_PAPER
from spr.report.tables import Method, published_on


def box_plot(methods: Sequence[Method]) -> Drawing:
    """Draw how human-normalised scores spread over games: ours, and the paper's."""
    ours = [(_ours(method), [float(scores.mean()) for scores in method.human()]) for method in methods]
    theirs = [
        (f"{name}\n(paper)", [float(score[0]) for score in published_on(column, game_names())])
        for column, name in IN_PAPER.items()
    ]
    names, values = zip(*[*ours, *theirs], strict=True)
    figure, axes = one_panel(1.2 + 0.36 * len(names))
    boxes = axes.boxplot(values, orientation="horizontal", patch_artist=True, widths=0.6, showfliers=False)
    for i, box in enumerate(boxes["boxes"]):
        box.set(**(_box(methods[i].complete) if i < len(ours) else _PAPER))
    for line in boxes["medians"]:
        line.set(color="black", linewidth=1.6)
    for i, points in enumerate(values, start=1):
        axes.plot(points, [i] * len(points), linestyle="", marker="o", markersize=2.5, color="black", alpha=0.6)
    axes.set_yticks(range(1, len(names) + 1), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(1, color=GREY, linestyle=":", linewidth=1)
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks([-0.25, 0, 0.25, 0.5, 0.75, 1, 2, 4, 8])
    points = np.concatenate(values)
    axes.set_xlim(min(-0.35, 1.1 * points.min()), max(4.5, 1.2 * points.max()))
    axes.set_xlabel("human-normalised score of a game (logarithmic beyond 1)")
    kinds = {method.complete for method in methods}
    ours_keys = [Patch(**_box(whole), label=_BOXES[whole]) for whole in (True, False) if whole in kinds]
    legend_outside(figure, [*ours_keys, Patch(**_PAPER, label="published, over 26 games")])
    words = "Each dot is one game's mean score; boxes hold the middle half of the games, the line is the median."
    if not all(method.complete for method in methods):
        words += (
            " Hatched boxes lack games or have unequally many runs of them; the former can't be compared with others."
        )
    return drawing("box_plot", "Spread over games", words, figure)


def by_game(methods: Sequence[Method]) -> Drawing:
    """Draw each run of each game beside what runs of the authors' codes scored."""
    spread = {row["game"]: row for row in reference_table("spr_run_spread")}
    human = {name: _normalised(spread, name) for name in ("p5", "p25", "p50", "p75", "p95", "jax_mean_49")}
    games = sorted(game_names(), key=human["p50"].__getitem__)
    shown = methods[:MOST_LINES]
    figure, axes = one_panel(1.4 + 0.24 * len(games))
    for place, game in enumerate(games):
        low, first, middle, third, high, jax = (human[name][game] for name in human)
        axes.plot([low, high], [place, place], color="#D9D9D9", linewidth=5, solid_capstyle="butt")
        axes.plot([first, third], [place, place], color="#A8A8A8", linewidth=5, solid_capstyle="butt")
        axes.plot(middle, place, color="black", marker="|", markersize=6)
        axes.plot(jax, place, color="black", marker="x", markersize=4, linestyle="")
        for i, method in enumerate(shown):
            if game in method.scores:
                look = style(i, method.complete) | {"linestyle": "", "markersize": 4, "markeredgewidth": 0.9}
                row = place + 0.2 * (i - (len(shown) - 1) / 2)
                axes.plot(*zip(*((score, row) for score in method.human([game])[0]), strict=True), **look)
    axes.set_yticks(range(len(games)), games, fontsize=7.5)
    axes.set_ylim(-0.7, len(games) - 0.3)
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks([-0.25, 0, 0.25, 0.5, 0.75, 1, 2, 4, 8])
    axes.axvline(1, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlabel("human-normalised score (logarithmic beyond 1)")
    kinds = [
        style(i, method.complete) | {"linestyle": "", "label": short(method.label())} for i, method in enumerate(shown)
    ]
    published = [
        Line2D([], [], color="#D9D9D9", linewidth=5, label="authors' code: 90% of 100 runs"),
        Line2D([], [], color="#A8A8A8", linewidth=5, label="half of them, and the median"),
        Line2D([], [], color="black", marker="x", linestyle="", label="SPR in JAX: mean of 49 runs"),
    ]
    legend_outside(figure, [*(Line2D([], [], **kind) for kind in kinds), *published])
    words = "Every marker is a run of ours. A method that is SPR has nine of ten markers inside the grey bars."
    return drawing("by_game", "Runs by game", words + not_drawn([method.name for method in methods]), figure)


def _normalised(rows: Mapping[str, Mapping[str, str]], column: str) -> dict[str, float]:
    return {game: normalise(game, float(row[column]), reference_scores("human")[game]) for game, row in rows.items()}


_PAPER: dict[str, Any] = {"facecolor": "#D9D9D9", "alpha": 0.75, "edgecolor": "black"}
_BOXES = {True: "ours, over 26 games", False: "hatched: ours, lacks games or runs"}


def _box(complete: bool) -> dict[str, Any]:
    return _PAPER | ({"facecolor": COLOURS[0]} if complete else {"facecolor": "white", "hatch": "////"})


def _ours(method: Method) -> str:
    """Return a label in two lines: the name, whose it is, and if the set is incomplete in what."""
    return f"{short(method.name)}\n(ours{'' if method.complete else f', {method.part()}'})"


def profiles(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing:
    """Draw the share of runs above each score, with 95% bands."""
    figure, axes = one_panel(4.0)
    lines = list[Artist]()
    thresholds = np.linspace(0, 2, 101)
    for i, method in enumerate(methods[:MOST_LINES]):
        scores = method.human()
        look = style(i, method.complete)
        label = short(method.label(), 60)
        lines += axes.plot(
            thresholds, statistics.profile(scores, thresholds), label=label, markevery=10, markersize=5, **look
        )
        low, high = _band(scores, thresholds, min(draws, 2_000), random)
        axes.fill_between(thresholds, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("human-normalised score τ")
    axes.set_ylabel("share of runs with a score above τ")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, 2)
    if not all(method.complete for method in methods[:MOST_LINES]):
        lines.append(key(LACKING, complete=False, marker="o"))
    legend_outside(figure, lines)
    words = "The higher a line, the better the method; bands are 95% stratified bootstrap intervals, point by point."
    words += not_drawn([method.name for method in methods])
    return drawing("profiles", "Performance profiles", words, figure)


def iqms(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing:
    """Draw the interquartile means with intervals beside published ones."""
    ours = [(_ours(m), statistics.bootstrap(statistics.iqm, m.human(), draws=draws, random=random)) for m in methods]
    known = [row for row in reference_table("published_aggregates") if row["iqm"]]
    figure, axes = one_panel(1.2 + 0.29 * (len(ours) + len(known)))
    for i, (_, found) in enumerate(ours):
        estimate(axes, i, found, style(0, methods[i].complete) | {"marker": "D"})
    for i, row in enumerate(known, start=len(ours)):
        axes.plot(float(row["iqm"]), i, marker="o", markersize=5, color=GREY)
    names = [*(name for name, _ in ours), *(f"{row['method']}, {row['source']}" for row in known)]
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_xlabel("interquartile mean of human-normalised scores")
    legend_outside(figure, [*_keys({method.complete for method in methods}), key("published", marker="o")])
    words = "Diamonds with bars are ours with 95% intervals; dots are published values, over 26 games."
    if not all(method.complete for method in methods):
        words += (
            " Hollow diamonds lack games or have unequally many runs of them; the former can't be compared with dots."
        )
    return drawing("iqm", "Interquartile means", words, figure)


def improvement(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Drawing | None:
    """Draw the chance that a run of the first method beats one of another; None where nothing can be compared."""
    first, rows = methods[0], []
    for other in methods[1:]:
        games = [game for game in first.scores if game in other.scores]
        if games:
            pair = first.human(games), other.human(games)
            chance = statistics.bootstrap(
                statistics.probability_of_improvement, *pair, draws=min(draws, 10_000), random=random
            )
            whole = first.complete and other.complete
            rows.append((f"over {short(other.name)}\n({_of_26(len(games))})", chance, whole))
    if not rows:
        return None
    figure, axes = one_panel(1.2 + 0.36 * len(rows))
    for i, (_, chance, whole) in enumerate(rows):
        estimate(axes, i, chance, style(0, whole) | {"marker": "D"})
    axes.axvline(0.5, color=GREY, linestyle=":")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel(f"probability that a run of {short(first.name)} scores higher")
    legend_outside(figure, _keys({whole for _, _, whole in rows}))
    words = "At one half neither is better; bars are 95% stratified bootstrap intervals, over the games both have."
    return drawing("improvement", "Probability of improvement", words, figure)


def _of_26(games: int) -> str:
    return f"{games} of 26 games" if games < len(game_names()) else "26 games"


def _keys(kinds: Collection[bool]) -> list[Artist]:
    """Return what a legend says of complete and incomplete sets, as far as there are such."""
    words = {True: "filled: ours, all games and runs", False: LACKING}
    return [key(words[whole], complete=whole) for whole in (True, False) if whole in kinds]


def main_methods(methods: Sequence[Method]) -> list[Method]:
    """Return the methods without those that have a figure of their own, unless there are no others."""
    main = [method for method in methods if not (method.name in PRESETS and PRESETS[method.name].figure)]
    return main or list(methods)


def _points(methods: Sequence[Method], figure: str) -> dict[float, Method]:
    """Return the methods that are points of one of the paper's figures, by their place there."""
    presets = {method.name: PRESETS.get(method.name) for method in methods}
    of_figure = [(presets[method.name], method) for method in methods]
    return {preset.x: method for preset, method in of_figure if preset is not None and preset.figure == figure}


def depth(methods: Sequence[Method]) -> Drawing | None:
    """Draw the depth figure: SPR-normalised scores against how many steps ahead are predicted."""
    found = {m.name: m for m in methods}
    depths = _points(methods, "depth")
    depths |= {0.0: found["spr_nontemporal"]} if "spr_nontemporal" in found else {}
    if len(depths) < 2:
        return None
    spr = found.get("spr") or found.get("spr_k5")
    reference = {g: float(s.mean()) for g, s in spr.scores.items()} if spr else dict(reference_scores("spr"))
    games = _comparable(depths.values(), reference)
    if not games:
        return None
    shares = {k: _shares(method, games, reference) for k, method in depths.items()}
    whose = "of our spr runs" if spr else "of the paper's SPR"
    words = f"Scores of {plural(len(games), 'game')}, normalised by those {whose}: 0 is random play, 1 equals SPR."
    axes = "prediction depth K", "SPR-normalised score"
    return _mean_and_median("depth", "Prediction depth", words, shares, axes, _whole(depths.values()))


def ema(methods: Sequence[Method]) -> list[Drawing]:
    """Draw the EMA figures: self-normalised scores against tau, with and without augmentation apart."""
    drawings = []
    for suffix, what in (("", "with"), ("_noaug", "without")):
        taus = _points(methods, f"ema{suffix}")
        if len(taus) < 2:
            continue
        shared = set.intersection(*(set(method.scores) for method in taus.values()))
        average = {game: fmean(float(method.scores[game].mean()) for method in taus.values()) for game in shared}
        games = _comparable(taus.values(), average)
        if not games:
            continue
        shares = {tau: _shares(method, games, average) for tau, method in taus.items()}
        words = f"Scores of {plural(len(games), 'game')}, each normalised by its average over all τ: 1 is that average."
        title = f"Target encoder's average, {what} augmentation"
        axes = "constant τ of the moving average", "self-normalised score"
        drawings.append(_mean_and_median(f"ema{suffix}", title, words, shares, axes, _whole(taus.values())))
    return drawings


def _comparable(methods: Iterable[Method], reference: Mapping[str, float]) -> list[str]:
    """Return the games that all methods have, and whose reference is not random play itself."""
    shared = set(reference).intersection(*(method.scores for method in methods))
    chance = reference_scores("random")
    return [game for game in game_names() if game in shared and reference[game] != chance[game]]


def _whole(methods: Iterable[Method]) -> bool:
    return all(method.complete for method in methods)


def _shares(method: Method, games: Sequence[str], reference: Mapping[str, float]) -> list[float]:
    """Return a method's mean scores, 0 at random play and 1 at the reference."""
    return [normalise(game, float(method.scores[game].mean()), reference[game]) for game in games]


def _mean_and_median(
    name: str, title: str, words: str, shares: Mapping[float, Sequence[float]], titles: tuple[str, str], whole: bool
) -> Drawing:
    figure, axes = one_panel(3.4)
    places = sorted(shares)
    lines = list[Artist]()
    lines += axes.plot([fmean(shares[place]) for place in places], label="mean", **style(0, whole))
    lines += axes.plot([median(shares[place]) for place in places], label="median", **style(1, whole))
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places], fontsize=8)
    axes.set_xlabel(titles[0])
    axes.set_ylabel(titles[1])
    axes.grid(axis="y", linewidth=0.4)
    legend_outside(figure, lines if whole else [*lines, key(LACKING, complete=False, marker="o")])
    return drawing(name, title, words, figure)


def _band(
    scores: list[NDArray[np.float64]], thresholds: NDArray[np.float64], draws: int, random: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    found = statistics.replicates(
        lambda again: statistics.profile(again, thresholds), scores, draws=draws, random=random
    )
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    return low, high
