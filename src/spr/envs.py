"""Owns the games: vectors of environments that all speak one language, with the protocol each is played by.

An environment gives its newest frame (uint8, of the size and channels that the configuration's `observation` asks for),
the raw reward, and how things ended: `terminal` ends an episode for learning (a lost life or the game's end),
`truncated` is the time limit, `game_over` says that a new game has begun, whose first frame is the one given. N
environments step together. Frames are [C, H, W]: channels, height, width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from ale_py import ALEVectorInterface
from numpy.typing import NDArray

from spr.config import ObservationConfig
from spr.errors import UserError, did_you_mean, plural
from spr.games import game_names, unlike_published
from spr.roms import rom_checksum, rom_games, rom_path

Frames = NDArray[np.uint8]  # [N, C, H, W]
Flags = NDArray[np.bool_]  # [N]

_GRAY = ObservationConfig()  # what the paper's agents see


class Step(NamedTuple):
    """What one step of N environments gives."""

    frame: Frames  # [N, C, H, W] of the next observation; of the next game, where one ended
    reward: NDArray[np.float32]  # [N] raw
    terminal: Flags  # [N] a life was lost or the game ended
    truncated: Flags  # [N] the time limit was reached
    game_over: Flags  # [N] the game ended by either


class Envs(Protocol):
    """N environments, stepped together."""

    num_actions: int  # that an agent has room for
    own_actions: list[int] | None  # of each environment's game, which may have fewer; None: exactly those
    protocols: list[dict[str, Any]]  # of each environment: the rules of its game
    deterministic: bool  # whether the same seed and actions give the same game again
    notice: str  # what a person should know before playing it; empty where there is nothing

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start a game in each environment from its own seed."""

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments, each from its own seed; the others stay as they are. [places, ...]."""

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin one step with an action for each environment; the caller may do other work meanwhile."""

    def recv(self) -> Step:
        """Wait for the step that was begun; ended games restart at once."""

    def close(self) -> None:
        """Release what the environments hold."""


def known_games() -> list[str]:
    """Return every game that needs nothing but this package: catch, the 26, and ale-py's other ROMs."""
    return ["catch", *game_names(), *(game for game in rom_games() if game not in game_names())]


def make(game: str, count: int, threads: int = 0, obs: ObservationConfig = _GRAY) -> Envs:
    """Make environments of a game: 'catch', an Atari game such as 'ms_pacman', or any Gymnasium id with images.

    Frames are what `obs` asks for. Atari steps its environments on that many threads; 0 lets it choose.
    """
    if game == "catch":
        return Catch(count, obs)
    if game in known_games():
        return Atari(game, count, threads, obs)
    if game != game.lower() or ":" in game or "/" in game:  # Gymnasium's ids are in capitals: Pong-v5, module:Id-v0
        return Gymnasium(game, count, obs)
    hint = (
        did_you_mean(game, known_games())
        or "; such as pong, breakout or ms_pacman (README), and any Gymnasium id works too"
    )
    raise UserError(f"unknown game '{game}'{hint}")


def make_each(games: Sequence[str], obs: ObservationConfig = _GRAY) -> Envs:
    """Make one environment for each of these games of one family; those of one game are a vector of their own."""
    places: dict[str, list[int]] = {}
    for i, game in enumerate(games):
        places.setdefault(game, []).append(i)
    made: list[tuple[Envs, Sequence[int]]] = []
    try:
        for game, mine in places.items():
            made.append((make(game, len(mine), obs=obs), mine))
    except UserError:
        for envs, _ in made:
            envs.close()
        raise
    return Together(made) if len(made) > 1 else made[0][0]


def family(game: str) -> str:
    """Name the games that may share a fleet with this one: all of Atari may; any other game only its own agents."""
    return "atari" if game != "catch" and game in known_games() else game


class Together:
    """Environments of several games as one vector: every game's own are stepped at the same time."""

    def __init__(self, parts: Sequence[tuple[Envs, Sequence[int]]]) -> None:
        """Take environments of one family, and which places of the whole vector are theirs."""
        self._parts = [(envs, np.asarray(places)) for envs, places in parts]
        self._count = sum(len(places) for _, places in parts)
        own = np.zeros(self._count, np.int64)
        rules: dict[int, dict[str, Any]] = {}
        for envs, places in parts:
            own[list(places)] = envs.own_actions or envs.num_actions
            rules.update(zip(places, envs.protocols, strict=True))
        self.protocols = [rules[place] for place in range(self._count)]
        self.own_actions: list[int] | None = own.tolist()
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


def seeds_for(seed: int, purpose: str, count: int) -> list[int]:
    """Derive independent seeds of environments from an agent's seed: one list for each purpose."""
    sequence = np.random.SeedSequence([seed, *purpose.encode()])
    return [int(word) >> 1 for word in sequence.generate_state(count)]  # emulators want 31 bits


class Atari:
    """The Atari 100k protocol, by ale-py's C++ vector environment."""

    def __init__(self, game: str, count: int, threads: int = 0, obs: ObservationConfig = _GRAY) -> None:
        """Load the ROM `count` times; a missing one is refused by name."""
        rom = rom_path(game)
        settings: dict[str, Any] = {
            "max_num_frames_per_episode": 108_000,
            "repeat_action_probability": 0.0,
            "full_action_space": False,
            "img_height": obs.height,
            "img_width": obs.width,
            "grayscale": obs.channels == 1,
            "frameskip": 4,
            "maxpool": True,
            "noop_max": 30,
            "use_fire_reset": False,
            "reward_clipping": False,
            # A lost life is reported without resetting the game; `episodic_life` would reset it.
            "episodic_life": False,
            "life_loss_info": True,
        }
        # Not by `AtariVectorEnv`, which is the same behind a check that knows ale-py's own ROMs only.
        names = {"frameskip": "frame_skip", "max_num_frames_per_episode": "max_episode_steps"}
        options = {names.get(name, name): value for name, value in settings.items()}
        self._ale: Any = ALEVectorInterface(
            rom, count, num_threads=threads, stack_num=1, autoreset_mode="SameStep", **options
        )
        # Room for all of the console's actions, whichever game is played: so an agent draws the same numbers in any
        # company, and one compiled update serves every game.
        self.num_actions = 18
        self._game, self._actions = game, len(self._ale.get_action_set())
        self.own_actions: list[int] | None = [self._actions] * count
        self.deterministic = True
        checksum = rom_checksum(rom)
        self.notice = ""
        if unlike := unlike_published(game, checksum):
            self.notice = (
                f"{game}: ale-py's ROM differs from the one that published scores were made with in its {unlike}, so "
                "scores can't be compared (docs/roms.md)"
            )
        rules = {"name": "atari", "version": 1, "interpolation": "area", **settings, "rom": checksum}
        self.protocols = [rules] * count
        self._strength = np.ones(count, np.float32)  # of paddles; an action is pressed or not
        self._before = np.zeros(count, np.int32)  # frames of the games that are over

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game, after 0 to 29 no-ops."""
        frames, info = self._ale.reset(np.arange(len(seeds)), np.asarray(seeds))
        self._before = _frames_before(info)
        return _channels_first(frames)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments: exactly those that `reset` starts from these seeds."""
        frames, info = self._ale.reset(np.asarray(places), np.asarray(seeds))
        self._before = _frames_before(info)
        return _channels_first(frames)[list(places)]

    def send(self, action: NDArray[np.int64]) -> None:
        """Let the emulator's threads repeat the actions for four frames."""
        if action.max() >= self._actions:  # the emulator would never answer
            raise ValueError(f"{self._game} has {self._actions} actions, and {action.max()} was chosen")
        self._ale.send(action, self._strength)

    def recv(self) -> Step:
        """Wait for all of them."""
        frames, reward, terminal, truncated, info = self._ale.recv()
        # Lives do not tell a lost life from a new game: Amidar may show none at the beginning of one.
        before = _frames_before(info)
        game_over = before != self._before
        self._before = before
        return Step(_channels_first(frames), reward.astype(np.float32), terminal.copy(), truncated.copy(), game_over)

    def close(self) -> None:
        """Stop the emulator's threads."""
        self._ale = None


def _channels_first(frames: NDArray[np.uint8]) -> Frames:
    """Bring the emulator's frames, [N, 1, H, W] gray or [N, 1, H, W, 3] in colour, to [N, C, H, W]."""
    return np.ascontiguousarray(frames[:, 0].transpose(0, 3, 1, 2) if frames.ndim == 5 else frames)


def _frames_before(info: dict[str, Any]) -> NDArray[np.int32]:
    """Return the frames that were played before the present game: they change exactly when a game begins."""
    before: NDArray[np.int32] = info["frame_number"] - info["episode_frame_number"]
    return before


class Gymnasium:
    """Any registered Gymnasium environment with image observations and discrete actions."""

    def __init__(self, game: str, count: int, obs: ObservationConfig = _GRAY) -> None:
        """Make the environments one by one; what can't be played is refused with the reason."""
        try:
            self._envs: list[gymnasium.Env[Any, Any]] = [gymnasium.make(game) for _ in range(count)]
        except (gymnasium.error.Error, ModuleNotFoundError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"can't make the environment '{game}': {reason}") from error
        space, images = self._envs[0].action_space, self._envs[0].observation_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise UserError(f"'{game}' has actions of type {type(space).__name__}; they must be Discrete")
        if not _is_image(images):
            shapes = "(height, width) or (height, width, 1 or 3)"
            raise UserError(f"'{game}' observes {images}; images are needed: uint8, of shape {shapes}")
        self.num_actions = int(space.n)
        self.own_actions: list[int] | None = None
        self.deterministic = False  # some are, but none promises it
        self.notice = _unlike_benchmark(game, self._envs[0])
        kind = "gray" if obs.channels == 1 else "colour"
        resize = f"area to {obs.height}x{obs.width} {kind}"
        self.protocols = [{"name": "gymnasium", "version": 1, "id": game, "resize": resize}] * count
        self._obs = obs
        self._offset = int(space.start)
        self._action = np.zeros(count, np.int64)

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game from its own seed."""
        return self.restart(range(len(seeds)), seeds)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments."""
        images = [self._envs[place].reset(seed=seed)[0] for place, seed in zip(places, seeds, strict=True)]
        return np.stack([to_frame(image, self._obs) for image in images])

    def send(self, action: NDArray[np.int64]) -> None:
        """Remember the actions: these environments step only when their results are waited for."""
        self._action = action

    def recv(self) -> Step:
        """Step one environment after the other."""
        count = len(self._envs)
        frames = np.empty((count, *self._obs.frame), np.uint8)
        reward = np.zeros(count, np.float32)
        terminal, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for i, env in enumerate(self._envs):
            image, gained, terminal[i], truncated[i], _ = env.step(int(self._action[i]) + self._offset)
            reward[i] = float(gained)
            frames[i] = to_frame(env.reset()[0] if terminal[i] or truncated[i] else image, self._obs)
        return Step(frames, reward, terminal, truncated & ~terminal, terminal | truncated)

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()


def _unlike_benchmark(game: str, env: gymnasium.Env[Any, Any]) -> str:
    """Say by which rules an Atari game of Gymnasium is played: they are not Atari 100k's, whatever its name is."""
    spec = env.spec
    if spec is None or not str(spec.entry_point).startswith("ale_py"):
        return ""
    rules = spec.kwargs
    rom = str(rules["game"])
    skipped, sticky = rules.get("frameskip", 4), float(rules.get("repeat_action_probability", 0.25))
    frames = (
        f"{skipped[0]} to {skipped[1] - 1} frames" if isinstance(skipped, tuple | list) else plural(skipped, "frame")
    )
    played = f"each action is held for {frames}" + (f" and repeated with probability {sticky:g}" if sticky else "")
    return (
        f"{game} is not played by the rules of Atari 100k: {played}, frames are not pooled, a lost life is no end. "
        f"The game that is: spr train {rom}"
    )


def to_frame(image: NDArray[np.uint8], obs: ObservationConfig = _GRAY) -> Frames:
    """Turn an image of any size, gray or colour, into a frame [C, H, W] by averaging areas."""
    pixels = torch.tensor(image, dtype=torch.float32)
    pixels = pixels[..., None] if pixels.dim() == 2 else pixels  # [H, W, C]
    if obs.channels == 1 and pixels.shape[2] == 3:
        # ITU-R 601 luma, the weights that ale-py and OpenCV use for gray.
        pixels = (pixels @ torch.tensor([0.299, 0.587, 0.114]))[..., None]
    pixels = pixels.permute(2, 0, 1)
    if pixels.shape[1:] != (obs.height, obs.width):
        pixels = F.interpolate(pixels[None], size=(obs.height, obs.width), mode="area")[0]
    frame: Frames = pixels.round().clamp(0, 255).to(torch.uint8).expand(*obs.frame).numpy()
    return frame


def _is_image(space: gymnasium.Space[Any]) -> bool:
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype != np.uint8:
        return False
    return len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in (1, 3))


class Catch:
    """The built-in game: ten balls fall, one after another, down a grid of 4x4 cells; move the paddle under each.

    Three actions (left, stay, right). A caught ball scores 1. Each ball is a life: its landing ends an episode for
    learning while the game goes on, and the tenth ends the game. A random agent catches about one in four.
    """

    CELLS, BALLS = 4, 10

    def __init__(self, count: int, obs: ObservationConfig = _GRAY) -> None:
        """Set `count` boards."""
        if obs.height % self.CELLS or obs.width % self.CELLS:
            raise UserError(
                f"catch has {self.CELLS}x{self.CELLS} cells: observation.height, width must be multiples of 4"
            )
        self._obs = obs
        self.num_actions = 3
        self.own_actions: list[int] | None = None
        self.deterministic = True
        self.notice = ""
        self.protocols = [{"name": "catch", "version": 1, "balls": self.BALLS}] * count
        self._count = count
        self._random: list[np.random.Generator] = []
        self._paddle = np.zeros(count, np.int64)
        self._column = np.zeros(count, np.int64)
        self._row = np.zeros(count, np.int64)
        self._played = np.zeros(count, np.int64)

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game from its own seed."""
        self._random = [np.random.default_rng() for _ in seeds]
        return self.restart(range(self._count), seeds)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games on some boards."""
        for place, seed in zip(places, seeds, strict=True):
            self._random[place] = np.random.default_rng(seed)
            self._new_game(place)
        return self._draw()[list(places)]

    def send(self, action: NDArray[np.int64]) -> None:
        """Move the paddles."""
        self._paddle = np.clip(self._paddle + np.asarray(action) - 1, 0, self.CELLS - 1)

    def recv(self) -> Step:
        """Let the balls fall one cell, and judge those that reach the bottom."""
        self._row += 1
        landed = self._row == self.CELLS - 1
        caught = landed & (self._paddle == self._column)
        self._played += landed
        game_over = self._played == self.BALLS
        for i in np.flatnonzero(landed).tolist():
            if game_over[i]:
                self._new_game(i)
            else:
                self._drop(i)
        return Step(self._draw(), caught.astype(np.float32), landed, np.zeros_like(landed), game_over)

    def close(self) -> None:
        """Nothing is held."""

    def _new_game(self, i: int) -> None:
        self._played[i] = 0
        self._paddle[i] = self._random[i].integers(self.CELLS)
        self._drop(i)

    def _drop(self, i: int) -> None:
        self._row[i] = 0
        self._column[i] = self._random[i].integers(self.CELLS)

    def _draw(self) -> Frames:
        cells = np.zeros((self._count, self.CELLS, self.CELLS), np.uint8)
        boards = np.arange(self._count)
        cells[boards, self.CELLS - 1, self._paddle] = 160
        cells[boards, self._row, self._column] = 255
        frame = cells.repeat(self._obs.height // self.CELLS, 1).repeat(self._obs.width // self.CELLS, 2)
        return frame[:, None].repeat(self._obs.channels, 1)
