"""Owns the events of a training job, which a progress bar, files and loggers consume."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spr.runs import metrics_files
from spr.runs.run_folder import Run
from spr.training.loop import StepInfo


class Skipped(NamedTuple):
    """Runs that need no work, and why: they are finished, or have diverged."""

    names: str
    why: str


class FleetBegins(NamedTuple):
    """A fleet has been put together."""

    title: str  # method, game, seeds, device and precision
    notice: str  # what the user should know of its game; may be empty


class CheckpointRefused(NamedTuple):
    """A checkpoint that can't be used."""

    path: Path
    reason: str


class Replaying(NamedTuple):
    """A fleet is being restored by playing its games again."""

    step: int
    total: int


class Restarted(NamedTuple):
    """The environments could not be restored, and began new games."""


class TrainingBegins(NamedTuple):
    """The training loop starts or resumes; the files of its runs hold what came before."""

    total: int
    runs: Sequence[Run]


class Compiling(NamedTuple):
    """The next step will take long: a GPU's code is compiled."""


class Stepped(NamedTuple):
    """One environment step of every agent."""

    info: StepInfo


class Metrics(NamedTuple):
    """A row of one run's metrics."""

    run: Run
    row: dict[str, Any]
    seconds: float  # of training so far


class EpisodeEnded(NamedTuple):
    """A run has finished an episode while training."""

    run: Run
    row: dict[str, Any]  # step, score (the raw return) and length


class Diverged(NamedTuple):
    """A run was stopped because its loss or gradient was not finite."""

    run: Run
    message: str


class Failed(NamedTuple):
    """Something outside, such as an environment or a disk, ended a run: a message to the user."""

    message: str


class Stopped(NamedTuple):
    """The user asked to stop, and everything is saved."""

    step: int


class Evaluated(NamedTuple):
    """Games of an evaluation are finished."""

    title: str
    games: int
    total: int


class Scored(NamedTuple):
    """The result of one run is stored."""

    run: Run
    result: dict[str, Any]


class Finished(NamedTuple):
    """All results are stored."""

    out: Path
    results: list[dict[str, Any]]


Event = (
    Skipped
    | FleetBegins
    | CheckpointRefused
    | Replaying
    | Restarted
    | TrainingBegins
    | Compiling
    | Stepped
    | Metrics
    | EpisodeEnded
    | Diverged
    | Failed
    | Stopped
    | Evaluated
    | Scored
    | Finished
)
Consumer = Callable[[Event], None]


def to_all(*consumers: Consumer) -> Consumer:
    """Return a consumer that hands every event to several, in their order."""

    def consume(event: Event) -> None:
        for consumer in consumers:
            consumer(event)

    return consume


def write_metrics(event: Event) -> None:
    """Write metrics and episodes to the files of their run: a consumer."""
    match event:
        case Metrics(run, row, seconds):
            metrics_files.log(run.path, row, seconds)
        case EpisodeEnded(run, row):
            metrics_files.log_episode(run.path, row)
