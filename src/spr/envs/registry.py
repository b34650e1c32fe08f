"""Owns the games by name: which there are, and how vectors of environments are made of one or several of them."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from spr.common import plugins
from spr.common.errors import UserError, did_you_mean
from spr.envs.atari import Atari, ShownAtari
from spr.envs.atari100k import game_names
from spr.envs.base import USUAL_OBSERVATION, Envs, Frames, ObservationConfig, Shown, Step
from spr.envs.catch import Catch
from spr.envs.gymnasium_adapter import Argument, Gymnasium, Maker
from spr.envs.roms import rom_games

_own: dict[str, Maker] = {}  # environments that were registered, by name


def register(name: str) -> Callable[[Maker], Maker]:
    """Register a function that returns a gymnasium.Env as a game of this name."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"a game's name is made of letters, digits and . _ -, not '{name}'")
    if name in _own or name in known_games() or name in gymnasium.registry:
        raise UserError(f"a game named '{name}' is there already: choose another name")

    def remember(maker: Maker) -> Maker:
        _own[name] = maker
        return maker

    return remember


def provide(name: str, maker: Maker) -> None:
    """Make environments available under a name, instead of whatever had it before but for built-in games."""
    if name in known_games() or ":" in name:
        raise UserError(f"a custom environment can't be called '{name}': choose another name")
    _own[name] = maker


@contextmanager
def provided(name: str, maker: Maker) -> Iterator[None]:
    """Make environments available under a name; whatever had it before has it again if what follows fails."""
    before = _own.get(name)
    provide(name, maker)
    try:
        yield
    except BaseException:
        del _own[name]
        _own.update({} if before is None else {name: before})
        raise


def known_games() -> list[str]:
    """Return every game that needs nothing but this package: catch, the 26, and ale-py's other ROMs."""
    return ["catch", *game_names(), *(game for game in rom_games() if game not in game_names())]


def own_games() -> list[str]:
    """Return the games that plug-ins have registered."""
    return list(_own)


def named_games(names: Sequence[str]) -> list[str]:
    """Return the games that the user has named, 'all' the 26 of Atari 100k; modules named with them are imported."""
    for module in plugins.modules_of(names):
        plugins.import_named(module)
    games = [game for name in names for game in (game_names() if name == "all" else [name])]
    twice = next((game for game in games if games.count(game) > 1), None)
    if twice is not None:
        raise UserError(f"the game {twice} is given twice")
    return games


def make(
    game: str,
    count: int,
    threads: int = 0,
    obs: ObservationConfig = USUAL_OBSERVATION,
    arguments: Mapping[str, Argument] | None = None,
) -> Envs:
    """Make environments of a game, whose frames are what `obs` asks for.

    That is 'catch'; an Atari game such as 'ms_pacman'; a game that was registered; any Gymnasium id with images; or a
    function that makes one, 'module:function'. A module is imported only if the user has named it (see `plugins`).
    Atari steps its environments on that many threads; 0 lets it choose.
    """
    if game in known_games():
        if arguments:
            raise UserError(f"'{game}' takes no arguments: --env-arg is for environments of Gymnasium's kind")
        return Catch(count, obs) if game == "catch" else Atari(game, count, threads, obs)
    module, colon, rest = game.partition(":")
    maker = _own.get(game)
    if colon and not plugins.is_named(module):
        raise UserError(f"'{game}' is made by the module {module}, which runs only if you name it: --plugin {module}")
    if colon and not re.search(r"-v\d+$", rest):
        maker = getattr(sys.modules[module], rest, None)
        if not callable(maker):
            raise UserError(f"the module {module} has no function '{rest}' that makes an environment")
    if maker is not None or game != game.lower() or colon or "/" in game:  # ids are in capitals: Pong-v5
        return Gymnasium(game, count, obs, maker, arguments)
    hint = (
        did_you_mean(game, [*known_games(), *_own])
        or "; such as pong, breakout or ms_pacman ('spr games' lists them), and any Gymnasium id works too; what a "
        "plug-in registers needs --plugin MODULE"
    )
    raise UserError(f"unknown game '{game}'{hint}")


def make_shown(
    game: str, obs: ObservationConfig = USUAL_OBSERVATION, arguments: Mapping[str, Argument] | None = None
) -> Shown:
    """Make one environment of a game that is played as `make` has it, and that also renders itself."""
    if family(game) == "atari":
        return ShownAtari(game, obs)
    envs = make(game, 1, obs=obs, arguments=arguments)
    assert isinstance(envs, Gymnasium | Catch)
    if isinstance(envs, Gymnasium):
        envs.draw()
    return envs


def make_each(
    games: Sequence[str], obs: ObservationConfig = USUAL_OBSERVATION, arguments: Mapping[str, Argument] | None = None
) -> Envs:
    """Make one environment for each of these games of one family; those of one game are a vector of their own."""
    places: dict[str, list[int]] = {}
    for i, game in enumerate(games):
        places.setdefault(game, []).append(i)
    made: list[tuple[Envs, Sequence[int]]] = []
    try:
        for game, mine in places.items():
            made.append((make(game, len(mine), obs=obs, arguments=arguments), mine))
    except UserError:
        for envs, _ in made:
            envs.close()
        raise
    return MultiGameEnvs(made) if len(made) > 1 else made[0][0]


def family(game: str) -> str:
    """Name the games that may share a fleet with this one: all of Atari may; any other game only its own agents."""
    return "atari" if game != "catch" and game in known_games() else game


class MultiGameEnvs:
    """Environments of several games as one vector: every game's own are stepped at the same time."""

    def __init__(self, parts: Sequence[tuple[Envs, Sequence[int]]]) -> None:
        """Take environments of one family, and which places of the whole vector are theirs."""
        self._parts = [(envs, np.asarray(places)) for envs, places in parts]
        self._count = sum(len(places) for _, places in parts)
        own = np.zeros(self._count, np.int64)
        rules: dict[int, dict[str, Any]] = {}
        for envs, places in parts:
            own[list(places)] = envs.game_num_actions or envs.num_actions
            rules.update(zip(places, envs.protocols, strict=True))
        self.protocols = [rules[place] for place in range(self._count)]
        self.game_num_actions: list[int] | None = own.tolist()
        (self.num_actions,) = {envs.num_actions for envs, _ in self._parts}
        self.deterministic = all(envs.deterministic for envs, _ in self._parts)
        self.notice = "\n".join(envs.notice for envs, _ in self._parts if envs.notice)

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game from its own seed."""
        return self._gather([envs.reset([seeds[i] for i in places]) for envs, places in self._parts])

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments."""
        frames: dict[int, Frames] = {}
        for envs, theirs in self._parts:
            mine = [(n, int(np.flatnonzero(theirs == place)[0])) for n, place in enumerate(places) if place in theirs]
            if mine:
                new = envs.restart([place for _, place in mine], [seeds[n] for n, _ in mine])
                for (n, _), frame in zip(mine, new, strict=True):
                    frames[n] = frame
        return np.stack([frames[n] for n in range(len(places))])

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin one step of all."""
        for envs, places in self._parts:
            envs.send(action[places])

    def recv(self) -> Step:
        """Wait for all."""
        outs = [envs.recv() for envs, _ in self._parts]
        return Step(*(self._gather(list(arrays)) for arrays in zip(*outs, strict=True)))

    def close(self) -> None:
        """Release what the environments hold."""
        for envs, _ in self._parts:
            envs.close()

    def _gather(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        whole = np.empty((self._count, *arrays[0].shape[1:]), arrays[0].dtype)
        for array, (_, places) in zip(arrays, self._parts, strict=True):
            whole[places] = array
        return whole
