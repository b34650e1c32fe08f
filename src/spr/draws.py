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

from spr.config import Config
from spr.networks import DROPOUT_SHAPES, HeadNoise, head_sizes


class Draws(NamedTuple):
    """Everything random in one update of a fleet."""

    sample: Tensor  # [S, B] uniform in [0, 1), float64: picks sequences by priority
    shift: Tensor  # [S, B, O, 2] pixels
    factor: Tensor  # [S, B, O] brightness
    noise: HeadNoise  # [S, 2, ...] of the online head, and of the same head where it values the bootstrap
    keep: tuple[Tensor, ...]  # [S, O, B, H, W, C] dropout masks, one per encoder layer; empty without dropout


class Numbers(NamedTuple):
    """What the generators give for one update, before it is cut into draws."""

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
        self._head_sizes, self._head_tree = pytree.tree_flatten(head_sizes(config.network, actions))
        self._head = sum(size.numel() for size in self._head_sizes)

    def update(self) -> Draws:
        """Draw everything that one update needs."""
        return self.draws(self.roll())

    def roll(self) -> Numbers:
        """Take the numbers of one update from the generators: two calls for each agent, however much they fill."""
        config = self._config
        batch, seen = config.replay.batch, observation_count(config)
        masks = [math.prod(shape) for shape in DROPOUT_SHAPES] if config.network.dropout else []
        uniform = 2 * batch + 2 * batch * seen + batch * seen * sum(masks)
        return Numbers(self._filled(2 * self._head + batch * seen, torch.Tensor.normal_), self._uniform(uniform))

    def draws(self, numbers: Numbers) -> Draws:
        """Cut an update's numbers into draws; a pure function."""
        config = self._config
        agents, batch, seen = len(self.generators), config.replay.batch, observation_count(config)
        noise, jitter = numbers.normal.split([2 * self._head, batch * seen], 1)
        coarse, fine, uniform, masks = numbers.uniform.tensor_split([batch, 2 * batch, 2 * batch * (1 + seen)], 1)
        reach = config.augment.shift
        shift = (uniform * (2 * reach + 1)).floor().clamp(max=2 * reach).long() - reach
        return Draws(
            # Two numbers of 24 bits make one of 48: a priority among 100,000 may be small.
            sample=coarse.double() + fine.double() * 2.0**-24,
            shift=shift.view(agents, batch, seen, 2),
            factor=(1 + jitter.clamp(-2, 2) * config.augment.intensity).view(agents, batch, seen),
            noise=self.head_noise(noise.view(agents, 2, self._head)),
            keep=self._keep(masks, seen, batch),
        )

    def roll_action(self) -> Tensor:
        """Take the numbers of one acting step's noise from the generators, [S, ...]."""
        return self._filled(self._head, torch.Tensor.normal_)

    def head_noise(self, normal: Tensor) -> HeadNoise:
        """Cut normal numbers [..., all of a head's] into the noise of the Q-head's layers; a pure function."""
        parts = torch.split(normal, [size.numel() for size in self._head_sizes], -1)
        lead = normal.shape[:-1]
        leaves = [part.view(*lead, *size.shape) for part, size in zip(parts, self._head_sizes, strict=True)]
        noise: HeadNoise = pytree.tree_unflatten(leaves, self._head_tree)
        return noise

    def actions(self) -> Tensor:
        """Draw one uniformly random action per agent, [S, 1]."""
        return (self._uniform(1) * self._actions).long().clamp(max=self._actions - 1)

    def _keep(self, uniform: Tensor, seen: int, batch: int) -> tuple[Tensor, ...]:
        p = self._config.network.dropout
        if p == 0:
            return ()
        parts = uniform.split([seen * batch * math.prod(shape) for shape in DROPOUT_SHAPES], 1)
        return tuple(
            ((part >= p) / (1 - p)).view(-1, seen, batch, *shape)
            for part, shape in zip(parts, DROPOUT_SHAPES, strict=True)
        )

    def _uniform(self, count: int) -> Tensor:
        return self._filled(count, torch.Tensor.uniform_)

    def _filled(self, count: int, fill: Callable[..., Tensor]) -> Tensor:
        rows = torch.empty(len(self.generators), count, device=self.device)
        for row, generator in zip(rows, self.generators, strict=True):
            fill(row, generator=generator)
        return rows


def observation_count(config: Config) -> int:
    """O: the observations of a sequence that the losses see, s_t .. s_{t+K} and the bootstrap."""
    return config.learner.depth + 2
