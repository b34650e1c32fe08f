"""Owns what an update looks at: which observations, by name, and how stored frames become them.

Stacking, shift, crop and intensity are pure functions of their random numbers. Leading dimensions are free: [B, ...]
for one agent, [S, B, ...] for a fleet. O observations per sequence, of P planes each (frames times channels).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from spr.config.config import Config
from spr.ops import functional, kernels, observation_ops


class View(NamedTuple):
    """One of the observations that an update sees of each sequence."""

    role: str  # "obs": s_t for the RL loss; "anchor": s_t for the auxiliary loss; "target"; "bootstrap": s_{t+n}
    offset: int  # steps after s_t; of a bootstrap the most, where n changes
    augmented: bool
    needs_grad: bool


def views_of(config: Config) -> tuple[View, ...]:
    """Return the observations of an update; those that gradients reach come first, the bootstrap last.

    Where the RL loss sees augmented observations too, s_t is seen once, and is obs and anchor at the same time.
    """
    rl, learnt = config.augment.rl, not config.learner.stop_gradient
    targets = config.target_offsets
    return (
        View("obs", 0, rl, needs_grad=True),
        *([View("anchor", 0, augmented=True, needs_grad=True)] if targets and not rl else []),
        *(View("target", offset, augmented=True, needs_grad=learnt) for offset in targets),
        View("bootstrap", config.longest_return - config.bootstrap_early, rl, needs_grad=False),
    )


class ViewIndices(NamedTuple):
    """Where each role is found among the views of an update."""

    obs: int
    anchor: int
    targets: slice
    bootstrap: int
    with_grad: int  # how many views, from the first, gradients reach


def view_indices(config: Config) -> ViewIndices:
    """Return where each role is found."""
    views = views_of(config)
    roles = [view.role for view in views]
    first = roles.index("target") if "target" in roles else 1
    return ViewIndices(
        obs=roles.index("obs"),
        anchor=roles.index("anchor" if "anchor" in roles else "obs"),
        targets=slice(first, first + roles.count("target")),
        bootstrap=roles.index("bootstrap"),
        with_grad=sum(view.needs_grad for view in views),
    )


class Planes(NamedTuple):
    """Observations whose pixels are not scaled yet: a CPU does that view by view, while they are in its cache."""

    pixels: Tensor  # [..., O, B, P, H, W] uint8
    brightness: Tensor  # [..., O, B, P] what they are multiplied by

    def scaled(self) -> Tensor:
        """Return the observations [..., O, B, P, H, W], where 1 is white."""
        # Converted first and scaled in place: a mixed product would hold the floating-point pixels twice.
        return self.pixels.to(self.brightness.dtype).mul_(self.brightness[..., None, None])


Observed = Tensor | Planes


class Views(NamedTuple):
    """The observations of an update: those that gradients reach, and the others."""

    with_grad: Observed  # [..., O1, B, P, H, W]
    without_grad: Observed  # [..., O2, B, P, H, W]


class AugmentParams(NamedTuple):
    """How observations are augmented; pixels in 32 bits, since a GPU computes an index from them for every pixel."""

    shift: Tensor  # [..., B, O, 2] pixels, down and right
    corner: Tensor  # [..., B, O, 2] pixels, where the crop begins; without cropping [..., B, O, 0]
    margin: Tensor  # [..., B, O] pixels by which the crop is smaller than the frame
    factor: Tensor  # [..., B, O] brightness


def augment_params(config: Config, shift: Tensor, corner: Tensor, jitter: Tensor) -> AugmentParams:
    """Turn uniform numbers (shift, corner) and normal ones (jitter) into how each view is augmented."""
    augment, views = config.augment, views_of(config)
    margin = torch.full(jitter.shape, augment.crop_margin, device=jitter.device, dtype=torch.int32)
    # A crop is padded by the largest shift on every side, and cut to a whole frame at any place inside.
    shift = whole_number(shift, 2 * augment.shift - augment.crop_margin + 1).int() - augment.shift
    corner = whole_number(corner, augment.crop_margin + 1).int()
    jitter = jitter.clamp(-2, 2) * augment.intensity
    if not all(view.augmented for view in views):
        on = torch.tensor([view.augmented for view in views], device=jitter.device)
        shift, corner, jitter, margin = shift * on[:, None], corner * on[:, None], jitter * on, margin * on
    return AugmentParams(shift, corner, margin, 1 + jitter)


def whole_number(uniform: Tensor, count: int | Tensor) -> Tensor:
    """Turn numbers in [0, 1) into whole ones from 0 to count - 1, alike in probability."""
    whole = (uniform * count).floor().long()
    return whole.clamp(max=count - 1) if isinstance(count, int) else torch.minimum(whole, count - 1)


def make_views(
    config: Config, frames: Tensor, offsets: Tensor, visible: Tensor, params: AugmentParams, dtype: torch.dtype
) -> Views:
    """Build the observations of an update from frames [..., B, L, C, H, W] (see `observations`)."""
    given = frames, offsets, visible, params, config.augment.shift
    whole = observations(*given, dtype) if kernels.has_kernels(frames) else stacked_planes(*given)
    first, lead = view_indices(config).with_grad, offsets.dim() + params.factor.dim() - 3

    def part(tensor: Tensor, begin: int, end: int) -> Tensor:
        return tensor.narrow(lead, begin, end - begin)

    return Views(tree_map(lambda t: part(t, 0, first), whole), tree_map(lambda t: part(t, first, len(offsets)), whole))


def observations(
    frames: Tensor, offsets: Tensor, visible: Tensor, params: AugmentParams, largest_shift: int, dtype: torch.dtype
) -> Tensor:
    """Stack, shift and scale frames in one pass over the pixels.

    frames [..., B, L, C, H, W] uint8, consecutive in time; offsets [O], the position of each observation's oldest
    frame; visible [..., B, O, stack], zero for frames of an earlier episode. Returns [..., O, B, P, H, W] in a dtype,
    where 1 is white: O comes before the batch so that the networks take their slices without copying.
    """
    if kernels.has_kernels(frames) and not params.corner.shape[-1]:
        frame, brightness = _sources(frames, offsets, visible, params)
        shift = params.shift.transpose(-3, -2)  # [..., O, B, 2]
        return observation_ops.draw(frames.reshape(-1, *frames.shape[-2:]), frame, shift, brightness, dtype)
    return stacked_planes(frames, offsets, visible, params, largest_shift).scaled().to(dtype)


def stacked_planes(
    frames: Tensor, offsets: Tensor, visible: Tensor, params: AugmentParams, largest_shift: int
) -> Planes:
    """Stack and shift frames, as `observations` does, and say how they are to be scaled."""
    frame, brightness = _sources(frames, offsets, visible, params)
    shift = params.shift.transpose(-3, -2)  # [..., O, B, 2]
    planes = frames.reshape(-1, *frames.shape[-2:])
    if params.corner.shape[-1]:
        corner, margin = params.corner.transpose(-3, -2), params.margin.transpose(-2, -1)
        return Planes(functional.shifted_pixels(planes, frame, shift, corner, margin), brightness)
    return Planes(functional.shifted_rows(planes, frame, shift, largest_shift), brightness)


def _sources(frames: Tensor, offsets: Tensor, visible: Tensor, params: AugmentParams) -> tuple[Tensor, Tensor]:
    """Return which plane each plane of an observation is, and what its pixels are multiplied by, [..., O, B, P]."""
    assert frames.dim() == visible.dim() + 2 == params.factor.dim() + 3
    *lead, batch, length, channels, _, _ = frames.shape
    device = frames.device
    sequence = functional.arange32(frames.shape[:-4].numel(), device).view(*lead, 1, batch, 1) * length
    frame = sequence + offsets[:, None, None] + functional.arange32(visible.shape[-1], device)  # [..., O, B, stack]
    brightness = (visible * (params.factor / 255)[..., None]).transpose(-3, -2)  # [..., O, B, stack]
    if channels > 1:
        frame = (frame[..., None] * channels + functional.arange32(channels, device)).flatten(-2)  # [..., O, B, P]
        brightness = brightness.repeat_interleave(channels, -1)
    return frame, brightness
