"""Owns drawing observations: stored frames, shifted, scaled and stacked in one pass over the pixels.

Shapes: N, M observations, P planes, H height, W width.
"""

from typing import Any

import torch
from torch import Tensor

from spr.ops import functional
from spr.ops.kernels import Deferred, fleet_op

_kernels = Deferred("spr.ops.observation_triton")


def draw(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    """Stack planes shifted, as `functional.shifted_pixels` does, times their brightness [..., P]: one pass, in a dtype.

    Planes [N, H, W] become observations [..., P, H, W] whose planes lie side by side in memory.
    """
    drawn: Tensor = _draw(planes, frame.flatten(0, -2), shift.flatten(0, -2), brightness.flatten(0, -2), dtype)
    observations: Tensor = drawn.unflatten(0, frame.shape[:-1]).movedim(-1, -3)
    return observations


def _drawn_like(planes: Tensor, frame: Tensor, _: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    return brightness.new_empty(len(frame), *planes.shape[1:], frame.shape[-1], dtype=dtype)


def _draw_by_kernel(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Any:
    return _kernels.draw(planes, frame.contiguous(), shift.contiguous(), brightness.contiguous(), dtype)


@fleet_op(like=_drawn_like, kernel=_draw_by_kernel)
def _draw(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, H, W] by [M, P] -> [M, H, W, P]."""
    shifted = functional.shifted_pixels(planes, frame, shift).to(brightness.dtype) * brightness[..., None, None]
    return shifted.movedim(-3, -1).contiguous().to(dtype)
