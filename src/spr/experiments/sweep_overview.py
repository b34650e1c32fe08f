"""Owns what the user sees of a sweep: its overview while it runs, the table at its end, the forecast of a dry run."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spr.common.errors import plural
from spr.experiments.progress import clock
from spr.experiments.sweep_plan import Cost, CostModel, unfinished
from spr.experiments.train_request import TrainJob
from spr.runs import run_folder


class JobEvent(NamedTuple):
    """A change in a job's state."""

    job: TrainJob
    state: str  # waiting (for another process), running, done, failed or stopped
    reason: str = ""


def _folders(jobs: Iterable[TrainJob]) -> list[Path]:
    """Return the folders of all runs."""
    return [job.request.folder(member) for job in jobs for member in job.request.members]


class Overview:
    """What is done, running, waiting and failed, and when it will end: live in a terminal, lines in a pipe."""

    def __init__(self, console: Console, jobs: Sequence[TrainJob], costs: Sequence[Cost]) -> None:
        """Nothing is running yet."""
        self._console = console
        self._cost = {job: cost.seconds for job, cost in zip(jobs, costs, strict=True)}
        self._states: dict[TrainJob, JobEvent] = {job: JobEvent(job, "waiting") for job in jobs}
        self._began: dict[TrainJob, float] = {}
        self._took: dict[TrainJob, float] = {}
        self._most = 1
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: JobEvent | None) -> None:
        """Record a job's new state, if any."""
        if event is not None:
            now = time.monotonic()
            if event.state == "running":
                self._began.setdefault(event.job, now)
            elif event.state != "waiting":
                self._took[event.job] = now - self._began.get(event.job, now)
            self._states[event.job] = event
            self._most = max(self._most, len(self._in("running")))
            if not self._live:
                self._console.print(f"{_text(event)}; {self.line()}", highlight=False, soft_wrap=True)
        if self._live:
            self._live.update(Group(Text(self.line(), style="bold"), self._rows()), refresh=True)

    def line(self) -> str:
        """Return everything in one line."""
        parts = [f"{len(self._in(state))} {state}" for state in ("done", "running", "waiting", "failed")]
        left = self._left()
        if left is None or not (self._in("running") or self._in("waiting")):
            return ", ".join(parts)
        return ", ".join(parts) + (f", about {clock(left)} left" if left >= 1 else ", longer than expected")

    def _in(self, state: str) -> list[JobEvent]:
        return [event for event in self._states.values() if event.state == state]

    def _left(self) -> float | None:
        """Return the seconds until the end, as those that are done took, and expected where none is."""
        done = [self._took[event.job] for event in self._in("done")]
        expected_of_done = [self._cost[event.job] for event in self._in("done")]
        expected = {event.job: self._cost[event.job] for state in ("waiting", "running") for event in self._in(state)}
        each: dict[TrainJob, float] = {job: cost for job, cost in expected.items() if cost is not None}
        if len(each) < len(expected):
            if not done:
                return None
            each = dict.fromkeys(expected, fmean(done))
        elif done and all(expected_of_done):
            slower = sum(done) / sum(cost for cost in expected_of_done if cost is not None)
            each = {job: cost * slower for job, cost in each.items()}
        now = time.monotonic()
        left = [max(0.0, cost - (now - self._began.get(job, now))) for job, cost in each.items()]
        return max([*left, sum(left) / self._most]) if left else 0.0

    def _rows(self) -> Table:
        table = Table(box=None, show_header=False)
        now = time.monotonic()
        for event in self._in("running"):
            table.add_row("  ", str(event.job.request), self._progress(event.job), clock(now - self._began[event.job]))
        for event in self._in("waiting"):
            if event.reason:
                table.add_row("  ", str(event.job.request), event.reason)
        for event in self._in("failed"):
            table.add_row(Text("x", style="red"), str(event.job.request), event.reason)
        return table

    def _progress(self, job: TrainJob) -> str:
        """Return how far a running job is."""
        share = job.steps_done()
        if share is None:
            return "beginning"  # or on another machine
        steps = job.request.config(job.request.games[0]).schedule.steps
        return "evaluating" if share == 1 else f"{share * steps:,.0f} of {steps:,} steps"


def _text(event: JobEvent) -> str:
    return f"{event.state}: {event.job.request}" + (f": {event.reason}" if event.reason else "")


def outcome(jobs: Sequence[TrainJob]) -> Table:
    """Return a table of mean scores, games down and methods across, with the number of finished runs behind each."""
    scores: dict[tuple[str, str], list[float]] = {}
    planned: dict[tuple[str, str], int] = {}
    requests = [job.request for job in jobs]
    for request in requests:
        for member in request.members:
            cell = (member.game, request.preset)
            planned[cell] = planned.get(cell, 0) + 1
            if (result := run_folder.result(request.folder(member))) is not None:
                scores.setdefault(cell, []).append(float(result["score"]))
    presets = list(dict.fromkeys(request.preset for request in requests))
    table = Table(box=None, header_style="bold")
    for column in ("game", *presets):
        table.add_column(column, justify="left" if column == "game" else "right")
    for game in dict.fromkeys(game for request in requests for game in request.games):
        row = []
        for preset in presets:
            found, all_of = scores.get((game, preset), []), planned[game, preset]
            note = "" if len(found) == all_of else f" ({len(found)} of {all_of})"
            row.append((f"{fmean(found):,.2f}" if found else "-") + note)
        table.add_row(game, *row)
    return table


def forecast(jobs: Sequence[TrainJob], together: int) -> Group:
    """Return the plan as a table with what each fleet is expected to take, and the sum."""
    table = Table(box=None, header_style="bold")
    for column in ("method", "games", "seeds", "state", "time", "memory"):
        table.add_column(column, justify="right" if column in ("time", "memory") else "left")
    device = jobs[0].device
    rates, total, unknown = CostModel(jobs, device), 0.0, False
    for job in jobs:
        cost = rates.cost(job)
        left = unfinished([job])
        begun = any(folder.exists() for folder in _folders([job]))
        state = "finished" if not left else "begun" if begun else "new"
        if left:
            total, unknown = total + (cost.seconds or 0.0), unknown or cost.seconds is None
        time_text = "-" if not left else "unknown" if cost.seconds is None else clock(cost.seconds)
        seeds = " ".join(map(str, job.request.seeds))
        table.add_row(
            job.request.preset, job.request.games_text, seeds, state, time_text, f"{cost.memory / 2**30:.1f} GiB"
        )
    runs_all = len(_folders(jobs))
    lines = [f"{plural(len(jobs), 'fleet')}, {plural(runs_all, 'run')}, {device.type}, {together} at a time"]
    if unknown:
        lines.append(
            "nothing was measured on such a device yet, so the time is unknown until a first fleet is finished"
        )
    else:
        lines.append(f"about {clock(total)} if one follows the other; expected from measured rates")
    return Group(table, *lines)
