"""Owns one report: from runs' folders to a page, figures and tables in a folder."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context

from spr.common.atomic_files import remove_leftovers
from spr.common.errors import UserError, plural
from spr.envs.atari100k import published_curves
from spr.report import figures, protocol_sections, tables
from spr.report.html import Contents, page
from spr.report.learning_curves import NEEDS, curves
from spr.report.plot_style import Drawing
from spr.report.protocol_sections import Section
from spr.report.readme_tables import front_page
from spr.report.records import BENCHMARK, PUBLISHED_ROMS, Reading, Record, read, with_equal_games
from spr.report.tables import Method, Table, methods_of
from spr.runs import run_files

DRAWS = 50_000  # replicates of a bootstrap
_SEED = 2021  # of the bootstrap: the same runs give the same page


class Report(NamedTuple):
    """What was written, and messages for the user."""

    files: list[Path]
    left_out: list[str]
    notes: list[str]


def write(paths: Sequence[Path], out: Path, draws: int = DRAWS) -> Report:
    """Read runs and write index.html, PNG and CSV files into a folder, and tables in Markdown for a front page."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose a folder")
    reading = read(paths)
    contents = _contents(reading, draws)
    files = {out / "index.html": page(contents).encode(errors="replace")}
    shown = [*(table for section in contents.sections for table in section.tables), *contents.about]
    files |= {out / f"{table.name}.csv": _csv(table) for table in shown}
    files |= {out / f"{drawing.name}.png": drawing.png for part in contents.sections for drawing in part.drawings}
    if benchmark := [record for record in reading.records if record.protocol == BENCHMARK]:
        files[out / "front_page.md"] = front(benchmark, draws).encode(errors="replace")
    files[out / "runs.csv"] = _csv(tables.all_runs(reading.records))
    remove_leftovers(out, {path.name for path in files}.__contains__)
    for path, data in files.items():
        run_files.write_if_changed(path, data)
    return Report(list(files), reading.left_out, list(contents.notes))


def front(records: Sequence[Record], draws: int = DRAWS) -> str:
    """Return the tables of a front page for runs of the benchmark."""
    return front_page(with_equal_games(records), draws, np.random.default_rng(_SEED))


def _contents(reading: Reading, draws: int) -> Contents:
    random = np.random.default_rng(_SEED)
    records = reading.records
    notes = list(reading.notes)
    parts = []
    # Names come from files: a dollar in one is a dollar, not the beginning of a formula.
    with rc_context({"text.parse_math": False}):
        if ours := [record for record in records if record.protocol == BENCHMARK]:
            parts.append(_benchmark(with_equal_games(ours), draws, random))
        else:
            notes.append(f"no run followed the protocol of {BENCHMARK}: nothing is compared with published figures")
        names = [name for name in dict.fromkeys(record.protocol for record in records) if name != BENCHMARK]
        for number, name in enumerate(names, start=1):
            mine = [record for record in records if record.protocol == name]
            parts.append(protocol_sections.other(number, name, mine, draws, random))
    games, seeds = len({r.game for r in records}), len({r.seed for r in records})
    kinds = len({r.method.removesuffix(PUBLISHED_ROMS) for r in records})
    summary = (
        f"{plural(len(records), 'run')}: {plural(kinds, 'method')}, {plural(games, 'game')}, {plural(seeds, 'seed')}."
    )
    about = [*tables.differences(records), tables.wall_clock(records)]
    return Contents(summary, reading.left_out, notes, parts, about, records)


def _benchmark(records: Sequence[Record], draws: int, random: np.random.Generator) -> Section:
    """Return what there is of the benchmark, beside published figures."""
    methods = methods_of(records)
    made = [tables.aggregates(methods, draws, random), *tables.same_games(methods)]
    made += [tables.per_game(methods, draws, random)]
    return Section("atari_100k", BENCHMARK, [], made, *_drawings(records, methods, draws, random))


def _drawings(
    records: Sequence[Record], methods: Sequence[Method], draws: int, random: np.random.Generator
) -> tuple[list[Drawing], list[str]]:
    """Draw what can be drawn, and say what the rest would need."""
    main = figures.main_methods(methods)
    drawn = [figures.iqms(main, draws, random), figures.profiles(main, draws, random), figures.box_plot(main)]
    drawn.append(figures.by_game(main))
    wanted = {
        "Probability of improvement": (
            figures.improvement(main, draws, random),
            "two methods with a game in common",
        ),
        "Learning curves": (curves(records, main, published=published_curves()), NEEDS),
        "Prediction depth": (figures.depth(methods), "two or more of spr_k1, spr_k2, ... with games in common"),
    }
    missing = [f"{title}: needs {needs}" for title, (found, needs) in wanted.items() if found is None]
    averages = figures.ema(methods)
    if not averages:
        missing.append("Target encoder's average: needs two or more of spr_ema_0.999, spr_ema_0.9976, ...")
    return [*drawn, *(found for found, _ in wanted.values() if found is not None), *averages], missing


def _csv(table: Table) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table.csv())
    return text.getvalue().encode(errors="replace")
