"""Owns how weights lie in memory: all of an agent's numbers in one row, each tensor a named view of it.

A fleet's weights, gradients and moments are then single tensors [S, P]: clipping and Adam are a few kernels instead of
a few per layer, and an agent is one row. Sections are in such an order that whatever is treated alike is one range.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Size, Tensor

# Names by their beginning, first match first. What the target encoder and projection are made of is one
# section; the projection uses no noise, so no sigmas.
_SECTIONS = {
    "out": ("head.value.", "head.advantage."),
    "sigma": ("head.hidden.weight_sigma", "head.hidden.bias_sigma"),
    "averaged": ("encoder.", "head.hidden.", "mlp."),
    "model": ("transition.",),
    "predictor": ("predictor.",),
}
_ALIGN = 16  # columns: views start at multiples of 64 bytes, which matrix products on a GPU want


class _Place(NamedTuple):
    section: str
    name: str  # empty for the gap behind a tensor
    shape: Size
    size: int


class Layout:
    """Where each named tensor lies in a row."""

    def __init__(self, shapes: Mapping[str, Size]) -> None:
        """Order the tensors by section, each on an aligned column."""
        self._places: list[_Place] = []
        self._ranges: dict[str, tuple[int, int]] = {}
        self.size = 0
        for section in _SECTIONS:
            begin = self.size
            for name, shape in shapes.items():
                if _section(name) == section:
                    self._place(section, name, shape)
            self._ranges[section] = (begin, self.size)

    def _place(self, section: str, name: str, shape: Size) -> None:
        size = math.prod(shape)
        gap = -size % _ALIGN
        self._places.append(_Place(section, name, shape, size))
        if gap:
            self._places.append(_Place(section, "", Size([gap]), gap))
        self.size += size + gap

    def columns(self, *sections: str) -> slice:
        """Return the columns of neighbouring sections."""
        ranges = [self._ranges[section] for section in sections]
        assert all(one[1] == two[0] for one, two in pairwise(ranges)), "sections lie apart"
        return slice(ranges[0][0], ranges[-1][1])

    def views(self, rows: Tensor, *sections: str) -> dict[str, Tensor]:
        """Name the tensors of rows [..., P] that hold all sections, or the given ones: [...], then its own shape."""
        wanted = sections or tuple(_SECTIONS)
        places = [place for place in self._places if place.section in wanted]
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


def _section(name: str) -> str:
    return next(section for section, starts in _SECTIONS.items() if name.startswith(starts))
