"""Owns what a front page shows of the benchmark: our methods beside SPR as it was published, in Markdown."""

from collections.abc import Sequence

import numpy as np

from spr.common.errors import plural
from spr.envs.atari100k import game_names, reference_scores, reference_table, unlike_published
from spr.report import statistics, tables
from spr.report.published import METHODS
from spr.report.records import PUBLISHED_ROMS, Record
from spr.report.tables import Cell, Method, Table

_RANGES = {  # by how many runs of a game there are at least
    1: ("p5", "p95", "90% of single runs"),
    3: ("mean_of_3_lo", "mean_of_3_hi", "95% of means of three"),
    5: ("mean_of_5_lo", "mean_of_5_hi", "95% of means of five"),
}
_STAR = "\\*"


def front_page(records: Sequence[Record], draws: int, random: np.random.Generator) -> str:
    """Return the scores by game and over all games, with what must be known to read them."""
    methods = tables.methods_of(records)
    starred = {
        (record.method, record.game) for record in records if unlike_published(record.game, record.rules.get("rom"))
    }
    # First of all, as in a report: so both draw the same numbers, and have the same intervals.
    over_games = _over_games(methods, draws, random).markdown()
    parts = [_by_game(methods, starred, draws, random).markdown(), over_games]
    few = any(len(method.scores) < method.all_games for method in methods)
    words = (
        "Means of raw scores, with their 95% bootstrap interval where there are several runs; below, human-normalised "
        + ("scores: rows of fewer than 26 games can't be compared with others." if few else "scores over all 26 games.")
    )
    if starred:
        words += f" {_STAR} played with another ROM than the published scores."
    return "\n\n".join(["\n".join([*parts, words]), *_outside(records, methods)]) + "\n"


def _outside(records: Sequence[Record], methods: Sequence[Method]) -> list[str]:
    """Name the games in which SPR as we play it is not where its authors' code is, by what that code's runs spread."""
    spread = {row["game"]: row for row in reference_table("spr_run_spread")}
    lines = []
    for method in methods:
        if not any(record.method == method.name and record.preset == "spr" for record in records):
            continue
        size = {game: max(least for least in _RANGES if least <= len(runs)) for game, runs in method.scores.items()}
        low, high = ({game: float(spread[game][_RANGES[size[game]][i]]) for game in size} for i in range(2))
        below = [game for game, runs in method.scores.items() if runs.mean() < low[game]]
        above = [game for game, runs in method.scores.items() if runs.mean() > high[game]]
        named = [f"{where} {', '.join(games)}" for where, games in (("below", below), ("above", above)) if games]
        if named:
            words = ", ".join(_RANGES[least][2] for least in sorted(set(size.values())))
            words += ": the most that a game has runs for" if len(set(size.values())) > 1 else ""
            lines.append(
                f"Means of {method.name} outside the range of the authors' code ({words}): {'; '.join(named)}."
            )
    return lines


def _by_game(
    methods: Sequence[Method], starred: set[tuple[str, str]], draws: int, random: np.random.Generator
) -> Table:
    spread = {row["game"]: row for row in reference_table("spr_run_spread")}
    rows = []
    for game in game_names():
        row = {name: _short(float(value)) for name, value in spread[game].items() if name != "game"}
        ours = [_ours(method, game, (method.name, game) in starred, draws, random) for method in methods]
        theirs = Cell(row["mean_100"], note=f"{row['p5']} to {row['p95']}")
        rows.append([Cell(game), *ours, Cell(_short(reference_scores("spr")[game])), theirs, Cell(row["jax_mean_49"])])
    names = [f"{method.name}, ours" for method in methods]
    columns = ["game", *names, "SPR: paper", "SPR: authors' code, 100 runs (5% to 95% of them)"]
    columns.append("SPR: their JAX version, 49 runs")
    return Table("by_game", "By game", columns, rows)


def _ours(method: Method, game: str, star: bool, draws: int, random: np.random.Generator) -> Cell:
    runs = method.scores.get(game)
    if runs is None:
        return Cell()
    found = statistics.bootstrap(statistics.mean, [runs], draws=draws, random=random)
    note = f"{_short(found.low)} to {_short(found.high)}, {plural(len(runs), 'run')}" if len(runs) > 1 else ""
    return Cell(_short(found.value) + (f" {_STAR}" if star else ""), note=note)


def _over_games(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Table:
    table = tables.aggregates(methods, draws, random)
    played = [method.name.removesuffix(PUBLISHED_ROMS) for method in methods]
    # The paper's variants that its table by game lacks have their presets' names.
    named = [METHODS[preset].aggregates for preset in ("spr", *played) if preset in METHODS]
    shown = {*played, *(name for names in named for name in names)}
    kept = [i for i, name in enumerate(table.columns) if name != "source" and "DQN" not in name]
    rows = []
    for row in table.rows:
        ours = row[1].value == "ours"
        if ours or row[0].value in shown:
            name = row[0]._replace(value=f"{row[0].value}, ours" if ours else f"{row[0].value}, {row[1].value}")
            cells = [name, *row[1:]]
            rows.append([cells[i]._replace(note="") for i in kept])
    return Table("over_games", "Over games", [table.columns[i] for i in kept], rows)


def _short(score: float) -> str:
    """Return a raw score with as many digits as it takes to distinguish runs."""
    return f"{score:,.1f}" if abs(score) < 100 else f"{score:,.0f}"
