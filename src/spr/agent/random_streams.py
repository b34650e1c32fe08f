"""Owns randomness: one stream of numbers per agent, and everything random in an update or an action, drawn up front.

An agent draws the same numbers alone and in any fleet, because no other agent uses its stream.
Shapes: S agents, B batch, O observations of a sequence, A actions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spr.agent.augmentation import AugmentParams, augment_params, views_of, whole_number
from spr.agent.encoders import encoder_shapes
from spr.agent.q_head import Noise, noise_shapes
from spr.config.config import Config
from spr.ops.kernels import Deferred

_kernels = Deferred("spr.ops.random_triton")


class UpdateRandomness(NamedTuple):
    """Everything random in one update of a fleet."""

    sample: Tensor  # [S, B] uniform in [0, 1), float64: picks sequences by priority
    augment: AugmentParams
    noise: Noise  # [S, 2, ...] of the online head, and of the head that values the bootstrap
    dropout: tuple[Tensor, ...]  # [S, O, B, H, W, C] masks, one per encoder layer; empty without dropout


class RawNumbers(NamedTuple):
    """What the streams give for one update or one action, before it is cut into draws."""

    normal: Tensor  # [S, ...]
    uniform: Tensor  # [S, ...] in [0, 1), multiples of 2^-24


class _Generators:
    """Streams on a CPU: the library's generators."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(self, normal: int, uniform: int) -> RawNumbers:
        return RawNumbers(self._filled(normal, Tensor.normal_), self._filled(uniform, Tensor.uniform_))

    def _filled(self, count: int, fill: Callable[..., Tensor]) -> Tensor:
        rows = torch.empty(len(self._generators), count)
        for row, generator in zip(rows, self._generators if count else (), strict=bool(count)):
            fill(row, generator=generator)
        return rows

    def state(self, agent: int) -> Tensor:
        return self._generators[agent].get_state()

    def restore(self, agent: int, state: Tensor) -> None:
        self._generators[agent].set_state(state)


class _Counters:
    """Streams on a GPU: what an agent draws follows from its seed and from how often it has drawn before.

    So one kernel draws for a whole fleet; the library's generators take a few per agent, and a fleet has many.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._state = torch.tensor([[seed, 0] for seed in seeds], device=device)  # [S, 2]

    def draw(self, normal: int, uniform: int) -> RawNumbers:
        return RawNumbers(*_kernels.random(self._state, normal, uniform))

    def state(self, agent: int) -> Tensor:
        return self._state[agent].cpu().view(torch.uint8)

    def restore(self, agent: int, state: Tensor) -> None:
        self._state[agent].copy_(state.view(torch.int64))


class RngStreams:
    """One stream of numbers per agent, and how they become draws."""

    def __init__(
        self,
        config: Config,
        num_actions: int,
        seeds: Sequence[int],
        device: torch.device,
        game_num_actions: Sequence[int] | None = None,
    ) -> None:
        """Begin one stream per agent on the device that uses its numbers.

        There is room for `num_actions`, and numbers are drawn for all of them, whatever an agent's own are.
        """
        self.agents, self.device = len(seeds), device
        self._streams = _Generators(seeds) if device.type == "cpu" else _Counters(seeds, device)
        self._config = config
        own = [num_actions] * len(seeds) if game_num_actions is None else list(game_num_actions)
        self._game_num_actions = torch.tensor(own, device=device)[:, None]  # [S, 1]
        self._noise_shapes, self._noise_tree = pytree.tree_flatten(noise_shapes(config, num_actions))
        self._noise_size = sum(size.numel() for size in self._noise_shapes)
        shapes = encoder_shapes(*config.encoder_arguments)
        self._dropout_shapes = shapes if config.network.dropout else ()
        self._corner = 2 if config.augment.crop_margin else 0  # numbers per view that place its crop
        self._explores = max(config.schedule.epsilon_start, config.schedule.epsilon_end) > 0

    def sample_raw(self) -> RawNumbers:
        """Draw the numbers of one update, all at once: an agent's are few, and drawing has a cost of its own."""
        return self._streams.draw(*self._sizes())

    def empty(self) -> RawNumbers:
        """Return room for the numbers of one update."""
        return RawNumbers(*(torch.empty(self.agents, size, device=self.device) for size in self._sizes()))

    def _sizes(self) -> tuple[int, int]:
        """Return how many normal and how many uniform numbers one agent's update takes."""
        batch = self._config.replay.batch_size
        views = batch * len(views_of(self._config))
        uniform = 2 * batch + (2 + self._corner) * views + views * sum(map(math.prod, self._dropout_shapes))
        return 2 * self._noise_size + views, uniform

    def draws(self, raw: RawNumbers) -> UpdateRandomness:
        """Cut an update's numbers into draws; a pure function."""
        agents, batch, count = self.agents, self._config.replay.batch_size, len(views_of(self._config))
        views = batch * count
        noise, jitter = raw.normal.split([2 * self._noise_size, views], 1)
        ends = [batch, 2 * batch, 2 * batch + 2 * views, 2 * batch + (2 + self._corner) * views]
        coarse, fine, shift, corner, masks = raw.uniform.tensor_split(ends, 1)
        return UpdateRandomness(
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
        return self._streams.draw(self._noise_size, 2 if self._explores else 0)

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
        return torch.where(chance < epsilon, whole_number(other, self._game_num_actions), action)

    def random_actions(self) -> Tensor:
        """Draw one uniformly random action per agent, [S, 1]."""
        return whole_number(self._streams.draw(0, 1).uniform, self._game_num_actions)

    def _dropout(self, uniform: Tensor, views: int, batch: int) -> tuple[Tensor, ...]:
        p, shapes = self._config.network.dropout, self._dropout_shapes
        parts = uniform.split([views * batch * math.prod(shape) for shape in shapes], 1) if shapes else ()
        return tuple(
            ((part >= p) / (1 - p)).view(-1, views, batch, *shape) for part, shape in zip(parts, shapes, strict=True)
        )

    def state(self, agent: int) -> Tensor:
        """Return where an agent's stream is, for a checkpoint."""
        return self._streams.state(agent)

    def restore(self, agent: int, state: Tensor) -> None:
        """Bring an agent's stream back to where it was."""
        self._streams.restore(agent, state)
