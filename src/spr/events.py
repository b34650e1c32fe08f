"""Owns what a runner tells about its work: events, which a progress bar, files and loggers consume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from spr import runs
from spr.runs import Run
from spr.training import StepInfo


class Skipped(NamedTuple):
    """Runs that need no work, and why: they are finished, or have diverged."""

    names: str
    why: str


class FleetBegins(NamedTuple):
    """A fleet has been put together."""

    title: str  # method, game, seeds, device and precision
    notice: str  # what a person should know of its game; may be empty


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
    """The training loop starts or resumes."""

    total: int


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


class Diverged(NamedTuple):
    """A run was stopped because its loss or gradient was not finite."""

    run: Run
    message: str


class Failed(NamedTuple):
    """A fleet was ended by a fault that is not ours: what a person should know."""

    message: str


class Stopped(NamedTuple):
    """Somebody asked to stop, and everything is saved."""

    step: int


class Evaluated(NamedTuple):
    """Games of an evaluation are finished."""

    title: str
    games: int
    total: int


class Finished(NamedTuple):
    """The results are stored."""

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
    | Diverged
    | Failed
    | Stopped
    | Evaluated
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
    """Write metrics to the files of their run: a consumer."""
    if isinstance(event, Metrics):
        runs.log(event.run, event.row, event.seconds)
