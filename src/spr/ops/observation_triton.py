"""Owns the kernel that draws observations from stored frames, written in Triton, for a GPU only.

`observation_ops` calls it and has its plain twin; the tests compare the two. Shapes: N observations, P planes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 512  # of an observation that one program draws


@triton.jit
def _draw(
    planes, index, shift, brightness, out,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    observation = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    plane = tl.arange(0, PADDED)
    inside = (pixel < HEIGHT * WIDTH)[:, None] & (plane < PLANES)[None, :]
    down, right = tl.load(shift + 2 * observation), tl.load(shift + 2 * observation + 1)
    row = tl.minimum(tl.maximum(pixel // WIDTH + down, 0), HEIGHT - 1)
    column = tl.minimum(tl.maximum(pixel % WIDTH + right, 0), WIDTH - 1)
    which = tl.load(index + observation * PLANES + plane, mask=plane < PLANES, other=0).to(tl.int64)
    bright = tl.load(brightness + observation * PLANES + plane, mask=plane < PLANES, other=0.0)
    source = planes + which[None, :] * (HEIGHT * WIDTH) + (row * WIDTH + column)[:, None]
    value = tl.load(source, mask=inside, other=0).to(tl.float32) * bright[None, :]
    target = out + (observation * (HEIGHT * WIDTH) + pixel)[:, None] * PLANES + plane[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def draw(planes: Tensor, index: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw observations [N, H, W, P] from planes, by index [N, P], shift [N, 2] and brightness [N, P]."""
    count, stacked = index.shape
    height, width = planes.shape[1:]
    out = torch.empty(count, height, width, stacked, dtype=dtype, device=planes.device)
    _draw[count, triton.cdiv(height * width, _PIXELS)](
        planes, index, shift, brightness, out,
        HEIGHT=height, WIDTH=width, PLANES=stacked, PADDED=triton.next_power_of_2(stacked), PIXELS=_PIXELS,
    )  # fmt: skip
    return out
