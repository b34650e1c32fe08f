"""Owns how agents of games with different numbers of actions share one shape: padding, cropping, which are valid.

Shapes: S agents, A actions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ActionDim(NamedTuple):
    """Where the entries of actions lie in a parameter: at the end of a dimension, so many for each."""

    dim: int
    each: int


def pad_actions(named: Mapping[str, Tensor], dims: Mapping[str, ActionDim], own: int, room: int) -> dict[str, Tensor]:
    """Make room for actions that an agent's game lacks: entries of zero, which no gradient ever reaches."""
    padded = dict(named)
    for name, (dim, each) in dims.items():
        shape = list(named[name].shape)
        shape[dim] = (room - own) * each
        padded[name] = torch.cat([named[name], named[name].new_zeros(shape)], dim)
    return padded


def crop_actions(named: Mapping[str, Tensor], dims: Mapping[str, ActionDim], own: int, room: int) -> dict[str, Tensor]:
    """Take that room away again: the parameters of an agent as if it were alone with its own actions."""
    cropped = dict(named)
    for name, (dim, each) in dims.items():
        cropped[name] = named[name].narrow(dim, 0, named[name].shape[dim] - (room - own) * each)
    return cropped


def action_masks(own: Sequence[int], room: int, device: torch.device) -> Tensor:
    """Return which of the actions that there is room for each agent has, [S, A]."""
    return torch.arange(room, device=device) < torch.tensor(own, device=device)[:, None]


# [A] which of the actions that there is room for an agent's game has; None: all. Agents of several games share shapes.
ActionMask = Tensor | None
