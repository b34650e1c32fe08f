"""Owns randomness: one generator per agent, and everything random in an update or an action, drawn up front.

An agent draws the same numbers alone and in any fleet, because nobody else uses its generator.
Shapes: S agents, B batch, O observations of a sequence (bootstrap last), A actions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spr.config import SIDE, Config
from spr.networks import Noise, activation_shapes, head_sizes


class Looks(NamedTuple):
    """How observations are augmented; pixels in 32 bits, since a GPU computes an index from them for every pixel."""

    shift: Tensor  # [S, B, O, 2] pixels, down and right
    corner: Tensor  # [S, B, O, 2] pixels, where the crop begins; without cropping [S, B, O, 0]
    side: Tensor  # [S, B, O] pixels, of the crop
    factor: Tensor  # [S, B, O] brightness


class Draws(NamedTuple):
    """Everything random in one update of a fleet."""

    sample: Tensor  # [S, B] uniform in [0, 1), float64: picks sequences by priority
    looks: Looks
    noise: Noise  # [S, 2, ...] of the online head, and of the head that values the bootstrap
    keep: tuple[Tensor, ...]  # [S, O, B, H, W, C] dropout masks, one per encoder layer; empty without dropout


class Numbers(NamedTuple):
    """What the generators give for one update or one action, before it is cut into draws."""

    normal: Tensor  # [S, ...]
    uniform: Tensor  # [S, ...] in [0, 1), multiples of 2^-24


class Dice:
    """One generator per agent, and how its numbers become draws."""

    def __init__(self, config: Config, actions: int, seeds: Sequence[int], device: torch.device) -> None:
        """Seed one generator per agent on the device that uses its numbers."""
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self.device = device
        self._config = config
        self._actions = actions
        self._head_sizes, self._head_tree = pytree.tree_flatten(head_sizes(config, actions))
        self._head = sum(size.numel() for size in self._head_sizes)
        self._masks = activation_shapes(config.network.encoder) if config.network.dropout else []
        self._cropped = config.augment.crop < SIDE
        self._explores = max(config.schedule.epsilon_start, config.schedule.epsilon_end) > 0

    def update(self) -> Draws:
        """Draw everything that one update needs."""
        return self.draws(self.roll())

    def roll(self) -> Numbers:
        """Take the numbers of one update from the generators: two calls for each agent, however much they fill."""
        return self._numbers(*self._sizes())

    def empty(self) -> Numbers:
        """Return room for the numbers of one update."""
        return Numbers(*(torch.empty(len(self.generators), size, device=self.device) for size in self._sizes()))

    def _sizes(self) -> tuple[int, int]:
        """Return how many normal and how many uniform numbers one agent's update takes."""
        batch, looks = self._config.replay.batch, self._config.replay.batch * len(self._config.views)
        uniform = 2 * batch + (4 if self._cropped else 2) * looks + looks * sum(map(math.prod, self._masks))
        return 2 * self._head + looks, uniform

    def draws(self, numbers: Numbers) -> Draws:
        """Cut an update's numbers into draws; a pure function."""
        config = self._config
        agents, batch, views = len(self.generators), config.replay.batch, config.views
        looks = batch * len(views)
        noise, jitter = numbers.normal.split([2 * self._head, looks], 1)
        coarse, fine, shift, corner, masks = numbers.uniform.tensor_split(
            [batch, 2 * batch, 2 * batch + 2 * looks, 2 * batch + (4 if self._cropped else 2) * looks], 1
        )
        reach, room = config.augment.shift, SIDE - config.augment.crop
        # A crop is padded by the largest shift on every side, and cut to a whole frame at any place inside.
        shift = _whole(shift, 2 * reach - room + 1).int().view(agents, batch, len(views), 2) - reach
        corner = _whole(corner, room + 1).int().view(agents, batch, len(views), -1)
        jitter = (jitter.clamp(-2, 2) * config.augment.intensity).view(agents, batch, len(views))
        side = torch.full((agents, batch, len(views)), config.augment.crop, device=self.device, dtype=torch.int32)
        if not all(augmented for _, augmented in views):
            on = torch.tensor([augmented for _, augmented in views], device=self.device)
            shift, corner, jitter = shift * on[:, None], corner * on[:, None], jitter * on
            side = torch.where(on, side, SIDE)
        return Draws(
            # Two numbers of 24 bits make one of 48: a priority among 100,000 may be small.
            sample=coarse.double() + fine.double() * 2.0**-24,
            looks=Looks(shift, corner, side, 1 + jitter),
            noise=self.head_noise(noise.view(agents, 2, self._head)),
            keep=self._keep(masks, len(views), batch),
        )

    def roll_action(self) -> Numbers:
        """Take the numbers of one acting step from the generators."""
        return self._numbers(self._head, 2 if self._explores else 0)

    def head_noise(self, normal: Tensor) -> Noise:
        """Cut normal numbers [..., all of a head's] into the noise of the Q-head's layers; a pure function."""
        parts = torch.split(normal, [size.numel() for size in self._head_sizes], -1) if self._head_sizes else ()
        lead = normal.shape[:-1]
        leaves = [part.view(*lead, *size.shape) for part, size in zip(parts, self._head_sizes, strict=True)]
        noise: Noise = pytree.tree_unflatten(leaves, self._head_tree)
        return noise

    def explored(self, action: Tensor, numbers: Numbers, epsilon: Tensor) -> Tensor:
        """Replace actions [S, 1] by uniformly random ones with probability epsilon; a pure function."""
        if not self._explores:
            return action
        chance, other = numbers.uniform.split(1, 1)
        return torch.where(chance < epsilon, _whole(other, self._actions), action)

    def actions(self) -> Tensor:
        """Draw one uniformly random action per agent, [S, 1]."""
        return _whole(self._filled(1, torch.Tensor.uniform_), self._actions)

    def _keep(self, uniform: Tensor, seen: int, batch: int) -> tuple[Tensor, ...]:
        p = self._config.network.dropout
        parts = uniform.split([seen * batch * math.prod(shape) for shape in self._masks], 1) if self._masks else ()
        return tuple(
            ((part >= p) / (1 - p)).view(-1, seen, batch, *shape)
            for part, shape in zip(parts, self._masks, strict=True)
        )

    def _numbers(self, normal: int, uniform: int) -> Numbers:
        return Numbers(self._filled(normal, torch.Tensor.normal_), self._filled(uniform, torch.Tensor.uniform_))

    def _filled(self, count: int, fill: Callable[..., Tensor]) -> Tensor:
        rows = torch.empty(len(self.generators), count, device=self.device)
        for row, generator in zip(rows, self.generators if count else (), strict=bool(count)):
            fill(row, generator=generator)
        return rows


def _whole(uniform: Tensor, count: int) -> Tensor:
    """Turn numbers in [0, 1) into whole ones from 0 to count - 1, alike in probability."""
    return (uniform * count).floor().clamp(max=count - 1).long()
