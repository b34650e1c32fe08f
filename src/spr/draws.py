"""Owns randomness: one generator per agent, and everything random in an update or an action, drawn up front.

An agent draws the same numbers alone and in any fleet, because nobody else uses its generator.
Shapes: S agents, B batch, O observations of a sequence (bootstrap last), A actions.
"""

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
    online: HeadNoise  # [S, ...] noise of the online head
    target: HeadNoise  # [S, ...] noise of the head that values the bootstrap
    keep: tuple[Tensor, ...]  # [S, O, B, C, H, W] dropout masks, one per encoder layer; empty without dropout


class Dice:
    """One generator per agent and the shapes they fill."""

    def __init__(self, config: Config, actions: int, seeds: Sequence[int], device: torch.device) -> None:
        """Seed one generator per agent on the device that uses its numbers."""
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self.device = device
        self._config = config
        self._actions = actions
        self._head_sizes, self._head_tree = pytree.tree_flatten(head_sizes(config.network, actions))

    def update(self) -> Draws:
        """Draw everything that one update needs."""
        config = self._config
        batch, seen = config.replay.batch, observation_count(config)
        head = sum(size.numel() for size in self._head_sizes)
        normal = self._normal(2 * head + batch * seen)
        uniform = self._uniform(batch * seen * 2)
        reach = config.augment.shift
        shift = (uniform * (2 * reach + 1)).floor().clamp(max=2 * reach).long() - reach
        jitter = normal[:, 2 * head :].clamp(-2, 2) * config.augment.intensity
        agents = len(self.generators)
        return Draws(
            sample=self._stack(lambda g: torch.rand(batch, generator=g, device=self.device, dtype=torch.float64)),
            shift=shift.view(agents, batch, seen, 2),
            factor=(1 + jitter).view(agents, batch, seen),
            online=self._split(normal[:, :head]),
            target=self._split(normal[:, head : 2 * head]),
            keep=self._keep(batch, seen),
        )

    def head_noise(self) -> HeadNoise:
        """Draw the noise of one acting step."""
        return self._split(self._normal(sum(size.numel() for size in self._head_sizes)))

    def actions(self) -> Tensor:
        """Draw one uniformly random action per agent, [S, 1]."""
        return (self._uniform(1) * self._actions).long().clamp(max=self._actions - 1)

    def _keep(self, batch: int, seen: int) -> tuple[Tensor, ...]:
        p = self._config.network.dropout
        if p == 0:
            return ()

        def mask(shape: tuple[int, ...]) -> Tensor:
            size = (seen, batch, *shape)
            draw = self._stack(lambda g: torch.rand(size, generator=g, device=self.device))
            return (draw >= p).to(draw.dtype) / (1 - p)

        return tuple(mask(shape) for shape in DROPOUT_SHAPES)

    def _split(self, flat: Tensor) -> HeadNoise:
        parts = torch.split(flat, [size.numel() for size in self._head_sizes], 1)
        noise: HeadNoise = pytree.tree_unflatten(list(parts), self._head_tree)
        return noise

    def _normal(self, count: int) -> Tensor:
        return self._stack(lambda g: torch.randn(count, generator=g, device=self.device))

    def _uniform(self, count: int) -> Tensor:
        return self._stack(lambda g: torch.rand(count, generator=g, device=self.device))

    def _stack(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        return torch.stack([draw(generator) for generator in self.generators])


def observation_count(config: Config) -> int:
    """O: the observations of a sequence that the losses see, s_t .. s_{t+K} and the bootstrap."""
    return config.learner.depth + 2
