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

from rich.console import Console

from spr.common import atomic_files, file_locks
from spr.common.errors import UserError, visible
from spr.common.hardware import cores, free_memory
from spr.experiments.job_runner import FAILED, INTERRUPTED
from spr.experiments.progress import StopRequest
from spr.experiments.sweep_overview import JobEvent, Overview, _folders, outcome
from spr.experiments.sweep_plan import CostModel, unfinished
from spr.experiments.train_request import TrainJob
from spr.runs import run_files
from spr.training import checkpoint
from spr.training.fleet import fleet_memory

_LOOK = 0.5  # seconds between two looks at the jobs
_BEGINNING = 10.0  # seconds that a sweep waits for others that begin at the same time
# Set in the child itself: code between fork and exec is unsafe where the parent has threads. 1 is PR_SET_PDEATHSIG.
_CHILD = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, {signal}); runpy.run_module('spr', run_name='__main__')"


# Runs jobs: yields each job's state changes, or None if nothing changed; polls the stop request.
Engine = Callable[[Sequence[TrainJob], StopRequest], Iterator[JobEvent | None]]


def sweep(jobs: Sequence[TrainJob], engine: Engine, console: Console) -> int:
    """Carry out what is not finished, show how it goes, end with a table; return the exit code."""
    left = unfinished(jobs)
    if done := len(jobs) - len(left):
        console.print(f"{done} of {len(jobs)} fleets are finished already and skipped", highlight=False)
    _tidy(jobs)
    rates = CostModel(jobs, jobs[0].device)
    failed: list[JobEvent] = []
    costs = [rates.cost(job) for job in left]
    with claimed(left), StopRequest() as stop, Overview(console, left, costs) as overview:
        for event in engine(left, stop):
            overview.show(event)
            if event is not None and event.state == "failed":
                failed.append(event)
    console.print(outcome(jobs))
    for event in failed:
        console.print(visible(f"failed: {event.job.request}: {event.reason}"), highlight=False, soft_wrap=True)
    if stop.asked:
        console.print("stopped and saved; the same command continues")
        return INTERRUPTED
    return FAILED if failed else 0


@contextmanager
def claimed(jobs: Sequence[TrainJob]) -> Iterator[None]:
    """Keep runs from other sweeps; if one has some of them already, it is named. Sweeps that share none go together."""
    if not jobs:
        yield
        return
    out = jobs[0].request.out
    mine = {str(folder.relative_to(out)) for folder in _folders(jobs)}
    place = out / run_files.LOGS
    with ExitStack() as held:
        try:
            place.mkdir(parents=True, exist_ok=True)
            with file_locks.hold(place / ".sweeps.lock", _BEGINNING):
                _refuse_shared(mine, out, sorted(place.glob(".sweep-*.lock")))
                name = f".sweep-{socket.gethostname()}-{os.getpid()}.lock"
                held.enter_context(file_locks.hold(place / name, runs=sorted(mine)))
        except file_locks.HeldError as error:
            raise UserError(f"another sweep of {out} is beginning ({error.holder}): try again") from None
        except OSError as error:
            raise run_files.unusable(place, error) from error
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


def _tidy(jobs: Sequence[TrainJob]) -> None:
    """Remove what a process that was killed after it had stored a result has left beside it."""
    for folder in _folders(jobs):
        if run_files.finished(folder) and run_files.worked_on_by(folder) is None:
            checkpoint.remove(folder)
            run_files.remove_leftovers(folder)


def local(together: int) -> Engine:
    """Return an engine that trains fleets on this machine, several at a time, each as a command of its own.

    While a fleet that was trained on a GPU is evaluated, the next one trains. A fleet with a run that another process
    works on, such as one that a killed sweep has left to save, waits for that; the others continue.
    """

    def engine(jobs: Sequence[TrainJob], stop: StopRequest) -> Iterator[JobEvent | None]:
        machine = _Machine(jobs, together)
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

    def __init__(self, jobs: Sequence[TrainJob], together: int) -> None:
        self.waiting, self.running = list(jobs), dict[TrainJob, Command]()
        self._together = together
        self._held: dict[TrainJob, str] = {}  # by whom, as it was shown
        # Two fleets that both used every core took eight times as long as with one core each (catch, two cores).
        self._threads = max(1, cores() // together)

    def begin(self, stop: StopRequest) -> Iterator[JobEvent]:
        """Begin jobs, in their order, as long as there is room for them."""
        for job in list(self.waiting):
            if stop.check() or not self._has_room(job):
                return
            if holder := _holder(job):
                if self._held.get(job) != holder:
                    self._held[job] = holder
                    yield JobEvent(job, "waiting", holder)
                continue
            self.waiting.remove(job)
            yield self._begun(job)

    def _begun(self, job: TrainJob) -> JobEvent:
        log = job.log_file()
        try:
            self.running[job] = Command(job.command(), log, self._threads)
        except OSError as error:
            return JobEvent(job, "failed", str(run_files.unusable(log, error)))
        return JobEvent(job, "running")

    def _has_room(self, job: TrainJob) -> bool:
        together = self._together
        if job.device.type == "cpu" or len(self.running) < together:
            return len(self.running) < together
        evaluated = sum(other.steps_done() == 1 for other in self.running)
        config = job.request.config(job.request.games[0])
        # What has been trained gives its memory back a moment later.
        fits = fleet_memory(config, len(job.request.members), job.device) < free_memory(job.device)
        return len(self.running) - min(evaluated, together) < together and fits


def _holder(job: TrainJob) -> str:
    """Say who else works on a run of a job; empty if nobody does."""
    for folder in _folders([job]):
        if (holder := run_files.worked_on_by(folder)) is not None:
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

    def event(self, job: TrainJob) -> JobEvent:
        """Say how it ended."""
        code = self._process.returncode
        if code == 0:
            return JobEvent(job, "done")
        if code == INTERRUPTED:
            return JobEvent(job, "stopped")
        if code < 0:
            return JobEvent(job, "failed", f"killed by {signal.Signals(-code).name}; see {self._log}")
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return JobEvent(job, "failed", f"exit code {code}, and its log {self._log} is gone: {error.strerror}")
        lines = [line for line in text.splitlines() if line.strip()]
        return JobEvent(job, "failed", f"{lines[-1].strip()} (see {self._log})" if lines else f"exit code {code}")
