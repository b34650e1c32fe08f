"""Owns carrying a sweep out: every job in a process of its own, an overview of them all, and the table at the end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spr.common import atomic_files, file_locks
from spr.common.errors import UserError, plural, visible
from spr.common.hardware import cores, free_memory
from spr.experiments.progress import StopRequest, clock
from spr.experiments.sweep_plan import Cost, Job, Rates, Settings, unfinished
from spr.experiments.train_job import FAILED, INTERRUPTED
from spr.runs import run_folder
from spr.training import checkpoint
from spr.training.fleet import fleet_memory

_LOOK = 0.5  # seconds between two looks at the jobs
_BEGINNING = 10.0  # seconds that a sweep waits for others that begin at the same time
# Set in the child itself: code between fork and exec is unsafe where the parent has threads. 1 is PR_SET_PDEATHSIG.
_CHILD = "import ctypes, sys; ctypes.CDLL(None).prctl(1, {signal}); from spr.cli import main; sys.exit(main())"


class Event(NamedTuple):
    """A change in a job's state."""

    job: Job
    state: str  # waiting for somebody else, running, done, failed or stopped
    reason: str = ""


# Runs jobs: yields each job's state changes, or None if nothing changed; polls the stop request.
Engine = Callable[[Sequence[Job], Settings, StopRequest], Iterator[Event | None]]


def sweep(jobs: Sequence[Job], settings: Settings, engine: Engine, console: Console) -> int:
    """Carry out what is not finished, show how it goes, end with a table; return the exit code."""
    left = unfinished(jobs, settings)
    if done := len(jobs) - len(left):
        console.print(f"{done} of {len(jobs)} fleets are finished already and skipped", highlight=False)
    _tidy(jobs, settings)
    rates = Rates(jobs, settings)
    failed: list[Event] = []
    costs = [rates.cost(job) for job in left]
    with claimed(left, settings), StopRequest() as stop, Overview(console, left, costs, settings) as overview:
        for event in engine(left, settings, stop):
            overview.show(event)
            if event is not None and event.state == "failed":
                failed.append(event)
    console.print(outcome(jobs, settings))
    for event in failed:
        console.print(visible(f"failed: {event.job}: {event.reason}"), highlight=False, soft_wrap=True)
    if stop.asked:
        console.print("stopped and saved; the same command goes on")
        return INTERRUPTED
    return FAILED if failed else 0


@contextmanager
def claimed(jobs: Sequence[Job], settings: Settings) -> Iterator[None]:
    """Keep runs from other sweeps; if one has some of them already, it is named. Sweeps that share none go together."""
    if not jobs:
        yield
        return
    mine = {str(settings.folder(job, member).relative_to(settings.out)) for job in jobs for member in job.members}
    place = settings.out / run_folder.LOGS
    with ExitStack() as held:
        try:
            place.mkdir(parents=True, exist_ok=True)
            with file_locks.hold(place / ".sweeps.lock", _BEGINNING):
                _refuse_shared(mine, settings.out, sorted(place.glob(".sweep-*.lock")))
                name = f".sweep-{socket.gethostname()}-{os.getpid()}.lock"
                held.enter_context(file_locks.hold(place / name, runs=sorted(mine)))
        except file_locks.HeldError as error:
            raise UserError(f"another sweep of {settings.out} is beginning ({error.holder}): try again") from None
        except OSError as error:
            raise run_folder.unusable(place, error) from error
        yield


def _refuse_shared(mine: set[str], out: Path, claims: Sequence[Path]) -> None:
    """Refuse runs that another sweep has claimed; claims of sweeps that are dead are removed."""
    for path in claims:
        holder = file_locks.holder(path)
        if holder is None:
            path.unlink(missing_ok=True)
            continue
        theirs = holder.about.get("runs")
        shared = sorted(mine & set(theirs)) if isinstance(theirs, list) else sorted(mine)
        if shared:
            also = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            raise UserError(
                f"another sweep of {out} works on {shared[0]}{also}: {holder}; wait for it or stop it (what it has not "
                "claimed can be swept beside it)"
            )


def _tidy(jobs: Sequence[Job], settings: Settings) -> None:
    """Remove what a process that was killed after it had stored a result has left beside it."""
    for folder in (settings.folder(job, member) for job in jobs for member in job.members):
        if run_folder.finished(folder) and run_folder.worked_on_by(folder) is None:
            checkpoint.remove(folder)
            run_folder.remove_leftovers(folder)


def local(together: int) -> Engine:
    """Return an engine that trains fleets on this machine, several at a time, each as a command of its own.

    A fleet that has been trained on a GPU is judged by the CPU, while the next one trains. One with a run that another
    process works on, such as what a killed sweep has left behind to save, waits for that; the others go on.
    """

    def engine(jobs: Sequence[Job], settings: Settings, stop: StopRequest) -> Iterator[Event | None]:
        machine = _Machine(jobs, settings, together)
        asked = False
        try:
            while machine.running or (machine.waiting and not stop.check()):
                yield from machine.begin(stop)
                if stop.check() and not asked:
                    asked = True
                    for command in machine.running.values():
                        command.stop()
                time.sleep(_LOOK)
                yield None
                for job in [job for job, command in machine.running.items() if command.ended() is not None]:
                    yield machine.running.pop(job).event(job)
        finally:
            for command in machine.running.values():
                command.kill()

    return engine


class _Machine:
    """The jobs of this machine: which wait, and which run."""

    def __init__(self, jobs: Sequence[Job], settings: Settings, together: int) -> None:
        self.waiting, self.running = list(jobs), dict[Job, Command]()
        self._settings, self._together = settings, together
        self._held: dict[Job, str] = {}  # by whom, as it was told
        # Two fleets that both used every core took eight times as long as with one core each (catch, two cores).
        self._threads = max(1, cores() // together)

    def begin(self, stop: StopRequest) -> Iterator[Event]:
        """Begin jobs, in their order, as long as there is room for them."""
        for job in list(self.waiting):
            if stop.check() or not self._has_room(job):
                return
            if holder := _holder(job, self._settings):
                if self._held.get(job) != holder:
                    self._held[job] = holder
                    yield Event(job, "waiting", holder)
                continue
            self.waiting.remove(job)
            yield self._begun(job)

    def _begun(self, job: Job) -> Event:
        log = self._settings.log(job)
        try:
            self.running[job] = Command(self._settings.command(job), log, self._threads)
        except OSError as error:
            return Event(job, "failed", str(run_folder.unusable(log, error)))
        return Event(job, "running")

    def _has_room(self, job: Job) -> bool:
        settings, together = self._settings, self._together
        if settings.device.type == "cpu" or len(self.running) < together:
            return len(self.running) < together
        judged = sum(settings.steps_done(other) == 1 for other in self.running)
        config = settings.config(job.preset, job.games[0])
        # What has been trained gives its memory back a moment later.
        fits = fleet_memory(config, len(job.members), settings.device) < free_memory(settings.device)
        return len(self.running) - min(judged, together) < together and fits


def _holder(job: Job, settings: Settings) -> str:
    """Say who else works on a run of a job; empty if nobody does."""
    for folder in (settings.folder(job, member) for member in job.members):
        if (holder := run_folder.worked_on_by(folder)) is not None:
            return f"{folder} is being worked on by {holder}"
    return ""


class Command:
    """`spr` with arguments, in a process that is asked to save and stop if this one dies."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        threads: int,
        when_orphaned: signal.Signals = signal.SIGTERM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with so many threads for arithmetic; what it says goes to a file."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with atomic_files.growing(log, fresh=True) as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD.format(signal=int(when_orphaned)), *arguments],
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is this process's to pass on
            )

    def ended(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end."""
        return self._process.wait()

    def stop(self) -> None:
        """Ask it to save and stop; not by SIGINT, which Ray's workers block, and with them what they start."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def event(self, job: Job) -> Event:
        """Say how it ended."""
        code = self._process.returncode
        if code == 0:
            return Event(job, "done")
        if code == INTERRUPTED:
            return Event(job, "stopped")
        if code < 0:
            return Event(job, "failed", f"killed by {signal.Signals(-code).name}; see {self._log}")
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return Event(job, "failed", f"exit code {code}, and its log {self._log} is gone: {error.strerror}")
        lines = [line for line in text.splitlines() if line.strip()]
        return Event(job, "failed", f"{lines[-1].strip()} (see {self._log})" if lines else f"exit code {code}")


class Overview:
    """What is done, running, waiting and failed, and when it will end: live in a terminal, lines in a pipe."""

    def __init__(self, console: Console, jobs: Sequence[Job], costs: Sequence[Cost], settings: Settings) -> None:
        """Nothing is running yet."""
        self._console, self._settings = console, settings
        self._cost = {job: cost.seconds for job, cost in zip(jobs, costs, strict=True)}
        self._states: dict[Job, Event] = {job: Event(job, "waiting") for job in jobs}
        self._began: dict[Job, float] = {}
        self._took: dict[Job, float] = {}
        self._most = 1
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: Event | None) -> None:
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

    def _in(self, state: str) -> list[Event]:
        return [event for event in self._states.values() if event.state == state]

    def _left(self) -> float | None:
        """Return the seconds until the end, as those that are done took, and expected where none is."""
        done = [self._took[event.job] for event in self._in("done")]
        expected_of_done = [self._cost[event.job] for event in self._in("done")]
        expected = {event.job: self._cost[event.job] for state in ("waiting", "running") for event in self._in(state)}
        each: dict[Job, float] = {job: cost for job, cost in expected.items() if cost is not None}
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
            table.add_row("  ", str(event.job), self._progress(event.job), clock(now - self._began[event.job]))
        for event in self._in("waiting"):
            if event.reason:
                table.add_row("  ", str(event.job), event.reason)
        for event in self._in("failed"):
            table.add_row(Text("x", style="red"), str(event.job), event.reason)
        return table

    def _progress(self, job: Job) -> str:
        """Return how far a running job is."""
        share = self._settings.steps_done(job)
        if share is None:
            return "beginning"  # or on another machine
        steps = self._settings.config(job.preset, job.games[0]).schedule.steps
        return "evaluating" if share == 1 else f"{share * steps:,.0f} of {steps:,} steps"


def _text(event: Event) -> str:
    return f"{event.state}: {event.job}" + (f": {event.reason}" if event.reason else "")


def outcome(jobs: Sequence[Job], settings: Settings) -> Table:
    """Return a table of mean scores, games down and methods across, with the number of finished runs behind each."""
    scores: dict[tuple[str, str], list[float]] = {}
    planned: dict[tuple[str, str], int] = {}
    for job in jobs:
        for member in job.members:
            cell = (member.game, job.preset)
            planned[cell] = planned.get(cell, 0) + 1
            if (result := run_folder.result(settings.folder(job, member))) is not None:
                scores.setdefault(cell, []).append(float(result["score"]))
    presets = list(dict.fromkeys(job.preset for job in jobs))
    table = Table(box=None, header_style="bold")
    for column in ("game", *presets):
        table.add_column(column, justify="left" if column == "game" else "right")
    for game in dict.fromkeys(game for job in jobs for game in job.games):
        row = []
        for preset in presets:
            found, all_of = scores.get((game, preset), []), planned[game, preset]
            note = "" if len(found) == all_of else f" ({len(found)} of {all_of})"
            row.append((f"{fmean(found):,.2f}" if found else "-") + note)
        table.add_row(game, *row)
    return table


def forecast(jobs: Sequence[Job], settings: Settings, together: int) -> Group:
    """Return the plan as a table with what each fleet is expected to take, and the sum."""
    table = Table(box=None, header_style="bold")
    for column in ("method", "games", "seeds", "state", "time", "memory"):
        table.add_column(column, justify="right" if column in ("time", "memory") else "left")
    rates, total, unknown = Rates(jobs, settings), 0.0, False
    for job in jobs:
        cost = rates.cost(job)
        left = unfinished([job], settings)
        begun = any(settings.folder(job, member).exists() for member in job.members)
        state = "finished" if not left else "begun" if begun else "new"
        if left:
            total, unknown = total + (cost.seconds or 0.0), unknown or cost.seconds is None
        time_text = "-" if not left else "unknown" if cost.seconds is None else clock(cost.seconds)
        seeds = " ".join(map(str, job.seeds))
        table.add_row(job.preset, job.games_text, seeds, state, time_text, f"{cost.memory / 2**30:.1f} GiB")
    runs_all = sum(len(job.members) for job in jobs)
    lines = [f"{plural(len(jobs), 'fleet')}, {plural(runs_all, 'run')}, {settings.device.type}, {together} at a time"]
    if unknown:
        lines.append(
            "nothing was measured on such a device yet, so the time is unknown until a first fleet is finished"
        )
    else:
        lines.append(f"about {clock(total)} if one follows the other; expected from measured rates")
    return Group(table, *lines)
