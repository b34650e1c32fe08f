"""Owns kernels written in Triton, for a GPU only: what the compiler's own code spends the most memory traffic on.

`fused` calls them, says what they mean, and has a plain twin of each; the tests compare the two. Everything is summed
in float32 and in a fixed order. Shapes: S agents, N observations, B batch, K steps ahead, C channels, P planes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 512  # of an observation that one program draws
_PROGRAMS = 528  # four for each processor of an H200


def precision_of(x: Tensor) -> str:
    """Return how products are taken: float32 ones as torch is told to."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


# ---- random numbers


@triton.jit
def _random(state, normal, uniform, NORMAL: tl.constexpr, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    """Philox 4x32-10 (Salmon et al. 2011): four words from a seed, a place, and how often was drawn before."""
    agent = tl.program_id(0).to(tl.int64)
    seed, turn = tl.load(state + 2 * agent), tl.load(state + 2 * agent + 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    none = place * 0
    low, high = none + (turn & 0xFFFFFFFF).to(tl.uint32), none + (turn >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, place, low, high, none)
    normals: tl.constexpr = (NORMAL + 3) // 4
    uniforms: tl.constexpr = (UNIFORM + 3) // 4
    # Normal numbers come in pairs, by their distance from 0 and an angle (Box and Muller 1958).
    some = place < normals
    target = normal + agent * NORMAL + place
    for pair in tl.static_range(2):
        far, angle = a if pair == 0 else c, b if pair == 0 else d
        far = tl.sqrt(-2.0 * tl.log((far.to(tl.float32) + 1.0) * 2.0**-32))
        angle = angle.to(tl.float32) * (6.283185307179586 * 2.0**-32)
        one, two = 2 * pair * normals, (2 * pair + 1) * normals
        tl.store(target + one, far * tl.cos(angle), mask=some & (place + one < NORMAL))
        tl.store(target + two, far * tl.sin(angle), mask=some & (place + two < NORMAL))
    place -= normals
    some = (place >= 0) & (place < uniforms)
    target = uniform + agent * UNIFORM + place
    for i in tl.static_range(4):
        word = a if i == 0 else b if i == 1 else c if i == 2 else d
        value = (word >> 8).to(tl.float32) * 2.0**-24
        tl.store(target + i * uniforms, value, mask=some & (place + i * uniforms < UNIFORM))


def random(state: Tensor, normal: int, uniform: int) -> tuple[Tensor, Tensor]:
    """Draw numbers [S, ...] of each kind, and advance the streams [S, 2]: seeds, and how often was drawn."""
    agents = len(state)
    made = torch.empty(agents, normal, device=state.device), torch.empty(agents, uniform, device=state.device)
    places = triton.cdiv(normal, 4) + triton.cdiv(uniform, 4)
    if places:
        _random[agents, triton.cdiv(places, 256)](state, *made, NORMAL=normal, UNIFORM=uniform, BLOCK=256)
        state[:, 1] += 1
    return made


# ---- observations


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


# ---- convolutions, each with its bias and ReLU


@triton.jit
def _convolve(
    x, weight, bias, out, rows, apart,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    agent = tl.program_id(1).to(tl.int64)
    x += agent * apart
    weight += agent * KERNEL * KERNEL * CHANNELS * OUT
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place, sample = m % (OUT_HEIGHT * OUT_WIDTH), m // (OUT_HEIGHT * OUT_WIDTH)
    top, left = place // OUT_WIDTH * STRIDE, place % OUT_WIDTH * STRIDE
    start = ((sample * HEIGHT + top) * WIDTH + left) * CHANNELS
    k, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    run: tl.constexpr = KERNEL * CHANNELS  # numbers of a kernel's row, which lie side by side
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(KERNEL * run // BLOCK_K):
        ahead = (i * BLOCK_K + k) // run * (WIDTH * CHANNELS) + (i * BLOCK_K + k) % run
        a = tl.load(x + start[:, None] + ahead[None, :], mask=(m < rows)[:, None], other=0.0)
        b = tl.load(weight + (i * BLOCK_K + k)[:, None] * OUT + n[None, :], mask=(n < OUT)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total += tl.load(bias + agent * OUT + n, mask=n < OUT, other=0.0)[None, :]
    target = out + (agent * rows + m)[:, None] * OUT + n[None, :]
    tl.store(target, tl.maximum(total, 0.0).to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < OUT)[None, :])


def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """Return relu(convolution + bias) of [S, N, H, W, C] by [S, k, k, C, out]: [S, N, H', W', out]."""
    x = x if x[0].is_contiguous() else x.contiguous()  # agents may lie apart: then x is a part of each one's
    weight, bias = weight.contiguous(), bias.contiguous()
    agents, count, height, width, channels = x.shape
    kernel, outputs = weight.shape[1], weight.shape[-1]
    out_height, out_width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    rows = count * out_height * out_width
    out = torch.empty(agents, count, out_height, out_width, outputs, dtype=dtype, device=x.device)
    _convolve[triton.cdiv(rows, 128), agents](
        x, weight, bias, out, rows, x.stride(0),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, OUT=outputs, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        KERNEL=kernel, STRIDE=stride, BLOCK_M=128, BLOCK_N=max(16, triton.next_power_of_2(outputs)),
        BLOCK_K=next(size for size in (64, 32, 16) if kernel * kernel * channels % size == 0),
        PRECISION=precision_of(x), num_warps=8, num_stages=3, maxnreg=128,
    )  # fmt: skip
    return out


@triton.jit
def _upstream(g, y, row, n, real, OUT: tl.constexpr):
    """The gradient before the ReLU, [rows, out], from that after it and from what it gave."""
    where = row[:, None] * OUT + n[None, :]
    some = real[:, None] & (n < OUT)[None, :]
    d = tl.load(g + where, mask=some, other=0.0)
    return tl.where(tl.load(y + where, mask=some, other=0.0) > 0, d, 0.0)


@triton.jit
def _convolve_back(
    g, y, weight, out,
    COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of what was convolved. A program takes pixels that see the same taps: a stride apart."""
    agent = tl.program_id(2).to(tl.int64)
    up, left = tl.program_id(1) // STRIDE, tl.program_id(1) % STRIDE
    rows: tl.constexpr = (HEIGHT + STRIDE - 1) // STRIDE
    columns: tl.constexpr = (WIDTH + STRIDE - 1) // STRIDE
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    sample, row, column = m // (rows * columns), m // columns % rows, m % columns
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    weight += agent * KERNEL * KERNEL * CHANNELS * OUT
    side: tl.constexpr = KERNEL // STRIDE
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for i in range(side * side):
        down, right = i // side, i % side
        above, before = row - down, column - right
        real = (above >= 0) & (above < OUT_HEIGHT) & (before >= 0) & (before < OUT_WIDTH) & (sample < COUNT)
        d = _upstream(g, y, ((agent * COUNT + sample) * OUT_HEIGHT + above) * OUT_WIDTH + before, n, real, OUT)
        tap = (up + down * STRIDE) * KERNEL + left + right * STRIDE
        w = tl.load(
            weight + (tap * CHANNELS + c)[None, :] * OUT + n[:, None],
            mask=(n < OUT)[:, None] & (c < CHANNELS)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(d.to(w.dtype), w, total, input_precision=PRECISION)
    high, wide = row * STRIDE + up, column * STRIDE + left
    target = out + (((agent * COUNT + sample) * HEIGHT + high) * WIDTH + wide)[:, None] * CHANNELS + c[None, :]
    inside = (sample < COUNT) & (high < HEIGHT) & (wide < WIDTH)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def _kernel_back(
    g, y, x, out, apart,
    COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows of a kernel, summed over a share of all places; below them that of the bias."""
    agent, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    places: tl.constexpr = COUNT * OUT_HEIGHT * OUT_WIDTH
    run: tl.constexpr = KERNEL * CHANNELS
    total_rows: tl.constexpr = KERNEL * run
    k, n = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    ahead = k // run * (WIDTH * CHANNELS) + k % run
    x += agent * apart
    total, sums = tl.zeros((BLOCK_K, BLOCK_N), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    each: tl.constexpr = ((places + SPLITS - 1) // SPLITS + BLOCK_M - 1) // BLOCK_M
    for i in range(each):
        m = (split * each + i) * BLOCK_M + tl.arange(0, BLOCK_M)
        place, sample = m % (OUT_HEIGHT * OUT_WIDTH), m // (OUT_HEIGHT * OUT_WIDTH)
        top, left = place // OUT_WIDTH * STRIDE, place % OUT_WIDTH * STRIDE
        start = ((sample * HEIGHT + top) * WIDTH + left) * CHANNELS
        a = tl.load(x + start[:, None] + ahead[None, :], mask=(m < places)[:, None], other=0.0)
        d = _upstream(g, y, agent * places + m, n, m < places, OUT)
        total = tl.dot(tl.trans(a), d.to(a.dtype), total, input_precision=PRECISION)
        sums += tl.sum(d.to(tl.float32), 0)
    out += (agent * SPLITS + split) * (total_rows + 1) * OUT
    tl.store(out + k[:, None] * OUT + n[None, :], total, mask=(n < OUT)[None, :])
    tl.store(out + total_rows * OUT + n, sums, mask=(n < OUT) & (tl.program_id(0) == 0))


def _sides(x: Tensor, y: Tensor, weight: Tensor, stride: int) -> dict[str, Any]:
    """The shapes of a convolution that made y of x."""
    return {
        "COUNT": x.shape[1], "HEIGHT": x.shape[2], "WIDTH": x.shape[3], "CHANNELS": x.shape[4], "OUT": y.shape[4],
        "OUT_HEIGHT": y.shape[2], "OUT_WIDTH": y.shape[3], "KERNEL": weight.shape[1], "STRIDE": stride,
        "BLOCK_N": max(16, triton.next_power_of_2(y.shape[4])), "PRECISION": precision_of(x),
    }  # fmt: skip


def convolve_back(g: Tensor, y: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the gradient of x [S, N, H, W, C] from that of y = convolve(x, weight, ...)."""
    g, y, weight = g.contiguous(), y.contiguous(), weight.contiguous()
    agents, count, height, width, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    places = count * triton.cdiv(height, stride) * triton.cdiv(width, stride)
    _convolve_back[triton.cdiv(places, 64), stride * stride, agents](
        g, y, weight, out, **_sides(x, y, weight, stride),
        BLOCK_M=64, BLOCK_C=max(16, triton.next_power_of_2(channels)), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def kernel_back(g: Tensor, y: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the gradients of kernels and biases, [S, k * k * C + 1, out] in float32."""
    x = x if x[0].is_contiguous() else x.contiguous()
    g, y = g.contiguous(), y.contiguous()
    agents, rows, outputs = len(x), weight[0, ..., 0].numel(), weight.shape[-1]
    block = next(size for size in (64, 32, 16) if rows % size == 0)
    places = y[0, ..., 0].numel()
    splits = max(1, min(places // 128, _PROGRAMS * block // (rows * agents)))
    parts = g.new_empty(agents, splits, rows + 1, outputs, dtype=torch.float32)
    _kernel_back[rows // block, splits, agents](
        g, y, x, parts, x.stride(0), **_sides(x, y, weight, stride),
        BLOCK_M=64, BLOCK_K=block, SPLITS=splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(1)


# ---- the transition model, rolled out: one program for each agent and sample, whose latent fits into its registers


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
    total = tl.div_rn(total - low, tl.maximum(high - low, 1e-5) + tl.zeros_like(total))
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
    span = tl.maximum(wide, 1e-5)
    mine, value = tl.load(g + here, mask=real, other=0.0), tl.load(z + here, mask=real, other=0.5)
    if not LAST:  # what came through the next step
        mine += tl.load(chain + _places(agent * BATCH + b, pixel, channel, size, CHANNELS), mask=real, other=0.0)
    # The scaling's gradient: shares of it go to the least and the largest values.
    lows, highs = (value == 0).to(tl.float32), (value == 1).to(tl.float32)
    moved, stretched, count_low, count_high = tl.reduce((mine, mine * value, lows, highs), 1, _add_each)
    moved, stretched, count_low, count_high = tl.reduce((moved, stretched, count_low, count_high), 0, _add_each)
    d_span = tl.where(wide >= 1e-5, -stretched / span, 0.0)
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
        "PIXELS": max(16, triton.next_power_of_2(height * width)), "PRECISION": precision_of(z),
    }  # fmt: skip


def rollout(
    z: Tensor, action_bias: Tensor, first: Tensor, bn_weight: Tensor, bn_bias: Tensor, second: Tensor, bias: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Roll the transition model out; `fused.rollout` explains the shapes."""
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
    """Return the gradients of z and action_bias, and parts of the others' that are to be summed (`fused.rollout`)."""
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
    splits = max(1, min(steps * batch // 4, _PROGRAMS // (3 * agents)))
    parts = []
    for x, d in ((inputs, d_product), (normal, d_second)):
        parts.append(g.new_empty(agents, splits, 9, channels, channels))
        _weights_back[agents, splits, 3](
            x, d, parts[-1], X_STEPS=x.shape[1], SPLITS=splits, num_warps=4, num_stages=3, **shapes
        )
    # Summed here: the compiler's own sum over a middle dimension took four times as long.
    return d_z, d_first, *(part.sum(1) for part in parts), back_sums, d_bias
