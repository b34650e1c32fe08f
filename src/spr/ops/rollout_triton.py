"""Owns the kernels of the transition model applied K times, in Triton, for a GPU only.

One program for each agent and sample, whose latent fits into its registers. `rollout_ops` calls them, says what they
mean, and has a plain twin; the tests compare the two. Shapes: S agents, B batch, K steps ahead, C channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spr.ops import functional, launch

_LEAST_SPAN = tl.constexpr(functional.LEAST_SPAN)


@triton.jit
def _places(sample, pixel, channel, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Where the numbers of a sample lie, [pixels, channels]."""
    return (sample * SIZE + pixel)[:, None] * CHANNELS + channel[None, :]


@triton.jit
def _add_each(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _wider(low, high, other_low, other_high):
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def _taps(x, weight, sample, pixel, channel, total, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
          BACK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add a 3x3 convolution of a sample of x, or its transpose, tap by tap."""
    for tap in range(9):
        side = 8 - tap if BACK else tap
        y, column = pixel // WIDTH + side // 3 - 1, pixel % WIDTH + side % 3 - 1
        inside = (y >= 0) & (y < HEIGHT) & (column >= 0) & (column < WIDTH) & (pixel < HEIGHT * WIDTH)
        where = _places(sample, y * WIDTH + column, channel, HEIGHT * WIDTH, CHANNELS)
        a = tl.load(x + where, mask=inside[:, None], other=0.0)
        w = tl.load(weight + (tap * CHANNELS + channel)[:, None] * CHANNELS + channel[None, :])
        total = tl.dot(a, tl.trans(w) if BACK else w, total, input_precision=PRECISION)
    return total


@triton.jit
def _statistics(sums, sample, channel, bn_weight, bn_bias, agent, eps, BATCH: tl.constexpr, PADDED: tl.constexpr,
                CHANNELS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Batch norm's mean, inverse deviation, scale and shift of each channel, from the sums of every sample."""
    b = tl.arange(0, PADDED)
    where = sums + ((sample // BATCH * BATCH + b) * 2 * CHANNELS)[:, None] + channel[None, :]
    some = (b < BATCH)[:, None]
    total = tl.sum(tl.load(where, mask=some, other=0.0), 0)
    squares = tl.sum(tl.load(where + CHANNELS, mask=some, other=0.0), 0)
    mean = total / (BATCH * SIZE)
    variance = tl.maximum(squares / (BATCH * SIZE) - mean * mean, 0.0)
    inverse = 1 / tl.sqrt(variance + eps)
    scale = tl.load(bn_weight + agent * CHANNELS + channel) * inverse
    return mean, inverse, scale, tl.load(bn_bias + agent * CHANNELS + channel) - mean * scale


@triton.jit
def _first(
    inputs, weight, action_bias, r, sums, step,
    BATCH: tl.constexpr, STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Give r = relu(convolution of z + what the action adds), and each channel's sums of r and its square."""
    agent, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = HEIGHT * WIDTH
    sample = (agent * STEPS + step) * BATCH + b
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    real = (pixel < size)[:, None]
    here = _places(sample, pixel, channel, size, CHANNELS)
    total = tl.load(action_bias + here, mask=real, other=0.0)
    before = (agent * (STEPS + 1) + step) * BATCH + b
    total = _taps(
        inputs, weight + agent * 9 * CHANNELS * CHANNELS, before, pixel, channel, total,
        HEIGHT, WIDTH, CHANNELS, False, PRECISION,
    )  # fmt: skip
    total = tl.where(real, tl.maximum(total, 0.0), 0.0)
    tl.store(r + here, total, mask=real)
    tl.store(sums + sample * 2 * CHANNELS + channel, tl.sum(total, 0))
    tl.store(sums + (sample * 2 + 1) * CHANNELS + channel, tl.sum(total * total, 0))


@triton.jit
def _second(
    r, sums, bn_weight, bn_bias, weight, bias, normal, z, inputs, scales, step, eps,
    BATCH: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Give z = relu(convolution of batch-normalised r + bias), scaled to [0, 1]; and by what it was scaled."""
    agent, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = HEIGHT * WIDTH
    sample = (agent * STEPS + step) * BATCH + b
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    real = (pixel < size)[:, None]
    here = _places(sample, pixel, channel, size, CHANNELS)
    _, _, scale, move = _statistics(
        sums, sample, channel, bn_weight, bn_bias, agent, eps, BATCH, PADDED, CHANNELS, size
    )
    value = tl.load(r + here, mask=real, other=0.0) * scale[None, :] + move[None, :]
    tl.store(normal + here, value.to(normal.dtype.element_ty), mask=real)
    tl.debug_barrier()  # what other threads of this program wrote is read now
    total = tl.zeros((PIXELS, CHANNELS), tl.float32) + tl.load(bias + agent * CHANNELS + channel)[None, :]
    total = _taps(
        normal, weight + agent * 9 * CHANNELS * CHANNELS, sample, pixel, channel, total,
        HEIGHT, WIDTH, CHANNELS, False, PRECISION,
    )  # fmt: skip
    total = tl.maximum(total, 0.0)
    # Both at once: threads wait for each other at each of them.
    low, high = tl.reduce((tl.where(real, total, float("inf")), tl.where(real, total, float("-inf"))), 1, _wider)
    low, high = tl.reduce((low, high), 0, _wider)
    # Divided exactly, which is not a matter of course on a GPU: its gradient finds the largest value by z == 1.
    total = tl.div_rn(total - low, tl.maximum(high - low, _LEAST_SPAN) + tl.zeros_like(total))
    tl.store(z + here, total, mask=real)
    after = (agent * (STEPS + 1) + step + 1) * BATCH + b
    tl.store(inputs + _places(after, pixel, channel, size, CHANNELS), total.to(inputs.dtype.element_ty), mask=real)
    tl.store(scales + sample * 2, low)
    tl.store(scales + sample * 2 + 1, high - low)


@triton.jit
def _second_back(
    g, chain, z, scales, r, sums, bn_weight, bn_bias, weight, d_second, d_norm, back_sums, d_bias, step, eps,
    BATCH: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of z to that of batch norm's output; and each channel's sums for batch norm's own gradient."""
    agent, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = HEIGHT * WIDTH
    sample = (agent * STEPS + step) * BATCH + b
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    here = _places(sample, pixel, channel, size, CHANNELS)
    real = (pixel < size)[:, None]
    low, wide = tl.load(scales + sample * 2), tl.load(scales + sample * 2 + 1)
    span = tl.maximum(wide, _LEAST_SPAN)
    mine, value = tl.load(g + here, mask=real, other=0.0), tl.load(z + here, mask=real, other=0.5)
    if not LAST:  # what came through the next step
        mine += tl.load(chain + _places(agent * BATCH + b, pixel, channel, size, CHANNELS), mask=real, other=0.0)
    # The scaling's gradient: shares of it go to the least and the largest values.
    lows, highs = (value == 0).to(tl.float32), (value == 1).to(tl.float32)
    moved, stretched, count_low, count_high = tl.reduce((mine, mine * value, lows, highs), 1, _add_each)
    moved, stretched, count_low, count_high = tl.reduce((moved, stretched, count_low, count_high), 0, _add_each)
    d_span = tl.where(wide >= _LEAST_SPAN, -stretched / span, 0.0)
    d_low = -moved / span - d_span
    mine = mine / span + lows * (d_low / tl.maximum(count_low, 1.0)) + highs * (d_span / tl.maximum(count_high, 1.0))
    mine = tl.where(real & (value + low > 0), mine, 0.0)  # ReLU's; neither is below 0
    tl.store(d_second + here, mine.to(d_second.dtype.element_ty), mask=real)
    tl.store(d_bias + sample * CHANNELS + channel, tl.sum(mine, 0))
    tl.debug_barrier()
    total = _taps(
        d_second, weight + agent * 9 * CHANNELS * CHANNELS, sample, pixel, channel,
        tl.zeros((PIXELS, CHANNELS), tl.float32), HEIGHT, WIDTH, CHANNELS, True, PRECISION,
    )  # fmt: skip
    tl.store(d_norm + here, total, mask=real)
    mean, inverse, _, _ = _statistics(
        sums, sample, channel, bn_weight, bn_bias, agent, eps, BATCH, PADDED, CHANNELS, size
    )
    total = tl.where(real, total, 0.0)
    normal = (tl.load(r + here, mask=real, other=0.0) - mean[None, :]) * inverse[None, :]
    tl.store(back_sums + sample * 2 * CHANNELS + channel, tl.sum(total, 0))
    tl.store(back_sums + (sample * 2 + 1) * CHANNELS + channel, tl.sum(total * normal, 0))


@triton.jit
def _first_back(
    d_norm, r, sums, bn_weight, bn_bias, back_sums, weight, d_first, d_product, chain, step, eps,
    BATCH: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of batch norm's output to that of the convolution before it, and on to that of z."""
    agent, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = HEIGHT * WIDTH
    sample = (agent * STEPS + step) * BATCH + b
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    mean, inverse, scale, _ = _statistics(
        sums, sample, channel, bn_weight, bn_bias, agent, eps, BATCH, PADDED, CHANNELS, size
    )
    every = tl.arange(0, PADDED)
    where = back_sums + ((sample // BATCH * BATCH + every) * 2 * CHANNELS)[:, None] + channel[None, :]
    some = (every < BATCH)[:, None]
    d_mean = tl.sum(tl.load(where, mask=some, other=0.0), 0) / (BATCH * size)
    d_square = tl.sum(tl.load(where + CHANNELS, mask=some, other=0.0), 0) / (BATCH * size)
    here = _places(sample, pixel, channel, size, CHANNELS)
    real = (pixel < size)[:, None]
    value = tl.load(r + here, mask=real, other=0.0)
    d = tl.load(d_norm + here, mask=real, other=0.0) - d_mean[None, :]
    d = scale[None, :] * (d - (value - mean[None, :]) * inverse[None, :] * d_square[None, :])
    d = tl.where(value > 0, d, 0.0)
    tl.store(d_first + here, d, mask=real)
    tl.store(d_product + here, d.to(d_product.dtype.element_ty), mask=real)
    tl.debug_barrier()
    total = _taps(
        d_product, weight + agent * 9 * CHANNELS * CHANNELS, sample, pixel, channel,
        tl.zeros((PIXELS, CHANNELS), tl.float32), HEIGHT, WIDTH, CHANNELS, True, PRECISION,
    )  # fmt: skip
    tl.store(chain + _places(agent * BATCH + b, pixel, channel, size, CHANNELS), total, mask=real)


@triton.jit
def _weights_back(
    x, d, out,
    BATCH: tl.constexpr, STEPS: tl.constexpr, X_STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a row of three taps, summed over a share of all steps and samples."""
    agent, split, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = HEIGHT * WIDTH
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    y, column = pixel // WIDTH + row - 1, pixel % WIDTH
    here = (y >= 0) & (y < HEIGHT) & (pixel < size)
    left = tl.zeros((CHANNELS, CHANNELS), tl.float32)
    middle, right = left, left
    each: tl.constexpr = (STEPS * BATCH + SPLITS - 1) // SPLITS
    for j in range(each):
        i = split * each + j
        there = i < STEPS * BATCH
        where = _places(agent * X_STEPS * BATCH + i, y * WIDTH + column, channel, size, CHANNELS)
        b = tl.load(
            d + _places(agent * STEPS * BATCH + i, pixel, channel, size, CHANNELS),
            mask=((pixel < size) & there)[:, None], other=0.0,
        )  # fmt: skip
        a = tl.load(x + where - CHANNELS, mask=(here & there & (column > 0))[:, None], other=0.0)
        left = tl.dot(tl.trans(a), b, left, input_precision=PRECISION)
        a = tl.load(x + where, mask=(here & there)[:, None], other=0.0)
        middle = tl.dot(tl.trans(a), b, middle, input_precision=PRECISION)
        a = tl.load(x + where + CHANNELS, mask=(here & there & (column < WIDTH - 1))[:, None], other=0.0)
        right = tl.dot(tl.trans(a), b, right, input_precision=PRECISION)
    out += ((agent * SPLITS + split) * 9 + row * 3) * CHANNELS * CHANNELS
    tile = channel[:, None] * CHANNELS + channel[None, :]
    tl.store(out + tile, left)
    tl.store(out + CHANNELS * CHANNELS + tile, middle)
    tl.store(out + 2 * CHANNELS * CHANNELS + tile, right)


# As many registers as leave four programs to a processor; the compiler would take more, and leave two.
_LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "maxnreg": 128}


def _shapes(z: Tensor, steps: int) -> dict[str, Any]:
    _, batch, height, width, channels = z.shape
    return {
        "BATCH": batch, "STEPS": steps, "HEIGHT": height, "WIDTH": width, "CHANNELS": channels,
        "PIXELS": max(16, triton.next_power_of_2(height * width)), "PRECISION": launch.precision_of(z),
    }  # fmt: skip


def rollout(
    z: Tensor, action_bias: Tensor, first: Tensor, bn_weight: Tensor, bn_bias: Tensor, second: Tensor, bias: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Roll the transition model out; `rollout_ops.rollout` explains the shapes."""
    agents, steps, batch = action_bias.shape[:3]
    channels = z.shape[-1]
    latents, r = torch.empty_like(action_bias), torch.empty_like(action_bias)
    inputs = torch.empty(agents, steps + 1, *z.shape[1:], dtype=first.dtype, device=z.device)
    inputs[:, 0].copy_(z)
    normal = torch.empty_like(action_bias, dtype=first.dtype)
    sums, scales = z.new_empty(agents, steps, batch, 2, channels), z.new_empty(agents, steps, batch, 2)
    shapes, padded = _shapes(z, steps) | _LAUNCH, triton.next_power_of_2(batch)
    for step in range(steps):
        _first[agents, batch](inputs, first, action_bias, r, sums, step, **shapes)
        _second[agents, batch](
            r, sums, bn_weight, bn_bias, second, bias, normal, latents, inputs, scales, step, eps,
            PADDED=padded, **shapes,
        )  # fmt: skip
    return latents, r, sums, scales, inputs, normal


def rollout_back(
    g: Tensor, latents: Tensor, r: Tensor, sums: Tensor, scales: Tensor, inputs: Tensor, normal: Tensor, first: Tensor,
    bn_weight: Tensor, bn_bias: Tensor, second: Tensor, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of z and action_bias, and parts of the others' that are to be summed (see `rollout_ops`)."""
    agents, steps, batch = g.shape[:3]
    channels = g.shape[-1]
    d_z, d_first, d_norm = g.new_empty(g[:, 0].shape), torch.empty_like(g), torch.empty_like(g)
    d_product, d_second = torch.empty_like(normal), torch.empty_like(normal)
    back_sums, d_bias = torch.empty_like(sums), g.new_empty(agents, steps, batch, channels)
    shapes = _shapes(d_z, steps)
    padded = {"PADDED": triton.next_power_of_2(batch), **_LAUNCH}
    for step in reversed(range(steps)):
        _second_back[agents, batch](
            g, d_z, latents, scales, r, sums, bn_weight, bn_bias, second, d_second, d_norm, back_sums, d_bias, step,
            eps, LAST=step == steps - 1, **shapes, **padded,
        )  # fmt: skip
        _first_back[agents, batch](
            d_norm, r, sums, bn_weight, bn_bias, back_sums, first, d_first, d_product, d_z, step, eps,
            **shapes, **padded,
        )  # fmt: skip
    # The sum behind a gradient of weights is divided among enough programs to fill a GPU.
    splits = max(1, min(steps * batch // 4, launch.PROGRAMS // (3 * agents)))
    parts = []
    for x, d in ((inputs, d_product), (normal, d_second)):
        parts.append(g.new_empty(agents, splits, 9, channels, channels))
        _weights_back[agents, splits, 3](
            x, d, parts[-1], X_STEPS=x.shape[1], SPLITS=splits, num_warps=4, num_stages=3, **shapes
        )
    # Summed here: the compiler's own sum over a middle dimension took four times as long.
    return d_z, d_first, *(part.sum(1) for part in parts), back_sums, d_bias
