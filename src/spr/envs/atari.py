"""Owns Atari games: the protocol of Atari 100k, by ale-py's emulators."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ale_py import ALEVectorInterface
from numpy.typing import NDArray

from spr.common.errors import UserError
from spr.envs.atari100k import unlike_published
from spr.envs.base import USUAL_OBSERVATION, Frames, Image, ObservationConfig, Step, to_image
from spr.envs.roms import rom_checksum, rom_path

HEIGHT, WIDTH = 210, 160  # of the console's own frames
ROOM = 18  # actions that the console has
FRAME_SKIP = 4
NOOP_MAX = 30  # a game begins with fewer
MAX_FRAMES = 108_000  # of a game


class Atari:
    """The Atari 100k protocol, by ale-py's C++ vector environment."""

    def __init__(self, game: str, count: int, threads: int = 0, obs: ObservationConfig = USUAL_OBSERVATION) -> None:
        """Load the ROM `count` times; a missing one is refused by name."""
        if obs.channels not in (1, 3):
            raise UserError(
                f"Atari games are gray or in colour: observation.channels must be 1 or 3, not {obs.channels}"
            )
        rom = rom_path(game)
        settings: dict[str, Any] = {
            "max_num_frames_per_episode": MAX_FRAMES,
            "repeat_action_probability": 0.0,
            "full_action_space": False,
            "img_height": obs.height,
            "img_width": obs.width,
            "grayscale": obs.channels == 1,
            "frameskip": FRAME_SKIP,
            "maxpool": True,
            "noop_max": NOOP_MAX,
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
        # fleet, and one compiled update serves every game.
        self.num_actions = ROOM
        self.action_names = [action.name for action in self._ale.get_action_set()]
        self._game, self._actions = game, len(self.action_names)
        self.game_num_actions: list[int] | None = [self._actions] * count
        self.deterministic = True
        checksum = rom_checksum(rom)
        self.notice = ""
        if unlike := unlike_published(game, checksum):
            self.notice = (
                f"{game}: ale-py's ROM differs from the one that published scores were made with in its {unlike}, so "
                "scores can't be compared (docs/explanation/roms.md)"
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
        check_actions(self._game, self._actions, action)
        self._ale.send(action, self._strength)

    def recv(self) -> Step:
        """Wait for all of them."""
        frames, reward, terminal, truncated, info = self._ale.recv()
        # Lives do not distinguish a lost life from a new game: Amidar may show none at the beginning of one.
        before = _frames_before(info)
        game_over = before != self._before
        self._before = before
        return Step(_channels_first(frames), reward.astype(np.float32), terminal.copy(), truncated.copy(), game_over)

    def close(self) -> None:
        """Stop the emulator's threads."""
        self._ale = None


class ShownAtari:
    """One Atari game for an agent, and beside it the same game in a second emulator to look at.

    What an emulator draws has no part in its game, so the same seed and actions give the same game in colour; every
    step is compared. Frames for the agent could also be made of the coloured ones, but not exactly those it has learnt
    from: the emulator takes gray from its own palette, and the brighter of two frames after that.
    """

    def __init__(self, game: str, obs: ObservationConfig = USUAL_OBSERVATION) -> None:
        """Load the ROM twice."""
        self._mine = Atari(game, 1, 1, obs)
        self._colour = Atari(game, 1, 1, replace(obs, height=HEIGHT, width=WIDTH, channels=3))
        self._picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        self._game = game
        self.num_actions, self.game_num_actions = self._mine.num_actions, self._mine.game_num_actions
        self.action_names, self.protocols = self._mine.action_names, self._mine.protocols
        self.deterministic, self.notice = self._mine.deterministic, self._mine.notice

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start the game in both."""
        return self.restart([0], seeds)

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start a new game in both."""
        self._see(self._colour.restart(places, seeds))
        return self._mine.restart(places, seeds)

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin a step of both."""
        self._mine.send(action)
        self._colour.send(action)

    def recv(self) -> Step:
        """Wait for both."""
        mine, shown = self._mine.recv(), self._colour.recv()
        if any((a != b).any() for a, b in zip(mine[1:], shown[1:], strict=True)):
            raise RuntimeError(f"two emulators of {self._game} did not play the same game")
        self._see(shown.frame)
        return mine

    def picture(self) -> Image:
        """Return the second emulator's last frame."""
        return self._picture

    def close(self) -> None:
        """Stop both emulators' threads."""
        self._mine.close()
        self._colour.close()

    def _see(self, frames: Frames) -> None:
        self._picture = to_image(frames[0].transpose(1, 2, 0))


def check_actions(game: str, count: int, action: NDArray[np.int64]) -> None:
    """Raise if an action is not one of the game's own, to which ale-py's vector would never answer."""
    if action.max() >= count:
        raise ValueError(f"{game} has {count} actions, and {action.max()} was chosen")


def _channels_first(frames: NDArray[np.uint8]) -> Frames:
    """Bring the emulator's frames, [N, 1, H, W] gray or [N, 1, H, W, 3] in colour, to [N, C, H, W]."""
    return np.ascontiguousarray(frames[:, 0].transpose(0, 3, 1, 2) if frames.ndim == 5 else frames)


def _frames_before(info: dict[str, Any]) -> NDArray[np.int32]:
    """Return the frames that were played before the present game: they change exactly when a game begins."""
    before: NDArray[np.int32] = info["frame_number"] - info["episode_frame_number"]
    return before
