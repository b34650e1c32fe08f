"""Owns randomness: one generator per agent, and everything random in an update or an action, drawn up front.

An agent draws the same numbers alone and in any fleet, because no other agent uses its generator.
Shapes: S agents, B batch, O observations of a sequence, A actions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spr.augment import AugmentParams, augment_params, views_of, whole_number
from spr.config import Config
from spr.encoders import encoder_shapes
from spr.networks import Noise, noise_shapes, observation_shape


class Draws(NamedTuple):
    """Everything random in one update of a fleet."""

    sample: Tensor  # [S, B] uniform in [0, 1), float64: picks sequences by priority
    augment: AugmentParams
    noise: Noise  # [S, 2, ...] of the online head, and of the head that values the bootstrap
    dropout: tuple[Tensor, ...]  # [S, O, B, H, W, C] masks, one per encoder layer; empty without dropout


class RawNumbers(NamedTuple):
    """What the generators give for one update or one action, before it is cut into draws."""

    normal: Tensor  # [S, ...]
    uniform: Tensor  # [S, ...] in [0, 1), multiples of 2^-24


class RngStreams:
    """One generator per agent, and how its numbers become draws."""

    def __init__(
        self,
        config: Config,
        num_actions: int,
        seeds: Sequence[int],
        device: torch.device,
        own_actions: Sequence[int] | None = None,
    ) -> None:
        """Seed one generator per agent on the device that uses its numbers.

        There is room for `num_actions`, and numbers are drawn for all of them, whatever an agent's own are.
        """
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self.device = device
        self._config = config
        own = [num_actions] * len(seeds) if own_actions is None else list(own_actions)
        self._own_actions = torch.tensor(own, device=device)[:, None]  # [S, 1]
        self._noise_shapes, self._noise_tree = pytree.tree_flatten(noise_shapes(config, num_actions))
        self._noise_size = sum(size.numel() for size in self._noise_shapes)
        shapes = encoder_shapes(config.network.encoder, observation_shape(config))
        self._dropout_shapes = shapes if config.network.dropout else ()
        self._corner = 2 if config.augment.crop_margin else 0  # numbers per view that place its crop
        self._explores = max(config.schedule.epsilon_start, config.schedule.epsilon_end) > 0

    def sample_raw(self) -> RawNumbers:
        """Draw the numbers of one update: one normal_ and one uniform_ call per agent, however much they fill."""
        return self._sample(*self._sizes())

    def empty(self) -> RawNumbers:
        """Return room for the numbers of one update."""
        return RawNumbers(*(torch.empty(len(self.generators), size, device=self.device) for size in self._sizes()))

    def _sizes(self) -> tuple[int, int]:
        """Return how many normal and how many uniform numbers one agent's update takes."""
        batch = self._config.replay.batch_size
        views = batch * len(views_of(self._config))
        uniform = 2 * batch + (2 + self._corner) * views + views * sum(map(math.prod, self._dropout_shapes))
        return 2 * self._noise_size + views, uniform

    def draws(self, raw: RawNumbers) -> Draws:
        """Cut an update's numbers into draws; a pure function."""
        agents, batch, count = len(self.generators), self._config.replay.batch_size, len(views_of(self._config))
        views = batch * count
        noise, jitter = raw.normal.split([2 * self._noise_size, views], 1)
        ends = [batch, 2 * batch, 2 * batch + 2 * views, 2 * batch + (2 + self._corner) * views]
        coarse, fine, shift, corner, masks = raw.uniform.tensor_split(ends, 1)
        return Draws(
            # Two numbers of 24 bits make one of 48: a priority among 100,000 may be small.
            sample=coarse.double() + fine.double() * 2.0**-24,
            augment=augment_params(
                self._config,
                shift.view(agents, batch, count, 2),
                corner.view(agents, batch, count, self._corner),
                jitter.view(agents, batch, count),
            ),
            noise=self.head_noise(noise.view(agents, 2, self._noise_size)),
            dropout=self._dropout(masks, count, batch),
        )

    def sample_raw_action(self) -> RawNumbers:
        """Draw the numbers of one acting step."""
        return self._sample(self._noise_size, 2 if self._explores else 0)

    def head_noise(self, normal: Tensor) -> Noise:
        """Cut normal numbers [..., all of a head's] into the noise of the Q-head's layers; a pure function."""
        sizes = [size.numel() for size in self._noise_shapes]
        parts = torch.split(normal, sizes, -1) if sizes else ()
        lead = normal.shape[:-1]
        leaves = [part.view(*lead, *size.shape) for part, size in zip(parts, self._noise_shapes, strict=True)]
        noise: Noise = pytree.tree_unflatten(leaves, self._noise_tree)
        return noise

    def epsilon_greedy(self, action: Tensor, raw: RawNumbers, epsilon: Tensor) -> Tensor:
        """Replace actions [S, 1] by uniformly random ones with probability epsilon; a pure function."""
        if not self._explores:
            return action
        chance, other = raw.uniform.split(1, 1)
        return torch.where(chance < epsilon, whole_number(other, self._own_actions), action)

    def random_actions(self) -> Tensor:
        """Draw one uniformly random action per agent, [S, 1]."""
        return whole_number(self._filled(1, torch.Tensor.uniform_), self._own_actions)

    def _dropout(self, uniform: Tensor, views: int, batch: int) -> tuple[Tensor, ...]:
        p, shapes = self._config.network.dropout, self._dropout_shapes
        parts = uniform.split([views * batch * math.prod(shape) for shape in shapes], 1) if shapes else ()
        return tuple(
            ((part >= p) / (1 - p)).view(-1, views, batch, *shape) for part, shape in zip(parts, shapes, strict=True)
        )

    def _sample(self, normal: int, uniform: int) -> RawNumbers:
        return RawNumbers(self._filled(normal, torch.Tensor.normal_), self._filled(uniform, torch.Tensor.uniform_))

    def _filled(self, count: int, fill: Callable[..., Tensor]) -> Tensor:
        rows = torch.empty(len(self.generators), count, device=self.device)
        for row, generator in zip(rows, self.generators if count else (), strict=bool(count)):
            fill(row, generator=generator)
        return rows
