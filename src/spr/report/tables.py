"""Owns the tables of a report, as data: what is in each cell, for the page and for the CSV files alike."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spr.common.errors import plural
from spr.config.presets import PRESETS
from spr.envs.atari100k import game_names, normalise, reference_scores, reference_table
from spr.report import statistics
from spr.report.published import IN_PAPER, LATER, RECALLED
from spr.report.records import PUBLISHED_ROMS, Record

_MEASURED_SINCE = {"mean_100": "SPR, 100 runs", "jax_mean_49": "SPR in JAX, 49 runs"}  # by game, of the authors' codes
_AGGREGATES = {
    "IQM": statistics.iqm,
    "median": statistics.median,
    "mean": statistics.mean,
    "optimality gap": statistics.optimality_gap,
    "superhuman games": statistics.superhuman,
}
_BY_DQN = {"mean, DQN-normalised": statistics.mean, "median, DQN-normalised": statistics.median}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
_TABLE_1 = ("mean", "median", *_BY_DQN, "superhuman games")  # what the paper has, in its order


class Cell(NamedTuple):
    """A value, where it has one an interval, and how to show it."""

    value: float | str | None = None  # None: not known
    low: float | None = None
    high: float | None = None
    digits: int = 3
    note: str = ""  # shown beside the value
    best: bool = False

    def text(self) -> str:
        """Return the value as text."""
        if self.value is None:
            return ""
        return self.value if isinstance(self.value, str) else f"{self.value:,.{self.digits}f}"

    def interval(self) -> str:
        """Return the interval as text."""
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:,.{self.digits}f} to {self.high:,.{self.digits}f}"

    def beside(self) -> str:
        """Return what is shown beside the value: interval and note."""
        return " · ".join(part for part in (self.interval(), self.note) if part)


class Table(NamedTuple):
    """A table with its name in files, its title, what its columns mean, and notes for the reader."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def is_text(self, column: int) -> bool:
        """Say whether a column holds words, not numbers."""
        return all(isinstance(row[column].value, str | None) for row in self.rows)

    def markdown(self) -> str:
        """Return it as a table in Markdown; what stands beside a value is in brackets."""
        lines = [list(self.columns), ["---"] * len(self.columns)]
        for row in self.rows:
            cells = (f"{cell.text()} ({cell.beside()})" if cell.beside() else cell.text() for cell in row)
            lines.append([text.replace("|", "\\|") for text in cells])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def csv(self) -> list[list[str]]:
        """Return it as rows of text; a column with intervals becomes three, and its notes one more.

        A word that a spreadsheet would take for a formula has an apostrophe before it.
        """
        shown = list(zip(*self.rows, strict=True))
        parts: list[list[str]] = []
        for title, cells in zip(self.columns, shown, strict=True):
            parts.append([title, *("" if cell.value is None else str(cell.value) for cell in cells)])
            if any(cell.low is not None for cell in cells):
                for name in ("low", "high"):
                    values = (getattr(cell, name) for cell in cells)
                    parts.append([f"{title}: {name}", *("" if value is None else str(value) for value in values)])
            if any(cell.note for cell in cells):
                parts.append([f"{title}: note", *(cell.note for cell in cells)])
        return [list(map(_unobeyed, row)) for row in zip(*parts, strict=True)]


def _unobeyed(text: str) -> str:
    """Return a cell of a CSV file: names come from files, and a spreadsheet calculates what begins like a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) and not all(map(_is_number, text.split(" "))) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Method(NamedTuple):
    """The runs of one method by one protocol: raw scores by game."""

    name: str
    scores: Mapping[str, NDArray[np.float64]]
    all_games: int = 26  # of a complete set
    all_runs: int | None = None  # of each game in a complete set; None: as many as there are, equally many of each

    def human(self, games: Iterable[str] | None = None) -> list[NDArray[np.float64]]:
        """Return human-normalised scores, one array per game."""
        return self.by("human", games)

    def by(self, reference: str, games: Iterable[str] | None = None) -> list[NDArray[np.float64]]:
        """Return scores normalised by a reference, one array per game."""
        return [normalise(game, self.scores[game], reference_scores(reference)[game]) for game in games or self.scores]

    @property
    def single(self) -> bool:
        """Whether no game has a second run, so that nothing says how far runs differ."""
        return all(len(runs) == 1 for runs in self.scores.values())

    @property
    def complete(self) -> bool:
        """Whether all games are there, with equally many runs each."""
        counts = {len(runs) for runs in self.scores.values()}
        return len(self.scores) == self.all_games and counts == {self.all_runs or max(counts)}

    def label(self) -> str:
        """Return the name, and if the set is incomplete how much of it there is."""
        return self.name if self.complete else f"{self.name} ({self.part()})"

    def part(self) -> str:
        """Say how much of a complete set there is: games where some are missing, else runs."""
        return self._games() if len(self.scores) < self.all_games else self._runs()

    def runs_text(self) -> str:
        """Say on how many games and runs a number rests."""
        return f"{self._games()}, {self._runs()} each"

    def _games(self) -> str:
        few = f"{len(self.scores)} of " if len(self.scores) < self.all_games else ""
        return few + plural(self.all_games, "game")

    def _runs(self) -> str:
        counts = sorted({len(runs) for runs in self.scores.values()})
        few = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        if self.all_runs and counts[0] < self.all_runs:
            return f"{few} of {plural(self.all_runs, 'run')}"
        return f"{few} {plural(counts[-1], 'run').split()[-1]}"


def methods_of(records: Sequence[Record]) -> list[Method]:
    """Gather records of one protocol by method; methods in the order of the presets, games in the paper's."""
    places = list(PRESETS)
    known = {record.method: record.preset for record in records}
    place = {name: places.index(preset) if preset in PRESETS else len(places) for name, preset in known.items()}
    names = sorted(known, key=lambda name: (place[name], not name.startswith(known[name]), name))
    order = {game: i for i, game in enumerate(game_names())}
    found = []
    for name in names:
        mine = [record for record in records if record.method == name]
        games = sorted({record.game for record in mine}, key=lambda game: (order.get(game, len(order)), game))
        scores = {game: np.array([record.score for record in mine if record.game == game]) for game in games}
        found.append(Method(name, scores))
    return found


def published_on(column: str, games: Iterable[str]) -> list[NDArray[np.float64]]:
    """Return a published method's human-normalised mean scores, one array of one number per game."""
    scores = _by_game(column)
    return [normalise(game, np.array([scores[game]]), reference_scores("human")[game]) for game in games]


def _by_game(column: str) -> Mapping[str, float]:
    """Return the published mean scores of a column, whichever table has it."""
    if column in IN_PAPER:
        return reference_scores(column)
    table = reference_table("spr_run_spread" if column in _MEASURED_SINCE else "later_agents")
    return {row["game"]: float(row[column]) for row in table}


def _since_the_paper(methods: Sequence[Method]) -> dict[str, str]:
    """Return columns with their titles: the authors' codes, and the later agents where one was played."""
    later = any(method.name.removesuffix(PUBLISHED_ROMS) in LATER for method in methods)
    return _MEASURED_SINCE | (LATER if later else {})


def per_game(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Table:
    """Return the paper's per-game table with our methods beside."""
    since = _since_the_paper(methods)
    known = [f"{name} (paper)" for name in IN_PAPER.values()]
    known += [name + (" (recalled)" if column in RECALLED else "") for column, name in since.items()]
    columns = ["game", "random", "human", *(f"{method.name} (ours)" for method in methods), *reversed(known)]
    measured = [_by_game(column) for column in since]
    rows = []
    for game in game_names():
        published = [Cell(reference_scores(name)[game], digits=1) for name in ("random", "human", *IN_PAPER)]
        ours = [_mean_cell(method.scores.get(game), draws, random) for method in methods]
        theirs = [*published[2:], *(Cell(scores[game], digits=1) for scores in measured)]
        compared = [*ours, *reversed(theirs)]
        top = max(float(cell.value) for cell in compared if cell.value is not None)
        marked = [cell._replace(best=cell.value == top) for cell in compared]
        rows.append([Cell(game), *published[:2], *marked])
    notes = [
        "Mean raw scores, with the 95% bootstrap interval of the mean and the number of runs. With fewer than five "
        "runs such an interval is too narrow. The best method of a row is in bold type."
    ]
    if any(column in RECALLED for column in since):
        notes.append("Recalled: the published table was not at hand; its mean and median over games are met.")
    return Table("per_game", "Scores by game", columns, rows, notes)


def aggregates(methods: Sequence[Method], draws: int, random: np.random.Generator) -> Table:
    """Return aggregates over games: ours with intervals, then the paper's, then what others have measured since."""
    rows = []
    for method in methods:
        found = {name: _estimate(f, method.human(), draws, random) for name, f in _AGGREGATES.items()}
        found |= {name: _estimate(f, method.by("dqn_50m"), draws, random) for name, f in _BY_DQN.items()}
        if method.single:
            found = {name: cell._replace(low=None, high=None) for name, cell in found.items()}
        marked = Cell(method.runs_text(), note="" if method.complete else "incomplete")
        rows.append(_aggregate_row(method.name, Cell("ours"), marked, found))
    for column, name in IN_PAPER.items():
        paper = statistics.aggregate(reference_scores(column))
        values = (paper.human_mean, paper.human_median, paper.dqn_mean, paper.dqn_median, paper.superhuman)
        found = {title: Cell(value) for title, value in zip(_TABLE_1, values, strict=True)}
        rows.append(_aggregate_row(name, Cell("paper"), Cell("26 games"), found))
    rows += _variants(methods) + _since()
    notes = [
        "Human-normalised unless marked DQN-normalised (by DQN after 50 million steps). IQM is the mean of the "
        "middle half of all runs; the optimality gap is what runs lack to the human score. Intervals are 95% "
        "stratified bootstrap.",
    ]
    if any(len(method.scores) < method.all_games for method in methods):
        notes.append(
            "Rows of fewer than 26 games must not be compared with rows of 26. The table of the same games, below, is "
            "what they can be compared by."
        )
    if any(len(method.scores) == method.all_games and not method.complete for method in methods):
        notes.append("A row of 26 games is marked incomplete where these have unequally many runs; they count alike.")
    columns = ["method", "source", "runs", *_AGGREGATES, *_BY_DQN]
    return Table("aggregates", "Aggregates over games", columns, rows, notes)


def _aggregate_row(name: str, source: Cell, runs_text: Cell, found: Mapping[str, Cell]) -> list[Cell]:
    """Return a row of the table of aggregates; what was not found stays empty, and games are whole."""
    cells = {title: found.get(title, Cell()) for title in (*_AGGREGATES, *_BY_DQN)}
    cells["superhuman games"] = cells["superhuman games"]._replace(digits=0)
    return [Cell(name), source, runs_text, *cells.values()]


def same_games(methods: Sequence[Method]) -> list[Table]:
    """Compare each method that lacks games with those that have its games, ours and the paper's, on exactly these."""
    tables = []
    sets = dict.fromkeys(tuple(method.scores) for method in methods if len(method.scores) < len(game_names()))
    for number, games in enumerate(sets, start=1):
        ours = [(m.name, "ours", m.human(games)) for m in methods if set(games) <= set(m.scores)]
        theirs = [(name, "paper", published_on(column, games)) for column, name in IN_PAPER.items()]
        theirs += [
            (name, "recalled" if column in RECALLED else "published", published_on(column, games))
            for column, name in _since_the_paper(methods).items()
        ]
        rows = [
            [Cell(name), Cell(who), Cell(float(statistics.mean(scores))), Cell(float(statistics.median(scores))),
             Cell(float(statistics.superhuman(scores)), digits=0)]
            for name, who, scores in [*ours, *theirs]
        ]  # fmt: skip
        title = f"The same {plural(len(games), 'game')}"
        columns = ["method", "source", "mean", "median", "superhuman games"]
        note = f"Human-normalised, of mean scores, over {', '.join(games)} only."
        tables.append(Table(f"same_games_{number}", title, columns, rows, [note]))
    return tables


def wall_clock(records: Sequence[Record]) -> Table:
    """Return how long runs took, by method, device and size of the fleet."""
    groups: dict[tuple[str, str, str, int], list[Record]] = {}
    for record in records:
        about = record.about
        key = (record.method, about["device"], about["precision"], int(about["fleet_size"]))
        groups.setdefault(key, []).append(record)
    rows = []
    for (method, device, precision, together), mine in groups.items():
        training, evaluation = (
            fmean(record.about[name] / together for record in mine) for name in ("train_seconds", "eval_seconds")
        )
        rows.append(
            [Cell(method), Cell(device), Cell(precision), Cell(together, digits=0), Cell(len(mine), digits=0),
             Cell(training, digits=0), Cell(evaluation, digits=0),
             Cell(len(mine) * (training + evaluation) / 3600, digits=2)]
        )  # fmt: skip
    columns = ["method", "device", "precision", "fleet size", "runs", "training, s per run"]
    columns += ["evaluation, s per run", "all, hours"]
    notes = ["Seconds of a fleet divided by its agents, as its files state; other work may have shared the machine."]
    return Table("wall_clock", "Time", columns, rows, notes)


def differences(records: Sequence[Record]) -> list[Table]:
    """Return a table of what names stand for that are not those of presets; nothing where there are none."""
    rows = dict.fromkeys(
        (record.method.removesuffix(PUBLISHED_ROMS), record.preset, *change)
        for record in records
        for change in record.changes
    )
    columns = ["method", "preset", "field", "value", "usual value"]
    notes = ["Methods that are presets with changed values: each changed field, its value, and the preset's own."]
    made = [[Cell(text) for text in row] for row in rows]
    return [Table("methods", "What names stand for", columns, made, notes)] if made else []


def all_runs(records: Sequence[Record]) -> Table:
    """Return a table with a row for every run."""
    columns = ["protocol", "method", "game", "seed", "score", "human-normalised", "random agent", "games"]
    rows = []
    for r in records:
        known = (r.protocol, r.method, r.game, r.seed, r.score, r.human, r.random_score, len(r.episodes))
        rows.append(
            [*map(Cell, known), *map(Cell, r.about.values()), Cell(" ".join(f"{score:g}" for score in r.episodes))]
        )
    return Table("runs", "Runs", [*columns, *records[0].about, "episodes"], rows)


def _variants(methods: Sequence[Method]) -> list[list[Cell]]:
    """Return the paper's aggregates of the variants that we ran and that its per-game table lacks."""
    ran = {method.name.removesuffix(PUBLISHED_ROMS) for method in methods} - IN_PAPER.keys()
    rows = []
    for row in reference_table("paper_variants"):
        if row["preset"] in ran:
            names = ("human_mean", "human_median", "dqn_mean", "dqn_median")
            found = {title: Cell(float(row[name])) for title, name in zip(_TABLE_1, names, strict=False)}
            rows.append(_aggregate_row(row["preset"], Cell("paper", note=row["source"]), Cell("26 games"), found))
    return rows


def _since() -> list[list[Cell]]:
    """Return what others have measured since the paper."""
    rows = []
    for row in reference_table("published_aggregates"):
        if row["method"] == "SPR (paper)":
            continue  # stands above, from the per-game table
        names = ("iqm", "median", "mean", "optimality_gap", "superhuman")
        found = {title: Cell(float(row[name])) for title, name in zip(_AGGREGATES, names, strict=True) if row[name]}
        runs_text = Cell(f"26 games, {row['runs']} runs each", note=row["note"])
        rows.append(_aggregate_row(row["method"], Cell(row["source"]), runs_text, found))
    return rows


def _estimate(
    statistic: statistics.Statistic, scores: list[NDArray[np.float64]], draws: int, random: np.random.Generator
) -> Cell:
    return Cell(*statistics.bootstrap(statistic, scores, draws=draws, random=random))


def _mean_cell(runs: NDArray[np.float64] | None, draws: int, random: np.random.Generator) -> Cell:
    if runs is None:
        return Cell()
    found = statistics.bootstrap(statistics.mean, [runs], draws=draws, random=random)
    note = plural(len(runs), "run")
    if len(runs) == 1:
        return Cell(found.value, digits=1, note=note)
    return Cell(*found, digits=1, note=note)
