"""Owns Atari emulators in processes of their own: some each, which play their agent's games by themselves.

An emulator is made while Python's lock is held, and Python's own work is a good part of each step. So one process can't
feed as many emulators as a GPU's machine has cores. Small processes, in which nothing heavy is imported, play the games
(see `episodes`), and this one only selects actions. Arrays lie in shared memory; one message each way begins and ends a
step. They hold the console's screens, or frames where these can't be made of screens (see `screen_resize`).
Shapes: H halves of R rows of E emulators, each row in one process; frames are [C, H, W], screens [1, 250, 160].
"""

import json
import mmap
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from spr.common.errors import EnvironmentFault, UserError
from spr.envs.ale_emulator import TALLEST, Emulator, noops, shows
from spr.envs.atari import WIDTH, Atari
from spr.envs.base import ObservationConfig
from spr.evaluation.episodes import Arrays, EpisodeBatch, EpisodeResult, EpisodeSpec, Rules
from spr.evaluation.shared_prefix import SharedPrefixEpisodes

_STEP = b""  # as an order; as an answer: nothing has ended
# NumPy's library for matrices would start a thread for every core, of which every one spins for a while.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_NICE = 5  # emulators stand back for the process that feeds them all


class SubprocessBackend:
    """A process for each row that plays, kept for the next one when its games are over."""

    idle_rest = True

    def __init__(self, shape: tuple[int, int, int], obs: ObservationConfig) -> None:
        """Take memory for so many halves, rows and emulators; no process is started yet."""
        self._memory = os.memfd_create("emulators")
        self.arrays = _shared(self._memory, shape, obs)
        self._plain = shows(obs)
        self._arguments = [str(self._memory), json.dumps(shape), json.dumps(asdict(obs))]
        self._idle: list[_Process] = []
        self._started: list[_Process] = []
        self._selector = selectors.DefaultSelector()

    def group_identical_starts(self, starts: Sequence[int]) -> list[list[int]]:
        """Games with as many no-ops begin alike, where emulators can go back."""
        if not self._plain:
            return [[place] for place in range(len(starts))]
        groups: dict[int, list[int]] = {}
        for place, start in enumerate(starts):
            groups.setdefault(noops(start), []).append(place)
        return list(groups.values())

    def open(
        self, where: tuple[int, int], game: str, rules: Rules, groups: Sequence[Sequence[EpisodeSpec]]
    ) -> "RemoteEnvGroup":
        """Begin to make a row's emulators and to start their games."""
        if self._idle:
            process = self._idle.pop()
        else:
            process = _Process(self._memory, self._arguments)
            self._started.append(process)
            self._selector.register(process.connection, selectors.EVENT_READ, process)
        return RemoteEnvGroup(process, self._idle, {"where": where, "game": game, "rules": rules, "groups": groups})

    def look(self, wait: bool) -> None:
        """Note which processes have answered; wait for one of them, if nothing else is to be done."""
        for key, _ in self._selector.select(None if wait else 0):
            key.data.has_answered = True

    def close(self) -> None:
        """End all of them."""
        self._selector.close()
        for process in self._started:
            process.end()
        os.close(self._memory)


class _Process:
    """One process, as this one sees it."""

    def __init__(self, memory: int, arguments: list[str]) -> None:
        here, there = socket.socketpair()
        with there:
            # A session of its own: Ctrl-C is for this process, which ends the others.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "spr.evaluation.subprocess_backend", str(there.fileno()), *arguments],
                pass_fds=(there.fileno(), memory),
                start_new_session=True,
                env=os.environ | _ALONE,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.connection = Connection(here.detach())
        self.has_answered = False

    def send_order(self, order: bytes) -> None:
        """Give an order; its end is not known here yet."""
        try:
            self.connection.send_bytes(order)
        except ConnectionError:
            self._mourn()

    def answer(self) -> bytes:
        """Wait for the answer to the last order."""
        self.has_answered = False
        try:
            return self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            self._mourn()

    def _mourn(self) -> NoReturn:
        code = self._popen.wait()
        raise EnvironmentFault(0, f"an emulator's process ended while it played, with code {code}") from None

    def end(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self._popen.terminate()
        self._popen.wait()


class RemoteEnvGroup:
    """Emulators in their process: busy from every order until `take` has returned its answer."""

    game_num_actions: int  # of its game, known once it has started
    num_actions: int
    height: int | None

    def __init__(self, process: _Process, idle: list[_Process], start: dict[str, Any]) -> None:
        """Give the order to start."""
        self._process, self._idle_processes = process, idle
        self._count = len(start["groups"])
        self.idle: list[int] = []
        process.send_order(json.dumps(start).encode())

    @property
    def playing(self) -> int:
        """How many places have a game."""
        return self._count - len(self.idle)

    @property
    def over(self) -> bool:
        """Whether no game is left at all."""
        return self.playing == 0

    @property
    def done(self) -> bool:
        """Whether it has answered."""
        return self._process.has_answered

    def go_on(self, groups: Mapping[int, Sequence[EpisodeSpec]]) -> None:
        """Begin to start other games."""
        self._process.send_order(json.dumps({"next": groups}).encode())

    def send(self) -> None:
        """Begin a step, with the actions that lie in its places."""
        self._process.send_order(_STEP)

    def take(self) -> list[EpisodeResult]:
        """Wait for what was begun last, and return the games that ended by it; what went wrong is raised."""
        message = self._process.answer()
        if not message:
            return []
        answer = json.loads(message)
        if "refused" in answer:
            raise UserError(answer["refused"])
        if "failed" in answer:
            raise EnvironmentFault(0, f"an emulator failed: {answer['failed']}")
        if "game_num_actions" in answer:
            self.game_num_actions, self.num_actions = answer["game_num_actions"], answer["num_actions"]
            self.height = answer["height"]
        self.idle = answer["idle"]
        return [EpisodeResult(*ended) for ended in answer["ended"]]

    def close(self) -> None:
        """Leave the process to others."""
        self._idle_processes.append(self._process)


def _shared(memory: int, shape: tuple[int, int, int], obs: ObservationConfig) -> Arrays:
    """Return the arrays that all processes see."""
    shown = (1, TALLEST, WIDTH) if shows(obs) else obs.frame
    kinds = [("frame", np.dtype(np.uint8), shown), ("is_first", np.dtype(np.bool_), ())]
    kinds.append(("action", np.dtype(np.int64), ()))
    layout = np.dtype([(name, dtype, (*shape, *item)) for name, dtype, item in kinds], align=True)
    os.ftruncate(memory, layout.itemsize)
    whole: NDArray[Any] = np.ndarray((), layout, mmap.mmap(memory, layout.itemsize))
    return Arrays(whole["frame"], whole["is_first"], whole["action"])


class _Server:
    """What the other process does: every emulator plays its own games, and rests when it has none left."""

    def __init__(self, arrays: Arrays, obs: ObservationConfig) -> None:
        self._arrays, self._obs = arrays, obs  # of all rows, until an order says which row is its own
        self._mine = arrays
        self._game = ""
        self._emulators: list[Emulator | Atari] = []  # of that game
        self._games: list[EpisodeBatch | SharedPrefixEpisodes] = []  # of each place

    def answer(self, order: bytes) -> bytes:
        """Carry an order out; an error becomes the answer."""
        try:
            answer = self._do(order)
        except UserError as problem:
            answer = {"refused": str(problem)}
        except Exception as problem:  # noqa: BLE001 - raised again in the process that gave the order
            answer = {"failed": f"{type(problem).__name__}: {problem}"}
        return json.dumps(answer).encode() if answer else b""

    def _do(self, order: bytes) -> dict[str, Any]:
        if order == _STEP:
            ended = self._step()
            return {"ended": ended, "idle": self._idle} if ended else {}
        what = json.loads(order)
        if "game" in what:
            self._open(what["game"], tuple(what["where"]), Rules(*what["rules"]), list(map(_group, what["groups"])))
        else:
            for place, group in what["next"].items():
                self._games[int(place)].go_on({0: _group(group)})
                self._show(int(place))
        first = self._emulators[0]
        facts = {
            "game_num_actions": (first.game_num_actions or [first.num_actions])[0],
            "num_actions": first.num_actions,
        }
        height = first.height if isinstance(first, Emulator) else None
        return {**facts, "height": height, "ended": [], "idle": self._idle}

    @property
    def _idle(self) -> list[int]:
        return [place for place, games in enumerate(self._games) if games.idle]

    def _step(self) -> list[EpisodeResult]:
        playing = [place for place, games in enumerate(self._games) if not games.idle]
        for place in playing:  # first all of them: `Atari` hands its step to a thread
            self._games[place].send(self._mine.action[place : place + 1])
        ended: list[EpisodeResult] = []
        for place in playing:
            ended += self._games[place].recv()
            self._show(place)
        return ended

    def _show(self, place: int) -> None:
        games = self._games[place]
        (frame,) = games.frame  # a screen may have fewer rows than there is room for
        self._mine.frame[place, :, : frame.shape[1]], self._mine.is_first[place] = frame, games.is_first[0]

    def _open(self, game: str, where: tuple[int, int], rules: Rules, groups: list[list[EpisodeSpec]]) -> None:
        if self._game != game:
            self._emulators.clear()
            self._game = game
        while len(self._emulators) < len(groups):
            self._emulators.append(Emulator(game) if shows(self._obs) else Atari(game, 1, 1, self._obs))
        self._mine = Arrays(*(array[where][: len(groups)] for array in self._arrays))
        self._games = [
            SharedPrefixEpisodes(emulator, rules, [group], self._obs.stack) if isinstance(emulator, Emulator)
            else EpisodeBatch(emulator, rules, [group])
            for emulator, group in zip(self._emulators, groups, strict=False)
        ]  # fmt: skip
        for place in range(len(groups)):
            self._show(place)


def _group(games: Sequence[Any]) -> list[EpisodeSpec]:
    return [EpisodeSpec(*game) for game in games]


def _serve(connection: int, memory: int, shape: tuple[int, int, int], obs: ObservationConfig) -> None:
    """Follow orders until the other process has gone."""
    os.nice(_NICE)
    server = _Server(_shared(memory, shape, obs), obs)
    with Connection(connection) as orders:
        while True:
            try:
                order = orders.recv_bytes()
            except (EOFError, ConnectionError):
                return
            orders.send_bytes(server.answer(order))


if __name__ == "__main__":
    _serve(
        int(sys.argv[1]), int(sys.argv[2]), tuple(json.loads(sys.argv[3])), ObservationConfig(**json.loads(sys.argv[4]))
    )
