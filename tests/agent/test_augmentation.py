"""Shift and intensity against a naive loop over pixels."""

import numpy as np
import torch
from conftest import plain_params

from spr.agent.augmentation import AugmentParams, observations
from spr.ops.functional import shifted_pixels, shifted_rows


def naive(frames, offset, visible, shift, factor):
    out = np.zeros((4, 84, 84))
    for c in range(4):
        for y in range(84):
            for x in range(84):
                row, column = min(max(y + shift[0], 0), 83), min(max(x + shift[1], 0), 83)
                out[c, y, x] = visible[c] * factor * frames[offset + c, row, column] / 255
    return out


def test_every_observation_gets_its_own_shift_and_factor():
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (2, 3, 9, 1, 84, 84), dtype=torch.uint8, generator=generator)
    offsets = torch.tensor([0, 1, 5])
    visible = torch.tensor([1.0, 1.0, 0.0, 1.0]).expand(2, 3, 3, 4)
    shift = torch.randint(-4, 5, (2, 3, 3, 2), generator=generator)
    shift[0, 0, 0], shift[1, 2, 2] = torch.tensor([-4, 4]), torch.tensor([4, -4])
    factor = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64) + 0.5
    params = AugmentParams(shift, shift[..., :0], torch.zeros(2, 3, 3), factor)
    out = observations(frames, offsets, visible, params, 4, torch.float64)
    assert out.shape == (2, 3, 3, 4, 84, 84)
    for s, b, o in [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 2, 2)]:
        expected = naive(
            frames[s, b, :, 0].numpy(),
            offsets[o].item(),
            visible[s, b, o].tolist(),
            shift[s, b, o].tolist(),
            factor[s, b, o].item(),
        )
        np.testing.assert_allclose(out[s, o, b].numpy(), expected, rtol=1e-12)


def test_without_shift_frames_are_only_scaled():
    frames = torch.arange(4 * 84 * 84).remainder(256).to(torch.uint8).view(1, 1, 4, 1, 84, 84)
    out = observations(frames, torch.tensor([0]), torch.ones(1, 1, 1, 4), plain_params(1, 1), 0, torch.float32)
    torch.testing.assert_close(out[0, 0, 0], frames[0, 0, :, 0] / 255)


def test_pixels_and_rows_give_the_same():
    """What a GPU gathers pixel by pixel a CPU copies row by row."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (9, 84, 84), dtype=torch.uint8, generator=generator)
    frame = torch.randint(0, 9, (3, 5, 4), generator=generator)
    shift = torch.randint(-4, 5, (3, 5, 2), generator=generator)
    assert torch.equal(shifted_pixels(frames, frame, shift), shifted_rows(frames, frame, shift, 4))


def test_a_crop_is_shifted_within_its_own_edges():
    frames = torch.randint(0, 256, (1, 1, 4, 1, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shift, corner = torch.tensor([-3, 2]), torch.tensor([4, 1])
    params = AugmentParams(
        shift.view(1, 1, 1, 2), corner.view(1, 1, 1, 2), torch.full((1, 1, 1), 4), torch.ones(1, 1, 1)
    )
    out = observations(frames, torch.tensor([0]), torch.ones(1, 1, 1, 4), params, 4, torch.float32)
    for y, x in [(0, 0), (2, 83), (40, 41), (83, 79), (83, 83)]:
        row, column = 4 + min(max(y - 3, 0), 79), 1 + min(max(x + 2, 0), 79)
        torch.testing.assert_close(out[0, 0, 0, :, y, x], frames[0, 0, :, 0, row, column] / 255)


def test_colour_and_other_sizes():
    """Channels of a frame lie beside each other, frames one after another; frames need not be square."""
    frames = torch.randint(0, 256, (1, 2, 5, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shift = torch.tensor([[2, -3], [0, 5]]).view(1, 2, 1, 2)
    params = AugmentParams(shift, shift[..., :0], shift[..., 0] * 0, torch.ones(1, 2, 1))
    visible = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    out = observations(frames, torch.tensor([3]), visible, params, 5, torch.float32)
    assert out.shape == (1, 1, 2, 6, 20, 30)
    assert not out[0, 0, :, :3].any()
    for row, (down, right) in enumerate([(2, -3), (0, 5)]):
        for y, x in [(0, 0), (19, 29), (7, 1), (18, 28)]:
            expected = frames[0, row, 4, :, min(max(y + down, 0), 19), min(max(x + right, 0), 29)] / 255
            torch.testing.assert_close(out[0, 0, row, 3:, y, x], expected)
