"""Owns how a function of one agent is applied to a fleet: to all at once by `vmap`, or to one after another.

A GPU and small networks want few large operations: `vmap`. On a CPU an operation of usual networks fills the cores by
itself, and operators of the library for one agent are faster than batched ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def takes_turns(device: torch.device) -> bool:
    """Say whether a device takes one agent after another."""
    return device.type == "cpu"


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what applies a function to each agent's part of its arguments [S, ...], and stacks the results."""

    def whole(*args: Any) -> Any:
        agents = len(tree_leaves(args)[0])
        each = [function(*tree_map(lambda t, i=i: t[i], args)) for i in range(agents)]
        return tree_map(_stacked, *each)

    return whole


def _stacked(*parts: Tensor) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
