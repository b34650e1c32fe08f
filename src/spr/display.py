"""Owns what a person sees while long work runs: a live bar in a terminal, plain lines in a pipe; and a clean Ctrl-C."""

import signal
import time
from collections import deque
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_PLAIN_EVERY = 15.0  # seconds between lines where no bar can be drawn
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_SAME_WISH = 1.0  # seconds within which two signals are one wish
_WINDOW = 10.0  # seconds over which the rate is taken
_REFRESH = 0.1  # seconds between two looks at the clock that matter: a loop may call a thousand times a second


class Bar:
    """Progress of one piece of work, with its rate, the time left and a free text of recent figures."""

    def __init__(self, console: Console, title: str, total: int, unit: str) -> None:
        """Start at nothing done."""
        self._console, self._title, self._total, self._unit = console, title, total, unit
        self._said = time.monotonic()
        # (time, done) of the last moments: random steps run a hundred times faster than learning ones, so a rate over
        # all of a run would promise an end that never comes.
        self._marks: deque[tuple[float, int]] = deque([(self._said, 0)])
        self._live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(title, total=total, rate="", left="", figures="")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, done: int, figures: str = "") -> None:
        """Say how much is done."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((now, done))
            self._said = now
        if done < self._total and now - self._marks[-1][0] < _REFRESH:
            return
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        since, before = self._marks[0]
        rate = (done - before) / max(now - since, 1e-9)
        left = clock((self._total - done) / rate) if rate > 0 else "-"
        speed = f"{rate:,.1f} {self._unit}/s"
        self._live.update(self._task, completed=done, rate=speed, left=left, figures=figures)
        if not self._console.is_terminal and (now - self._said > _PLAIN_EVERY or done == self._total):
            self._said = now
            self._console.print(
                f"{self._title}: {done:,}/{self._total:,}, {speed}, {left} left  {figures}",
                soft_wrap=True,
                highlight=False,
            )

    def pause(self, why: str) -> None:
        """Say why it stands still until the next call of `show`; that time tells nothing about the pace."""
        self._marks.clear()
        self._live.update(self._task, rate="", left="-", figures=why)
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {why}", soft_wrap=True, highlight=False)


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that the loop can grant between two steps; a later one kills.

    `timeout` and batch systems signal a process and then its whole group, so the same wish may arrive twice at once.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.asked = False
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _STOPPING}
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> bool:
        """Say whether somebody has asked; called between steps.

        The handlers are put in place again each time, because a compiler that runs inside the process may install its
        own below Python's notice: LLVM's, which Triton brings, end the process without a word.
        """
        for number in _STOPPING:
            signal.signal(number, self._ask)
        return self.asked

    def _ask(self, *_: object) -> None:
        if self.asked and time.monotonic() - self._when > _SAME_WISH:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._when = True, time.monotonic()


def clock(seconds: float) -> str:
    """Return a length of time as hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
