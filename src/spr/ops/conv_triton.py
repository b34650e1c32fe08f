"""Owns the kernels of the standard encoder's convolutions and their gradients, written in Triton, for a GPU only.

`conv_ops` calls them, says what they mean, and has a plain twin of each; the tests compare the two. Everything is
summed in float32 and in a fixed order. Shapes: S agents, N observations, C channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spr.ops.launch import PROGRAMS, precision_of


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
    splits = max(1, min(places // 128, PROGRAMS * block // (rows * agents)))
    parts = g.new_empty(agents, splits, rows + 1, outputs, dtype=torch.float32)
    _kernel_back[rows // block, splits, agents](
        g, y, x, parts, x.stride(0), **_sides(x, y, weight, stride),
        BLOCK_M=64, BLOCK_K=block, SPLITS=splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(1)
