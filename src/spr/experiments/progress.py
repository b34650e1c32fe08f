"""Owns what the user sees while long work runs: a live bar in a terminal, plain lines in a pipe; and a clean Ctrl-C."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from spr.agent.auxiliary_losses import known
from spr.common.errors import visible
from spr.experiments import events
from spr.experiments.events import Event
from spr.training.loop import StepInfo

_PLAIN_EVERY = 15.0  # seconds between lines where no bar can be drawn
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal or the connection is gone
_SAME_SIGNAL = 1.0  # seconds within which two signals count as one
_WINDOW = 10.0  # seconds over which the rate is taken
_REFRESH = 0.1  # seconds between two looks at the clock that matter: a loop may call a thousand times a second


class Terminal(Console):
    """A console that shows names and paths as they are: no markup, and nothing in them is obeyed by a terminal.

    It falls silent when nobody can read it any more: a closed terminal or pipe, a log on a full disk. Work that takes
    hours does not end for that; what it has to say for good is in its files and its exit code.
    """

    def __init__(self, stderr: bool = False, file: IO[str] | None = None) -> None:
        """Write to standard output, to standard error, or to a file."""
        super().__init__(stderr=stderr, file=file, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like a console, and write out what is in texts but the ends of lines; its own controls stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_unobeyed(segment.text))

    def render_str(self, text: str, **more: Any) -> Text:
        """Make a text of a string, with everything that is written out: so cells of tables know their width."""
        return super().render_str(_unobeyed(text), **more)

    def on_broken_pipe(self) -> None:
        """Fall silent."""
        self._fall_silent()

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except BrokenPipeError:
            raise
        except OSError:
            self._fall_silent()

    def _fall_silent(self) -> None:
        self.quiet = True
        del self._buffer[:]
        # What is left in the stream would be written once more when the process ends.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


def _unobeyed(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))


class Bar:
    """Progress of one piece of work, with its recent rate, the time left and a free text of recent figures."""

    def __init__(self, console: Console, title: str, total: int, unit: str) -> None:
        """Start at nothing done."""
        self._console, self._title, self._total, self._unit = console, title, total, unit
        self._last_look = self._last_line = time.monotonic()
        self._live = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}", markup=False),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            get_time=time.monotonic,
            # Random steps run a hundred times faster than learning ones: the rate is of the last seconds only.
            speed_estimate_period=_WINDOW,
        )
        self._task = self._live.add_task(title, total=total, rate="", left="-", figures="")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, done: int, figures: str = "") -> None:
        """Say how much is done."""
        now = time.monotonic()
        if done < self._total and now - self._last_look < _REFRESH:
            return
        self._last_look = now
        self._live.update(self._task, completed=done, figures=figures)
        (task,) = self._live.tasks
        rate = f"{task.speed:,.1f} {self._unit}/s" if task.speed else ""
        left = "-" if task.time_remaining is None else clock(task.time_remaining)
        self._live.update(self._task, rate=rate, left=left)
        if not self._console.is_terminal and (now - self._last_line > _PLAIN_EVERY or done == self._total):
            self._last_line = now
            parts = [f"{done:,}/{self._total:,}", *([rate] if rate else []), f"{left} left  {figures}"]
            self._console.print(f"{self._title}: {', '.join(parts)}", soft_wrap=True, highlight=False)

    def pause(self, why: str) -> None:
        """Show why progress has stopped until the next `show`; a pause longer than the rate's window does not count."""
        self._live.update(self._task, rate="", left="-", figures=why)
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {why}", soft_wrap=True, highlight=False)


class Display:
    """Shows a runner's events on a console; a context, so that no bar is left behind."""

    def __init__(self, console: Console) -> None:
        """Nothing is shown yet."""
        self._console = console
        self._bar: Bar | None = None
        self._title = ""
        self._rows: list[dict[str, Any]] = []
        self._problems: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, event: Event) -> None:  # noqa: C901, PLR0912 - one line for each kind of event
        """Show one event."""
        match event:
            case events.Skipped(names, why):
                self._line(f"{why}, skipped: {names}")
            case events.FleetBegins(title, notice):
                self._line(title)
                if notice:
                    self._line(notice)
            case events.CheckpointRefused(path, reason):
                self._line(visible(f"{path} can't be used: {reason}"))
            case events.Replaying(step, total):
                self._show("replaying the log", total, "steps", step)
            case events.Restarted():
                self._line("this environment can't be restored: a new game begins, and the result will say so")
            case events.TrainingBegins(total):
                self._open("training", total, "steps")
            case events.Compiling():
                if self._bar is not None:
                    self._bar.pause("compiling; about a minute the first time, from the cache in seconds")
            case events.Stepped(info):
                self._rows = info.rows or self._rows
                if self._bar is not None:
                    self._bar.show(info.step, _figures(info, self._rows))
            case events.Diverged(_, message) | events.Failed(message):  # the others go on, and so does the bar
                self._problems.append(message)
                self._console.print(visible(message), highlight=False, soft_wrap=True)
            case events.Stopped(step):
                self._line(f"stopped after {step:,} steps and saved; the same command with --resume continues")
            case events.Evaluated(title, games, total):
                self._show(title, total, "games", games)
            case events.Finished(out, results):
                self._close()
                self._console.print(_summary(results))
                self._line(f"stored under {out}")
                for problem in self._problems:  # hours may have passed since
                    self._line(f"no result: {problem}")
            case events.Metrics() | events.EpisodeEnded() | events.Scored():
                pass

    def _line(self, text: str) -> None:
        self._close()
        self._console.print(text, highlight=False, soft_wrap=True)

    def _show(self, title: str, total: int, unit: str, done: int) -> None:
        if self._bar is None or self._title != title:
            self._open(title, total, unit)
        assert self._bar is not None
        self._bar.show(done)

    def _open(self, title: str, total: int, unit: str) -> None:
        self._close()
        self._title, self._bar = title, Bar(self._console, title, total, unit)
        self._bar.__enter__()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None


def _figures(info: StepInfo, rows: list[dict[str, Any]]) -> str:
    """Return the recent score (mean over the fleet) and losses of the last row."""
    scores = [score for score in info.scores if score is not None]
    parts = [f"score {sum(scores) / len(scores):,.1f}"] if scores else []
    for name in ("rl", *known()):
        values = [row[name] for row in rows if name in row]
        parts += [f"{name} {sum(values) / len(values):.2f}"] if values else []
    return "  ".join(parts)


def _summary(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    # Each game has one or the other: a published score of humans, or one of a random agent that was measured here.
    published = [result["human_normalised"] is not None for result in results]
    references = (["human-normalised"] if any(published) else []) + ([] if all(published) else ["random agent"])
    for column in ("game", "seed", "mean score", "games", *references, "training", "evaluation"):
        table.add_column(column, justify="right")
    for result in results:
        human, chance = result["human_normalised"], result.get("random_score")
        shown = {
            "human-normalised": "" if human is None else f"{human:.3f}",
            "random agent": "" if chance is None else f"{chance:,.2f}",
        }
        table.add_row(
            result["game"],
            str(result["seed"]),
            f"{result['score']:,.2f}",
            _games(result),
            *(shown[reference] for reference in references),
            f"{result['train_seconds']:,.0f} s",
            f"{result['eval_seconds']:,.0f} s",
        )
    return table


def _games(result: Mapping[str, Any]) -> str:
    """Return how many games a result rests on, and how many of them did not come to their end."""
    cut = result.get("episodes_cut", 0)
    return f"{len(result['episodes'])}" + (f" ({cut} cut off)" if cut else "")


class StopRequest:
    """Turns the first Ctrl-C (SIGTERM, SIGHUP) into a flag that the loop polls between steps; a later one interrupts.

    `timeout` and batch systems signal a process and then its whole group, so the same signal may arrive twice at once.
    SIGHUP stays ignored where it is, as under `nohup`.
    """

    def __init__(self) -> None:
        """No signal yet."""
        self.asked = False
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in _STOPPING}
        ignored = [signal.SIGHUP] if before[signal.SIGHUP] is signal.SIG_IGN else []
        self._before = {number: handler for number, handler in before.items() if number not in ignored}
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> bool:
        """Say whether the user has asked to stop; called between steps.

        The handlers are put in place again each time, because a compiler that runs inside the process may install its
        own below Python's notice: LLVM's, which Triton brings, end the process without a word.
        """
        for number in self._before:
            signal.signal(number, self._ask)
        return self.asked

    def _ask(self, *_: object) -> None:
        if self.asked and time.monotonic() - self._when > _SAME_SIGNAL:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._when = True, time.monotonic()


def clock(seconds: float) -> str:
    """Return a length of time as hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
