"""Owns how stored frames become what the networks see: stacking, shift and intensity, pure functions of their draws.

Leading dimensions are free: [B, ...] for one agent, [S, B, ...] for a fleet.
"""

import torch
from torch import Tensor

from spr.config import SIDE, STACK
from spr.draws import Looks


def observations(frames: Tensor, offsets: Tensor, visible: Tensor, looks: Looks, largest_shift: int) -> Tensor:
    """Stack, shift and scale frames in one pass over the pixels.

    frames [..., B, L, 84, 84] uint8, consecutive in time; offsets [O], the position of each observation's oldest frame;
    visible [..., B, O, 4], zero for frames of an earlier episode. Returns [..., O, B, 4, 84, 84] in the dtype of the
    factors, where 1 is white: time comes before the batch so that the networks take their slices without copying.
    """
    *lead, batch, length = frames.shape[:-2]
    device = frames.device
    sequence = _count(frames.shape[:-3].numel(), device).view(*lead, 1, batch, 1) * length
    frame = sequence + offsets[:, None, None] + _count(STACK, device)  # [..., O, B, 4]
    shift = looks.shift.transpose(-3, -2)  # [..., O, B, 2]
    flat = frames.reshape(-1, SIDE, SIDE)
    if looks.corner.shape[-1]:
        side = looks.side.transpose(-2, -1)[..., None, None]  # [..., O, B, 1, 1]
        stacked = shifted_pixels(flat, frame, shift, looks.corner.transpose(-3, -2), side)
    elif device.type == "cpu":
        stacked = shifted_rows(flat, frame, shift, largest_shift)
    else:
        stacked = shifted_pixels(flat, frame, shift)
    brightness = (visible * (looks.factor / 255)[..., None]).transpose(-3, -2)  # [..., O, B, 4]
    # Converted first and scaled in place: a mixed product would hold the floating-point pixels twice.
    return stacked.to(looks.factor.dtype).mul_(brightness[..., None, None])


def shifted_pixels(
    frames: Tensor, frame: Tensor, shift: Tensor, corner: Tensor | None = None, side: Tensor | None = None
) -> Tensor:
    """Stack frames [N, 84, 84], chosen by index [..., 4], shifted by pixels [..., 2]; clamping replicates the edge.

    The edge is that of a crop with its corner at [..., 2] and a side of [..., 1, 1], or of the frame. A GPU computes
    the indices as it goes, and nothing lies between the replay and the observation.
    """
    places = _count(SIDE, frames.device)[:, None] + shift[..., None, :]  # [..., 84, 2]
    if corner is None or side is None:
        places = places.clamp(0, SIDE - 1)
    else:
        places = torch.minimum(places.clamp(min=0), side - 1) + corner[..., None, :]
    rows, columns = places.unbind(-1)  # [..., 84] each
    return frames[frame[..., None, None], rows[..., None, :, None], columns[..., None, None, :]]


def shifted_rows(frames: Tensor, frame: Tensor, shift: Tensor, largest_shift: int) -> Tensor:
    """Do the same by copying whole rows, which suits a CPU: on two cores 8 to 10 ms a batch, by pixels 29 to 30.

    Rows are copied from a copy of the frames that is padded sideways by the largest shift: one that starts further left
    or right is a shifted one.
    """
    down, right = shift.unbind(-1)
    rows = (torch.arange(SIDE, device=frames.device) + down[..., None]).clamp(0, SIDE - 1)  # [..., 84]
    row_of = frame[..., None] * SIDE + rows[..., None, :]  # [..., 4, 84]
    flat = frames.reshape(-1, SIDE)
    left, end = flat[:, :1].expand(-1, largest_shift), flat[:, -1:].expand(-1, largest_shift)
    wide = torch.cat([left, flat, end], 1)
    start = row_of * wide.shape[1] + (largest_shift + right[..., None, None])
    stacked = wide.view(-1).unfold(0, SIDE, 1).index_select(0, start.reshape(-1))
    return stacked.view(*row_of.shape, SIDE)


def _count(end: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... in 32 bits, of which a GPU makes cheaper indices than of 64."""
    return torch.arange(end, device=device, dtype=torch.int32)
