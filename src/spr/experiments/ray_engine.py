"""Owns the engine that carries a sweep out on a Ray cluster: one task per job, retried by Ray, its files brought home.

Ray schedules, notices lost workers and nodes, and starts their tasks again; a task that starts again goes on from the
last checkpoint that it can see.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spr.common.errors import UserError, one_line
from spr.common.plugins import modules_of
from spr.experiments.progress import StopRequest
from spr.experiments.sweep import Command, Engine
from spr.experiments.sweep_overview import JobEvent
from spr.experiments.train_request import TrainJob
from spr.runs import run_files

_LOOK = 0.5  # seconds between two looks at the tasks
_RETRIES = 5  # after a lost worker or node


def on_ray(together: int, address: str | None) -> Engine:
    """Return an engine that hands jobs to a Ray cluster, `together` of them to a GPU."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is loaded: nothing is reported about this sweep
    try:
        import ray  # noqa: PLC0415 - an extra that most users do without
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ImportError as error:
        raise UserError("--engine ray needs Ray: pip install ray") from error

    def engine(jobs: Sequence[TrainJob], stop: StopRequest) -> Iterator[JobEvent | None]:
        environment = _environment(jobs)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            # Ray says the same of a cluster that is not there and of one that refuses us.
            raise UserError(
                f"no Ray cluster can be reached: {one_line(error)}; one that was started with tokens "
                "needs RAY_AUTH_MODE=token and the same token here"
            ) from error
        task = ray.remote(_train).options(
            num_cpus=1,
            num_gpus=1 / together if jobs[0].device.type == "cuda" else 0,
            max_retries=_RETRIES,
        )
        running: dict[Any, TrainJob] = {}
        begun: set[TrainJob] = set()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(  # another node may be lost
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board: Any = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        try:
            for number, job in enumerate(jobs):
                folders = [str(job.request.folder(member).absolute()) for member in job.request.members]
                log = str(job.log_file().absolute())
                mark = (board, number)
                running[task.remote(job, job.command(), log, folders, environment, mark)] = job
            while running and not stop.check():
                ended, _ = ray.wait(list(running), timeout=_LOOK)
                yield None
                new = [jobs[number] for number in ray.get(board.all.remote()) if jobs[number] not in begun]
                begun.update(new)
                yield from (JobEvent(job, "running") for job in new)
                for reference in ended:
                    yield _ended(running.pop(reference), reference, ray)
            for reference, job in running.items():
                ray.cancel(reference)
                yield JobEvent(job, "stopped")
            if running:
                ray.wait(list(running), num_returns=len(running))
        finally:
            ray.shutdown()

    return engine


def _environment(jobs: Sequence[TrainJob]) -> dict[str, str]:
    """Return what the processes on all nodes find in their environment."""
    # Nodes look for ROMs where this machine does, whatever they would do by themselves; empty is ale-py's wheel.
    given = os.environ.get("ALE_ROMS_DIR")
    found = {"ALE_ROMS_DIR": str(Path(given).absolute()) if given else ""}
    if any(job.request.plugin or modules_of(job.request.games) for job in jobs):
        # On nodes that see this folder, what lies in it counts there too
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


class _Board:
    """Where tasks say that they have begun: Ray takes them all at once, and lets most of them wait."""

    def __init__(self) -> None:
        self._begun: dict[int, None] = {}

    def begin(self, number: int) -> None:
        """Note that a task has begun."""
        self._begun[number] = None

    def all(self) -> list[int]:
        """Return the tasks that have begun."""
        return list(self._begun)


def _ended(job: TrainJob, reference: Any, ray: Any) -> JobEvent:
    """Bring home what a task made, and say how it ended."""
    try:
        event: JobEvent
        event, files = ray.get(reference)
    except ray.exceptions.RayError as error:
        return JobEvent(job, "failed", f"lost on the cluster: {one_line(error)[:300]}")
    for name, data in files.items():
        run_files.write_if_changed(Path(name), data)
    return event


def _train(
    job: TrainJob,
    arguments: list[str],
    log: str,
    folders: list[str],
    environment: dict[str, str],
    mark: tuple[Any, int],
) -> tuple[JobEvent, dict[str, bytes]]:
    """Carry a job out where Ray has put it; return how it ended and the files it made.

    The training is killed with its worker: an orphan must not hold the lock of a run.
    """
    board, number = mark
    board.begin.remote(number)
    command = Command(arguments, Path(log), threads=1, when_orphaned=signal.SIGKILL, environment=environment)
    try:
        while command.ended() is None:  # Ray delivers its interrupt between bytecodes, never inside a wait
            time.sleep(_LOOK)
    except KeyboardInterrupt:
        command.stop()
        command.wait()
    kept = [Path(log), *(path for folder in folders for path in run_files.results(Path(folder)))]
    return command.event(job), {str(path): path.read_bytes() for path in kept}
