"""Shift and intensity against a naive loop over pixels."""

import numpy as np
import torch

from spr.augment import observations


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
    frames = torch.randint(0, 256, (2, 3, 9, 84, 84), dtype=torch.uint8, generator=generator)
    offsets = torch.tensor([0, 1, 5])
    visible = torch.tensor([1.0, 1.0, 0.0, 1.0]).expand(2, 3, 3, 4)
    shift = torch.randint(-4, 5, (2, 3, 3, 2), generator=generator)
    shift[0, 0, 0], shift[1, 2, 2] = torch.tensor([-4, 4]), torch.tensor([4, -4])
    factor = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64) + 0.5
    out = observations(frames, offsets, visible, shift, factor, largest_shift=4)
    assert out.shape == (2, 3, 3, 4, 84, 84)
    for s, b, o in [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 2, 2)]:
        expected = naive(
            frames[s, b].numpy(),
            offsets[o].item(),
            visible[s, b, o].tolist(),
            shift[s, b, o].tolist(),
            factor[s, b, o].item(),
        )
        np.testing.assert_allclose(out[s, o, b].numpy(), expected, rtol=1e-12)


def test_without_shift_frames_are_only_scaled():
    frames = torch.arange(4 * 84 * 84).remainder(256).to(torch.uint8).view(1, 1, 4, 84, 84)
    none = torch.zeros(1, 1, 1, dtype=torch.int64)
    out = observations(
        frames, torch.tensor([0]), torch.ones(1, 1, 1, 4), none[..., None].expand(1, 1, 1, 2), none + 1.0, 0
    )
    torch.testing.assert_close(out[0, 0, 0], frames[0, 0] / 255)
