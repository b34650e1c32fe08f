"""Owns acting: the frame stacks of a fleet's environments and the greedy choice of actions.

Shapes: S agents, E environments per agent (one while training, many in evaluation), A actions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from spr.config import SIDE, STACK, Config
from spr.networks import Networks, Noise


class Actor:
    """Sees the newest frames, remembers the last four, and picks the best action."""

    def __init__(self, config: Config, actions: int, shape: tuple[int, int], device: torch.device) -> None:
        """Prepare empty stacks for (S, E) environments."""
        self.stack = torch.zeros(*shape, STACK, SIDE, SIDE, dtype=torch.uint8, device=device)
        with torch.device("meta"):
            networks = Networks(config, actions)
        networks.support = networks.support.to(device)

        def q_values(params: dict[str, Tensor], obs: Tensor, noise: Noise) -> Any:
            return functional_call(networks, params, (obs, noise))

        self._q_values = vmap(q_values)
        self._names = frozenset(
            name for name, _ in networks.named_parameters() if name.startswith(("encoder.", "head."))
        )

    def observe(self, frame: Tensor, first: Tensor) -> None:
        """Push frames [S, E, 84, 84]; where an episode begins [S, E], the frames before it become black."""
        older = self.stack[:, :, 1:] * ~first[..., None, None, None]
        self.stack.copy_(torch.cat([older, frame[:, :, None]], 2))

    @torch.no_grad()
    def greedy(self, params: dict[str, Tensor], noise: Noise) -> Tensor:
        """Return the best actions [S, E] under one draw of noise per agent, or under none."""
        used = {name: p for name, p in params.items() if name in self._names}
        obs = self.stack.to(next(iter(used.values())).dtype) / 255
        q: Tensor = self._q_values(used, obs, noise)
        return q.argmax(-1)
