"""Owns environments of Gymnasium's kind: whatever has images and discrete actions, as a vector that gives frames."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from numpy.typing import NDArray

from spr.common.errors import EnvironmentFault, UserError, plural
from spr.common.plugins import where
from spr.envs.base import USUAL_OBSERVATION, BrokenStep, Frames, Image, ObservationConfig, Step, to_image

Argument = bool | int | float | str
Maker = Callable[..., gymnasium.Env[Any, Any]]

# What foreign code may raise: an environment that calls `sys.exit` has failed, and ends only its own agent.
_ANY = (Exception, SystemExit)
_LOG = logging.getLogger("spr")
_UNREGISTERED = (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound)
_FACTORY = "a custom function, my_module:make, can wrap it"


def parse_arguments(texts: Sequence[str]) -> dict[str, Argument]:
    """Read arguments of the command line, NAME=VALUE each: true, false, numbers, and everything else as it stands."""
    given: dict[str, Argument] = {}
    for text in texts:
        name, equals, raw = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env-arg takes NAME=VALUE, such as continuous=false, not '{text}'")
        try:
            value = json.loads(raw.lower() if raw.lower() in ("true", "false") else raw)
        except ValueError:
            value = raw
        given[name] = value if isinstance(value, bool | int | float | str) else raw
    return given


class Picture(NamedTuple):
    """How an environment's observations are pictures."""

    channels: int
    channels_first: bool
    low: float  # black
    high: float  # white


class Gymnasium:
    """Environments of Gymnasium's kind, made one by one and stepped one after the other."""

    def __init__(
        self,
        game: str,
        count: int,
        obs: ObservationConfig = USUAL_OBSERVATION,
        maker: Maker | None = None,
        arguments: Mapping[str, Argument] | None = None,
    ) -> None:
        """Make them by a function, or by their id; what can't be played is refused with what would make it fit."""
        arguments = dict(arguments or {})
        self._game, self._obs = game, obs
        self._maker, self._arguments = maker or partial(gymnasium.make, game), arguments
        self._envs = _made(game, count, self._maker, arguments)
        space, images = self._envs[0].action_space, self._envs[0].observation_space
        if not isinstance(space, spaces.Discrete):
            raise UserError(
                f"'{game}' has actions of type {type(space).__name__}, they must be Discrete: {_acting(space)}"
            )
        self._picture = picture_of(game, images, obs)
        self.num_actions = int(space.n)
        self.game_num_actions: list[int] | None = None
        self.deterministic = False  # some are, but none promises it
        self.notice = _unlike_benchmark(game, self._envs[0])
        kind = {1: "gray", 3: "colour"}.get(obs.channels, plural(obs.channels, "plane"))
        rules: dict[str, Any] = {"name": "gymnasium", "version": 1, "id": game}
        rules["resize"] = f"area to {obs.height}x{obs.width} {kind}"
        if arguments:
            rules["arguments"] = arguments
        self.protocols = [rules] * count
        self._offset = int(space.start)
        self._action = np.zeros(count, np.int64)
        self._last: Frames = np.zeros(obs.frame, np.uint8)  # that the first environment gave
        self._draws = False
        self._failed: set[int] = set()  # environments that are not stepped any more, until they are restarted
        self._news: dict[int, str] = {}  # what went wrong with some of them, until the next step reports it

    @property
    def action_names(self) -> list[str]:
        """What the environment calls its actions, as Atari's and MiniGrid's do, or their numbers."""
        inner = self._envs[0].unwrapped
        meanings, named = getattr(inner, "get_action_meanings", None), getattr(inner, "actions", None)
        names = [] if meanings is None else [str(name) for name in meanings()]
        if isinstance(named, type) and issubclass(named, IntEnum):
            names = [action.name for action in named]
        numbers = [str(i + self._offset) for i in range(self.num_actions)]
        return names if len(names) == len(numbers) else numbers

    def draw(self) -> None:
        """Make the environments again with rendering; not all can."""
        given = self._arguments.get("render_mode", "rgb_array")
        if given == "rgb_array" and "rgb_array" in self._envs[0].metadata.get("render_modes", ()):
            try:
                drawing = _made(self._game, len(self._envs), self._maker, {**self._arguments, "render_mode": given})
            except UserError:  # a custom function need not have this argument
                return
            self.close()
            self._envs, self._draws = drawing, True

    def picture(self) -> Image:
        """Return what the first environment renders, or else its last frame."""
        if not self._draws:
            return to_image(self._last.transpose(1, 2, 0))
        try:
            drawn = np.asarray(self._envs[0].render())
            return to_image((drawn * 255 if drawn.dtype.kind == "f" and drawn.max() <= 1 else drawn).astype(np.uint8))
        except _ANY as error:
            raise EnvironmentFault(0, self._said(error)) from error

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start every game from its own seed."""
        return self.restart(range(len(seeds)), seeds)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments; one that fails is reported by the next step."""
        self._failed -= set(places)
        return np.stack([self._begun(place, seed) for place, seed in zip(places, seeds, strict=True)])

    def send(self, action: NDArray[np.int64]) -> None:
        """Remember the actions: these environments step only when their results are waited for."""
        self._action = action

    def recv(self) -> Step:
        """Step one environment after the other; those that fail are left out from then on."""
        count = len(self._envs)
        frames = np.zeros((count, *self._obs.frame), np.uint8)
        reward = np.zeros(count, np.float32)
        terminal, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for i, env in enumerate(self._envs):
            if i in self._failed:
                continue
            try:
                image, gained, ended, cut, _ = env.step(int(self._action[i]) + self._offset)
                reward[i] = _finite(gained)
                terminal[i], truncated[i] = bool(ended), bool(cut)
                frames[i] = self._begun(i) if ended or cut else self._frame(i, image)
            except _ANY as error:
                self._fail(i, error)
        game_over = terminal | truncated
        if not self._news:
            return Step(frames, reward, terminal, truncated & ~terminal, game_over)
        # Nobody will know how their games would have gone on: as at a time limit.
        truncated[list(self._news)] = True
        faults, self._news = self._news, {}
        raise BrokenStep(faults, Step(frames, reward, terminal, truncated & ~terminal, game_over))

    def close(self) -> None:
        """Close every environment; what one does wrong then changes nothing that was done before."""
        for env in self._envs:
            try:
                env.close()
            except _ANY as error:
                _LOG.warning("closing it, %s", self._said(error))

    def _begun(self, place: int, seed: int | None = None) -> Frames:
        """Begin a game and return its first frame, which is black where that fails."""
        try:
            image, _ = self._envs[place].reset(seed=seed)
            return self._frame(place, image)
        except _ANY as error:
            self._fail(place, error)
            return np.zeros(self._obs.frame, np.uint8)

    def _frame(self, place: int, image: Any) -> Frames:
        frame = to_frame(checked_image(image, self._envs[place].observation_space), self._obs, self._picture)
        self._last = frame if place == 0 else self._last
        return frame

    def _fail(self, place: int, error: BaseException) -> None:
        self._failed.add(place)
        self._news[place] = self._said(error)

    def _said(self, error: BaseException) -> str:
        """Say what an environment did wrong, and where."""
        said = " ".join(str(error).split())
        if isinstance(error, WrongError):
            return f"'{self._game}' gave {said}"
        if isinstance(error, SystemExit):
            return f"'{self._game}' called sys.exit({said}) ({where(error)})"
        return f"'{self._game}' raised {type(error).__name__}: {said} ({where(error)})"


class WrongError(Exception):
    """An environment gave what it should not have."""


def _finite(gained: Any) -> np.float32:
    with np.errstate(over="ignore"):
        reward = np.float32(float(gained))
    if not np.isfinite(reward):
        raise WrongError(f"a reward of {gained}, which no score can be made of")
    return reward


def checked_image(image: Any, space: spaces.Space[Any]) -> NDArray[Any]:
    """Return an observation, if it is what its space promises: of that shape, of such numbers, and all of them finite.

    Whole numbers of any size pass for each other, and in place of fractions. Fractions do not pass for whole numbers:
    they would be black.
    """
    if np.shape(image) != space.shape:
        raise WrongError(f"an image of shape {np.shape(image)}, not {space.shape}")
    numbers, wanted = np.asarray(image), np.dtype(space.dtype)
    if numbers.dtype.kind not in ("biuf" if wanted.kind == "f" else "biu"):
        raise WrongError(f"an image of {numbers.dtype}, not {wanted}")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise WrongError("an image with numbers that are not finite")
    return numbers


def _made(game: str, count: int, maker: Maker, arguments: Mapping[str, Argument]) -> list[Any]:
    """Make environments one by one; an error of theirs becomes a message to the user."""
    made: list[gymnasium.Env[Any, Any]] = []
    try:
        for _ in range(count):
            made.append(maker(**arguments))
    except _ANY as error:
        for env in made:
            env.close()
        reason, expected = " ".join(str(error).split()), (gymnasium.error.Error, ModuleNotFoundError, OSError)
        at = "" if isinstance(error, expected) else f" ({type(error).__name__} in {where(error)})"
        hint = "; if a package registers it: --plugin PACKAGE" if isinstance(error, _UNREGISTERED) else ""
        raise UserError(f"can't make the environment '{game}': {reason}{at}{hint}") from error
    if not isinstance(made[0], gymnasium.Env):
        raise UserError(f"'{game}' made a {type(made[0]).__name__}, which is no gymnasium.Env")
    return made


def picture_of(game: str, space: spaces.Space[Any], obs: ObservationConfig) -> Picture:
    """Say how observations are pictures; what they are not is refused, with the wrapper that would make them so."""
    if isinstance(space, spaces.MultiBinary):
        shape, kind, low, high = space.shape, np.dtype(np.bool_), 0.0, 1.0
    elif isinstance(space, spaces.Box):
        shape, kind, low, high = space.shape, space.dtype, float(space.low.min()), float(space.high.max())
    else:
        raise UserError(f"'{game}' observes a {type(space).__name__}, images are needed: {_seeing(space)}")
    if len(shape) not in (2, 3):
        raise UserError(
            f"'{game}' observes numbers of shape {shape}, images are needed: gymnasium.wrappers.AddRenderObservation "
            f"shows its picture instead ({_FACTORY})"
        )
    if kind == np.uint8:
        low, high = 0.0, 255.0
    elif kind == np.bool_:
        low, high = 0.0, 1.0
    if not np.isfinite([low, high]).all() or low >= high:
        raise UserError(
            f"'{game}' observes images without bounds: gymnasium.wrappers.RescaleObservation or a Box with its real "
            f"bounds makes them pictures ({_FACTORY})"
        )
    first = len(shape) == 3 and shape[0] < shape[2]
    channels = 1 if len(shape) == 2 else shape[0] if first else shape[2]
    if channels != obs.channels and {channels, obs.channels} != {1, 3}:
        raise UserError(
            f"'{game}' shows {plural(channels, 'plane')}, but observation.channels is {obs.channels}: "
            f"--set observation.channels={channels}"
        )
    return Picture(channels, first, low, high)


def _seeing(space: spaces.Space[Any]) -> str:
    """Say how observations that are no images can become some."""
    if isinstance(space, spaces.Dict):
        inside = [name for name, part in space.items() if isinstance(part, spaces.Box) and len(part.shape) in (2, 3)]
        if inside:
            return (
                f"gymnasium.wrappers.TransformObservation can take its '{inside[0]}' (for MiniGrid "
                f"minigrid.wrappers.ImgObsWrapper does; {_FACTORY})"
            )
    return f"gymnasium.wrappers.AddRenderObservation shows its picture instead ({_FACTORY})"


def _acting(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Box):
        return (
            "some environments have an argument for that (--env-arg continuous=false), for others "
            f"gymnasium.wrappers.TransformAction maps a few numbers to actions ({_FACTORY})"
        )
    return f"gymnasium.wrappers.TransformAction can map each number to one of them ({_FACTORY})"


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


def to_frame(image: NDArray[Any], obs: ObservationConfig = USUAL_OBSERVATION, picture: Picture | None = None) -> Frames:
    """Turn an image of any size, gray, in colour or of other planes, into a frame [C, H, W] by averaging areas."""
    pixels = torch.tensor(image, dtype=torch.float32)
    pixels = pixels[..., None] if pixels.dim() == 2 else pixels  # [H, W, C]
    if picture is not None:
        pixels = pixels.permute(1, 2, 0) if picture.channels_first else pixels
        pixels = (pixels - picture.low) * (255 / (picture.high - picture.low))
    if obs.channels == 1 and pixels.shape[2] == 3:
        # ITU-R 601 luma, the weights that ale-py and OpenCV use for gray.
        pixels = (pixels @ torch.tensor([0.299, 0.587, 0.114]))[..., None]
    pixels = pixels.permute(2, 0, 1)
    if pixels.shape[1:] != (obs.height, obs.width):
        pixels = F.interpolate(pixels[None], size=(obs.height, obs.width), mode="area")[0]
    frame: Frames = pixels.round().clamp(0, 255).to(torch.uint8).expand(*obs.frame).numpy()
    return frame
