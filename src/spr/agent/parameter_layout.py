"""Owns how parameters lie in memory: all of an agent's numbers in one row, each tensor a named view of it.

A fleet's weights, gradients and moments are then single tensors [S, P]: clipping and Adam are a few kernels instead of
a few per layer, and an agent is one row. Groups (see `networks.GROUPS`) lie in such an order that whatever is treated
alike is one range of columns.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Size, Tensor

from spr.agent.networks import GROUPS, Group
from spr.common.errors import UserError

_ALIGN = 16  # columns: views start at multiples of 64 bytes, which matrix products on a GPU want


class _Place(NamedTuple):
    group: Group
    name: str  # empty for the gap behind a tensor
    shape: Size
    size: int


class Layout:
    """Where each named tensor lies in a row."""

    def __init__(self, shapes: Mapping[str, Size], groups: Mapping[str, Group]) -> None:
        """Order the tensors by group, each on an aligned column."""
        self._places: list[_Place] = []
        self._ranges: dict[Group, tuple[int, int]] = {}
        self.groups = dict(groups)
        self.size = 0
        for name, group in groups.items():
            if group not in GROUPS:
                raise UserError(f"'{name}' is in the group '{group.name}', which is not in networks.GROUPS")
        for group in GROUPS:
            begin = self.size
            for name, shape in shapes.items():
                if groups[name] == group:
                    self._place(group, name, shape)
            self._ranges[group] = (begin, self.size)

    def _place(self, group: Group, name: str, shape: Size) -> None:
        size = math.prod(shape)
        gap = -size % _ALIGN
        self._places.append(_Place(group, name, shape, size))
        if gap:
            self._places.append(_Place(group, "", Size([gap]), gap))
        self.size += size + gap

    def columns(self, wanted: Callable[[Group], object]) -> slice:
        """Return the columns of the groups that are wanted; these must be neighbours, or there are none."""
        found = {group.name: self._ranges[group] for group in GROUPS if wanted(group)}
        ranges = list(found.values()) or [(0, 0)]
        assert all(one[1] == two[0] for one, two in pairwise(ranges)), f"the groups {', '.join(found)} lie apart"
        return slice(ranges[0][0], ranges[-1][1])

    def one_number_each(self, number_of: Callable[[str, Size], float]) -> Tensor:
        """Return a row [P] that has one number for each tensor, by name and shape, in all of its columns; in gaps 0."""
        return torch.cat([torch.full((p.size,), number_of(p.name, p.shape) if p.name else 0.0) for p in self._places])

    def views(self, rows: Tensor, wanted: Callable[[Group], object] = bool) -> dict[str, Tensor]:
        """Name the tensors of rows [..., P] that hold all groups, or the wanted ones: [...], then its own shape."""
        places = [place for place in self._places if wanted(place.group)]
        # One split rather than many slices: its gradient is one concatenation.
        parts = rows.split([place.size for place in places], -1)
        lead = rows.shape[:-1]
        return {p.name: part.view(*lead, *p.shape) for p, part in zip(places, parts, strict=True) if p.name}

    def rows(self, named: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lay tensors [S, ...] out in rows [S, P], with zeros in the gaps."""
        agents = next(iter(named.values())).shape[0]
        rows = torch.zeros(agents, self.size, dtype=dtype, device=device)
        for name, view in self.views(rows).items():
            view.copy_(named[name])
        return rows
