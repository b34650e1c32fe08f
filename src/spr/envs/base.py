"""Owns what an environment is to everything else: N games that step together and all speak one language.

An environment gives its newest frame (uint8, of the size and channels that the configuration's `observation` asks for),
the raw reward, and how things ended: `terminal` ends an episode for learning (a lost life or the game's end),
`truncated` is the time limit, `game_over` says that a new game has begun, whose first frame is the one given. Frames
are [C, H, W]: channels, height, width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spr.common import config_fields
from spr.common.errors import EnvironmentFault

Frames = NDArray[np.uint8]  # [N, C, H, W]
Flags = NDArray[np.bool_]  # [N]
Image = NDArray[np.uint8]  # [H, W, 3]: RGB, to look at


@dataclass(frozen=True)
class ObservationConfig:
    """What an agent sees: the last frames of its game, resized. Environments deliver frames of this kind."""

    height: int = config_fields.value(84, 1, 1_024, "Rows of a frame.")
    width: int = config_fields.value(84, 1, 1_024, "Columns of a frame.")
    channels: int = config_fields.value(
        1, 1, 64, "1: gray, 3: colour; other numbers for environments that show so many planes."
    )
    stack: int = config_fields.value(4, 1, 64, "Frames in an observation, oldest first.")

    @property
    def frame(self) -> tuple[int, int, int]:
        """The shape of one frame, (channels, height, width)."""
        return self.channels, self.height, self.width

    @property
    def planes(self) -> int:
        """Channels of an observation: those of all stacked frames."""
        return self.stack * self.channels


USUAL_OBSERVATION = ObservationConfig()  # what the paper's agents see


class Step(NamedTuple):
    """What one step of N environments gives."""

    frame: Frames  # [N, C, H, W] of the next observation; of the next game, where one ended
    reward: NDArray[np.float32]  # [N] raw
    terminal: Flags  # [N] a life was lost or the game ended
    truncated: Flags  # [N] the time limit was reached
    game_over: Flags  # [N] the game ended by either


class BrokenStep(EnvironmentFault):
    """A step in which some environments failed, at its beginning or since the step before: why, and what it gave.

    What is given of those that failed is a black frame and a time limit; until they are restarted they do not step, and
    are not named again. So a fleet can go on with the others.
    """

    def __init__(self, faults: Mapping[int, str], out: Step) -> None:
        place, message = next(iter(faults.items()))
        super().__init__(place, message)
        self.faults, self.out = faults, out


class Envs(Protocol):
    """N environments, stepped together."""

    num_actions: int  # that an agent has room for
    game_num_actions: list[int] | None  # of each environment's game, which may have fewer; None: exactly those
    protocols: list[dict[str, Any]]  # of each environment: the rules of its game
    deterministic: bool  # whether the same seed and actions give the same game again
    notice: str  # what the user should know before playing it; may be empty

    def reset(self, seeds: Sequence[int]) -> Frames:
        """Start a game in each environment from its own seed."""

    def restart(self, places: Sequence[int], seeds: Sequence[int]) -> Frames:
        """Start new games in some environments, each from its own seed; the others stay as they are. [places, ...]."""

    def send(self, action: NDArray[np.int64]) -> None:
        """Begin one step with an action for each environment; the caller may do other work meanwhile."""

    def recv(self) -> Step:
        """Wait for the step that was begun; ended games restart at once. Environments that fail: `BrokenStep`."""

    def close(self) -> None:
        """Release what the environments hold."""


class Shown(Envs, Protocol):
    """One environment that also renders itself."""

    @property
    def action_names(self) -> list[str]:
        """What its game's own actions are called."""

    def picture(self) -> Image:
        """Return the present image, in the game's own size and colours."""


def to_image(image: NDArray[np.uint8]) -> Image:
    """Bring an image, [H, W] or [H, W, 1] gray or [H, W, 3] in colour, to [H, W, 3]; of other planes the brightest."""
    image = image[..., None] if image.ndim == 2 else image
    image = image if image.shape[2] in (1, 3) else image.max(2, keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def seeds_for(seed: int, purpose: str, count: int) -> list[int]:
    """Derive independent seeds of environments from an agent's seed: one list for each purpose."""
    sequence = np.random.SeedSequence([seed, *purpose.encode()])
    return [int(word) >> 1 for word in sequence.generate_state(count)]  # emulators want 31 bits
