"""Owns the saving of a fleet while it trains: rows of metrics, checkpoints, and which of its runs continue.

A run whose learning diverges, whose environment fails or whose folder is deleted ends alone, and the others go on. A
disk that can't be written to is everybody's, and ends them all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spr.common.errors import StorageFault
from spr.experiments import events
from spr.experiments.events import Consumer
from spr.runs import run_files, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint, snapshot
from spr.training.checkpoint import CheckpointWriter
from spr.training.loop import StepInfo, Training


class Saver:
    """Saves the runs of a fleet, each at its agent's place."""

    def __init__(
        self, training: Training, mine: Sequence[Run], seconds: Callable[[], float], on_event: Consumer
    ) -> None:
        """Nothing is being written. `seconds` says how long the training has taken."""
        self._training, self._mine, self._seconds, self._on_event = training, mine, seconds, on_event
        self._writer = CheckpointWriter()
        self._gone: set[int] = set()  # whose folders were deleted

    @property
    def going(self) -> list[int]:
        """The agents that continue."""
        ended = {*self._training.diverged, *self._training.failed, *self._gone}
        return [i for i in range(len(self._mine)) if i not in ended]

    def note(self, info: StepInfo) -> None:
        """Write down what a step means for single runs: who has diverged, and of all others episodes and metrics."""
        for i in info.diverged:
            with self._alone(i):
                update = snapshot.diverged_update(self._training, i)
                checkpoint.write(self._mine[i].path, update, run_files.DIVERGED_UPDATE)
                line = run_folder.save_diverged(self._mine[i], self._training.diverged[i])
                self._on_event(events.Diverged(self._mine[i], line))
        # Whoever fails by this step has made it, and is saved after it.
        writing = {*self.going, *info.faults} - self._gone
        for i, score, length in info.episodes:
            if i in writing:
                with self._alone(i):
                    row = {"step": info.step, "score": score, "length": length}
                    self._on_event(events.EpisodeEnded(self._mine[i], row))
        for i, row in enumerate(info.rows or []):
            if i in writing - self._gone:
                with self._alone(i):
                    self._on_event(events.Metrics(self._mine[i], row, self._seconds()))
        failed = [i for i in info.faults if i not in self._gone]
        if failed:
            self._save(failed)
            self._settle(self._writer.wait())
        for i in failed:
            self._on_event(failure(self._mine[i], f"{info.faults[i]}; {kept(self._mine[i])}"))

    def save(self) -> None:
        """Begin to write a checkpoint of every run that continues, when those before have been written."""
        self._save(self.going)

    def finish(self) -> None:
        """Write a checkpoint and the agent of every run that continues, and wait until all of it is there."""
        self.save()
        self._settle(self._writer.wait())
        for i in self.going:
            with self._alone(i):
                run_folder.save_agent(self._mine[i], self._training.fleet.agent(i), self._training.step)

    def close(self) -> None:
        """Let go of the thread that writes, when it has done its work."""
        self._writer.close()

    def _save(self, agents: Iterable[int]) -> None:
        seconds = self._seconds()
        whole = {i: snapshot.snapshot(self._training, i) for i in agents}
        saved = {self._mine[i].path: one._replace(about=one.about | {"seconds": seconds}) for i, one in whole.items()}
        self._settle(self._writer.write(saved))

    def _settle(self, faults: dict[Path, StorageFault]) -> None:
        """Take note of checkpoints that could not be written."""
        for i, run in enumerate(self._mine):
            if run.path in faults and i not in self._gone:
                with self._alone(i):
                    raise faults[run.path]

    @contextmanager
    def _alone(self, i: int) -> Iterator[None]:
        """Write files of one run: if its folder is gone it ends here, and whatever else is wrong ends the fleet."""
        run = self._mine[i]
        try:
            yield
        except StorageFault as fault:
            if not run.path.is_dir():
                self._gone.add(i)
                self._on_event(failure(run, deleted(run)))
                return
            self._writer.wait()  # a checkpoint that is being written counts as saved
            raise StorageFault(f"{fault}; {kept(run)}") from fault


def failure(run: Run, message: str) -> events.Failed:
    """Say what ended a run."""
    return events.Failed(f"{run.game}, seed {run.seed}: {message}")


def deleted(run: Run) -> str:
    """Say that a run's folder has been taken away."""
    return f"{run.path} was deleted while it was worked on: nothing of it is left, and --resume begins it again"


def kept(run: Run) -> str:
    """Say from which step a run can resume."""
    steps = checkpoint.steps_of(run.path)
    return f"saved after step {steps[0]:,}: --resume continues from there" if steps else "nothing of it was saved yet"
