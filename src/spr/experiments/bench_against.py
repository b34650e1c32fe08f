"""Owns comparing this version with an earlier one on a CPU: the same work by both, in turn, quiet and busy.

Each version runs in a process of its own with the same libraries (`bench_worker`). Rounds alternate between the two, so
that a machine that changes its speed does so for both; what counts are the ratios of neighbouring rounds.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from spr.common import threads
from spr.common.errors import UserError

_SOURCE = Path(__file__).parents[2]  # the folder that holds the package
_WORKER = Path(__file__).with_name("bench_worker.py")
_WARM_UPDATES = 220  # past what is computed plainly before it is traced
_MINATAR: dict[str, Any] = {
    "observation.channels": 4,
    "observation.stack": 1,
    "observation.height": 10,
    "observation.width": 10,
    "network.encoder": "minatar",
    "augment.shift": 1,
}


@dataclass(frozen=True)
class Case:
    """One thing to compare."""

    preset: str
    game: str = "pong"
    agents: int = 1
    precision: str = "fp32"  # of this version; the earlier one takes fp32
    what: str = "update"  # or act, or step
    times: int = 8  # in a round
    warm: int = _WARM_UPDATES
    busy: int = 0  # processes beside it that do nothing but work

    @property
    def changes(self) -> dict[str, Any]:
        """The fields in which its configuration differs from the preset's."""
        return _MINATAR if self.game == "own_env:planes" else {}

    @property
    def title(self) -> str:
        """Its name in the table."""
        on = "MinAtar" if self.changes else self.game
        beside = f", beside {self.busy} busy processes" if self.busy else ""
        return f"{self.preset} on {on}, {self.agents} agent{'s' if self.agents > 1 else ''}, {self.precision}{beside}"


class Comparison(NamedTuple):
    """What came out of a case: milliseconds of both, medians, and the ratios of neighbouring rounds."""

    case: Case
    before: float
    now: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        first, _, third = quantiles(self.ratios, n=4)
        return first, third


def cases(precisions: Sequence[str]) -> list[Case]:
    """Return what is compared, in each of these precisions."""
    found = [Case(preset, precision=precision) for preset in ("spr", "rainbow") for precision in precisions]
    found += [Case("bbf", precision=precision, times=2, warm=2) for precision in precisions]  # seconds an update
    found += [Case("spr", what=what) for what in ("act", "step")]
    found += [Case("spr", agents=4, times=2)]
    if find_spec("minatar") is not None:
        small = [(preset, precision) for preset in ("spr", "rainbow") for precision in precisions]
        found += [Case(preset, "own_env:planes", precision=precision, times=30) for preset, precision in small]
        found += [Case("spr", "own_env:planes", agents=8, times=5)]
    return [*found, Case("spr", busy=2, times=3)]


def compare(reference: str, wanted: Sequence[Case], rounds: int) -> Iterator[Comparison]:
    """Compare the working tree's version with that of a commit or tag; yields the cases as they are done."""
    with _source_of(reference) as before:
        for case in wanted:
            yield _compared(case, before, rounds)


def _compared(case: Case, before: Path, rounds: int) -> Comparison:
    with ExitStack() as opened:
        workers = [opened.enter_context(_worker(case, source)) for source in (before, _SOURCE)]
        for ask in workers:
            ask({"what": case.what, "times": case.warm})
        for _ in range(case.busy):
            opened.enter_context(_busy())
        times = []
        for _ in range(rounds):
            times.append([ask({"what": case.what, "times": case.times}) for ask in workers])
        then, now = zip(*times, strict=True)
        return Comparison(case, median(then), median(now), [b / a for a, b in times])


@contextmanager
def _source_of(reference: str) -> Iterator[Path]:
    """Yield a folder with the package as it was at a commit."""
    with tempfile.TemporaryDirectory(prefix="spr-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(_SOURCE.parent), "archive", reference, "--", "src"], capture_output=True, check=False
        )
        if archive.returncode:
            reason = " ".join(archive.stderr.decode(errors="replace").split())
            raise UserError(f"--against takes a commit or tag of this package's git repository: {reason}")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder) / "src"


@contextmanager
def _worker(case: Case, source: Path) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Yield what asks a process of a version to do something, and returns its answer."""
    paths = os.pathsep.join([str(source), str(_SOURCE.parent / "docs" / "examples")])
    process = subprocess.Popen(
        [sys.executable, str(_WORKER)],
        env=threads.as_the_user_set(os.environ) | {"PYTHONPATH": paths},  # an earlier version sets its own, or none
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(request: dict[str, Any]) -> Any:
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        line = answers.readline()
        if not line:
            raise UserError(f"'{case.title}' can't be measured: the process ended with code {process.wait()}")
        return json.loads(line)

    precision = case.precision if source == _SOURCE else "fp32"
    fleet = {"preset": case.preset, "game": case.game, "agents": case.agents, "changes": case.changes}
    try:
        ask(fleet | {"precision": precision})
        yield ask
    finally:
        process.kill()
        process.wait()
        requests.close()
        answers.close()


@contextmanager
def _busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.3)
    try:
        yield
    finally:
        process.kill()
        process.wait()
