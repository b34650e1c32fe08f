"""Owns the kernels in Triton that wide networks need beside the library's convolutions, for a GPU only.

`impala_ops` calls them, says what they mean, and has a plain twin of each; the tests compare the two. Everything is
summed in float32 and in a fixed order. Shapes: S agents, N observations, H height, W width, C channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spr.ops.functional import pooled_like
from spr.ops.launch import precision_of

_POOLED = 1024  # numbers that one program pools
_PROGRAMS = 264  # that sum the gradient of one agent's kernels: two for each processor of an H200


# ---- the largest of 3x3 windows, 2 apart


@triton.jit
def _max_pool(
    x, out, which, places,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr, PIXELS: tl.constexpr, PADDED: tl.constexpr,
    WHICH: tl.constexpr,
):  # fmt: skip
    agent = tl.program_id(1).to(tl.int64)
    x += agent * (places // (OUT_HEIGHT * OUT_WIDTH)) * (HEIGHT * WIDTH * CHANNELS)
    m, c = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, PADDED)
    sample, row, column = m // (OUT_HEIGHT * OUT_WIDTH), m // OUT_WIDTH % OUT_HEIGHT, m % OUT_WIDTH
    some = (m < places)[:, None] & (c < CHANNELS)[None, :]
    best = tl.full((PIXELS, PADDED), -float("inf"), tl.float32)
    found = tl.zeros((PIXELS, PADDED), tl.int32)
    for tap in tl.static_range(9):
        high, wide = row * 2 - UP + tap // 3, column * 2 - LEFT + tap % 3
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH)
        source = x + ((sample * HEIGHT + high) * WIDTH + wide)[:, None] * CHANNELS + c[None, :]
        value = tl.load(source, mask=some & inside[:, None], other=-float("inf")).to(tl.float32)
        if WHICH:
            better = (value > best) | (value != value)  # noqa: PLR0124 - what is no number must not be lost
            best, found = tl.where(better, value, best), tl.where(better, tap, found)
        else:
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    target = (agent * places + m)[:, None] * CHANNELS + c[None, :]
    tl.store(out + target, best.to(out.dtype.element_ty), mask=some)
    if WHICH:
        tl.store(which + target, found.to(tl.uint8), mask=some)


@triton.jit
def _max_pool_back(
    g, which, out, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr, PIXELS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Each pixel asks the up to four windows that it is in."""
    agent = tl.program_id(1).to(tl.int64)
    m, c = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, PADDED)
    sample, row, column = m // (HEIGHT * WIDTH), m // WIDTH % HEIGHT + UP, m % WIDTH + LEFT
    some = (m < pixels)[:, None] & (c < CHANNELS)[None, :]
    start = agent * (pixels // (HEIGHT * WIDTH)) * (OUT_HEIGHT * OUT_WIDTH * CHANNELS)
    total = tl.zeros((PIXELS, PADDED), tl.float32)
    for window in tl.static_range(4):
        above, before = row // 2 - window // 2, column // 2 - window % 2
        down, right = row - 2 * above, column - 2 * before
        real = (above >= 0) & (above < OUT_HEIGHT) & (before >= 0) & (before < OUT_WIDTH) & (down < 3) & (right < 3)
        source = start + ((sample * OUT_HEIGHT + above) * OUT_WIDTH + before)[:, None] * CHANNELS + c[None, :]
        inside = some & real[:, None]
        mine = tl.load(which + source, mask=inside, other=9).to(tl.int32) == (3 * down + right)[:, None]
        total += tl.where(mine, tl.load(g + source, mask=inside, other=0.0).to(tl.float32), 0.0)
    target = (agent * pixels + m)[:, None] * CHANNELS + c[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=some)


def _sides(x: Tensor, pooled: Tensor, up: int, left: int) -> dict[str, int]:
    return {
        "HEIGHT": x.shape[2], "WIDTH": x.shape[3],
        "OUT_HEIGHT": pooled.shape[2], "OUT_WIDTH": pooled.shape[3], "UP": up, "LEFT": left,
    }  # fmt: skip


def _programs(x: Tensor) -> tuple[dict[str, int], tuple[int, int]]:
    """Return how many pixels a program takes, whole ones, and how many programs all pixels [S, N, H, W, C] need."""
    padded = triton.next_power_of_2(x.shape[4])
    pixels = max(1, _POOLED // padded)
    sizes = {"CHANNELS": x.shape[4], "PIXELS": pixels, "PADDED": padded}
    return sizes, (triton.cdiv(x[0, ..., 0].numel(), pixels), len(x))


def max_pool(x: Tensor, up: int, left: int, which: bool) -> tuple[Tensor, Tensor]:
    """Return the largest values of [S, N, H, W, C], and which of its window's nine each is, the first of equal ones.

    So many rows and columns of the first windows lie outside. The second is asked for, or has no numbers.
    """
    out, found = pooled_like(x, x.shape[4], which)
    sizes, programs = _programs(out)
    places = out[0, ..., 0].numel()
    _max_pool[programs](x, out, found, places, **_sides(x, out, up, left), **sizes, WHICH=which)
    return out, found


def max_pool_back(g: Tensor, which: Tensor, height: int, width: int, up: int, left: int) -> Tensor:
    """Return the gradient of what was pooled, [S, N, H, W, C]: each value's goes to where it is from."""
    out = g.new_empty(*g.shape[:2], height, width, g.shape[-1])
    sizes, programs = _programs(out)
    _max_pool_back[programs](g, which, out, out[0, ..., 0].numel(), **_sides(out, g, up, left), **sizes)
    return out


# ---- a convolution of few channels (3x3, zeros around), and the largest of 3x3 windows, 2 apart


@triton.jit
def _convolve_pool(
    x, taps, bias, out, which, places,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """Each pooled pixel computes the nine it is the largest of: 2.25 times the products, but nothing in between."""
    agent = tl.program_id(2).to(tl.int64)
    run: tl.constexpr = 3 * CHANNELS  # numbers of three pixels, which lie side by side
    x += agent * (places // (OUT_HEIGHT * OUT_WIDTH)) * (HEIGHT * WIDTH * CHANNELS)
    m, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sample, row, column = m // (OUT_HEIGHT * OUT_WIDTH), m // OUT_WIDTH % OUT_HEIGHT, m % OUT_WIDTH
    some, real = m < places, (k < run)[:, None] & (n < OUT)[None, :]
    kernel = taps + agent * 3 * run * OUT + k[:, None] * OUT + n[None, :]
    first = tl.load(kernel, mask=real, other=0.0)
    second = tl.load(kernel + run * OUT, mask=real, other=0.0)
    third = tl.load(kernel + 2 * run * OUT, mask=real, other=0.0)
    best = tl.full((BLOCK_M, BLOCK_N), -float("inf"), tl.float32)
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for tap in tl.static_range(9):
        high, wide = row * 2 - UP + tap // 3, column * 2 - LEFT + tap % 3
        across = (wide - 1)[:, None] + (k // CHANNELS)[None, :]
        fits = (across >= 0) & (across < WIDTH) & (k < run)[None, :] & some[:, None]
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for down in tl.static_range(3):
            y = high - 1 + down
            source = ((sample * HEIGHT + y) * WIDTH + wide - 1)[:, None] * CHANNELS + k[None, :]
            seen = tl.load(x + source, mask=fits & ((y >= 0) & (y < HEIGHT))[:, None], other=0.0)
            weight = first if down == 0 else second if down == 1 else third
            value = tl.dot(seen, weight, value, input_precision=PRECISION)
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH)
        value = tl.where(inside[:, None], value, -float("inf"))
        if WHICH:
            better = (value > best) | (value != value)  # noqa: PLR0124
            best, found = tl.where(better, value, best), tl.where(better, tap, found)
        else:
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    best += tl.load(bias + agent * OUT + n, mask=n < OUT, other=0.0)[None, :]
    target = (agent * places + m)[:, None] * OUT + n[None, :]
    tl.store(out + target, best.to(out.dtype.element_ty), mask=some[:, None] & (n < OUT)[None, :])
    if WHICH:
        tl.store(which + target, found.to(tl.uint8), mask=some[:, None] & (n < OUT)[None, :])


@triton.jit
def _convolve_pool_back(
    g, which, x, parts, places,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum what some pooled pixels say of the kernels, transposed: [3, out, three pixels]."""
    agent = tl.program_id(2).to(tl.int64)
    run: tl.constexpr = 3 * CHANNELS
    x += agent * (places // (OUT_HEIGHT * OUT_WIDTH)) * (HEIGHT * WIDTH * CHANNELS)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    third = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for block in range(BLOCKS):
        m = (tl.program_id(0) * BLOCKS + block) * BLOCK_M + tl.arange(0, BLOCK_M)
        sample, row, column = m // (OUT_HEIGHT * OUT_WIDTH), m // OUT_WIDTH % OUT_HEIGHT, m % OUT_WIDTH
        some = m < places
        at, real = (agent * places + m)[:, None] * OUT + n[None, :], some[:, None] & (n < OUT)[None, :]
        here, mine = tl.load(g + at, mask=real, other=0.0), tl.load(which + at, mask=real, other=9)
        for tap in tl.static_range(9):
            high, wide = row * 2 - UP + tap // 3, column * 2 - LEFT + tap % 3
            across = (wide - 1)[:, None] + (k // CHANNELS)[None, :]
            fits = (across >= 0) & (across < WIDTH) & (k < run)[None, :] & some[:, None]
            part = tl.trans(tl.where(mine == tap, here, 0.0).to(x.dtype.element_ty))
            for down in tl.static_range(3):
                y = high - 1 + down
                source = ((sample * HEIGHT + y) * WIDTH + wide - 1)[:, None] * CHANNELS + k[None, :]
                seen = tl.load(x + source, mask=fits & ((y >= 0) & (y < HEIGHT))[:, None], other=0.0)
                if down == 0:
                    first = tl.dot(part, seen, first, input_precision=PRECISION)
                elif down == 1:
                    second = tl.dot(part, seen, second, input_precision=PRECISION)
                else:
                    third = tl.dot(part, seen, third, input_precision=PRECISION)
    mine = parts + (agent * tl.num_programs(0) + tl.program_id(0)) * 3 * OUT * run
    target, real = n[:, None] * run + k[None, :], (n < OUT)[:, None] & (k < run)[None, :]
    tl.store(mine + target, first, mask=real)
    tl.store(mine + OUT * run + target, second, mask=real)
    tl.store(mine + 2 * OUT * run + target, third, mask=real)


def _blocks(x: Tensor, out: int) -> dict[str, int]:
    return {
        "CHANNELS": x.shape[4], "OUT": out, "BLOCK_K": max(16, triton.next_power_of_2(3 * x.shape[4])),
        "BLOCK_N": min(64, max(16, triton.next_power_of_2(out))),
    }  # fmt: skip


def convolve_pool(x: Tensor, taps: Tensor, bias: Tensor, up: int, left: int, which: bool) -> tuple[Tensor, Tensor]:
    """Convolve [S, N, H, W, C] by [S, 3, 3 * C, out], add a bias [S, out], and pool as `max_pool` does."""
    out, found = pooled_like(x, taps.shape[-1], which)
    places, sizes = out[0, ..., 0].numel(), _blocks(x, taps.shape[-1])
    _convolve_pool[triton.cdiv(places, 64), triton.cdiv(taps.shape[-1], sizes["BLOCK_N"]), len(x)](
        x, taps, bias, out, found, places, **_sides(x, out, up, left), **sizes,
        BLOCK_M=64, PRECISION=precision_of(x), WHICH=which,
    )  # fmt: skip
    return out, found


def convolve_pool_back(g: Tensor, which: Tensor, x: Tensor, up: int, left: int) -> Tensor:
    """Return the gradient of its kernels, [S, 3, 3 * C, out] in float32."""
    places, sizes, block = g[0, ..., 0].numel(), _blocks(x, g.shape[-1]), 32
    blocks = triton.cdiv(places, block * _PROGRAMS)
    programs = triton.cdiv(places, block * blocks)
    parts = torch.empty(len(x), programs, 3, g.shape[-1], 3 * x.shape[-1], device=x.device)
    _convolve_pool_back[programs, triton.cdiv(g.shape[-1], sizes["BLOCK_N"]), len(x)](
        g, which, x, parts, places, **_sides(x, g, up, left), **sizes,
        BLOCK_M=block, BLOCKS=blocks, PRECISION=precision_of(x),
    )  # fmt: skip
    return parts.sum(1).mT.contiguous()


# ---- samples scaled to [0, 1]


@triton.jit
def _renormalise(x, out, ends, LEAST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    low, high = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, SIZE, BLOCK):
        some = start + k < SIZE
        value = tl.load(x + row * SIZE + start + k, mask=some, other=0.0)
        low = tl.minimum(low, tl.where(some, value, float("inf")))
        high = tl.maximum(high, tl.where(some, value, -float("inf")))
    lowest, highest = tl.min(low, 0), tl.max(high, 0)
    span = tl.zeros((BLOCK,), tl.float32) + tl.maximum(highest - lowest, LEAST)
    for start in range(0, SIZE, BLOCK):
        some = start + k < SIZE
        value = tl.load(x + row * SIZE + start + k, mask=some, other=0.0)
        tl.store(out + row * SIZE + start + k, tl.div_rn(value - lowest, span), mask=some)
    tl.store(ends + 2 * row, lowest)
    tl.store(ends + 2 * row + 1, highest)


@triton.jit
def _renormalise_back(g, x, ends, out, LEAST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A sample's least and largest value move all others; where several are alike, each does its share."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    lowest, highest = tl.load(ends + 2 * row), tl.load(ends + 2 * row + 1)
    span = tl.maximum(highest - lowest, LEAST)
    moved, scaled = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    lows, highs = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        some = start + k < SIZE
        value = tl.load(x + row * SIZE + start + k, mask=some, other=0.0)
        mine = tl.load(g + row * SIZE + start + k, mask=some, other=0.0)
        moved += mine
        scaled += mine * ((value - lowest) / span)
        lows += tl.where(some & (value == lowest), 1.0, 0.0)
        highs += tl.where(some & (value == highest), 1.0, 0.0)
    by_span = tl.where(highest - lowest >= LEAST, tl.sum(scaled, 0), 0.0)  # a span that is held does not move
    at_low, at_high = (by_span - tl.sum(moved, 0)) / (span * tl.sum(lows, 0)), by_span / (span * tl.sum(highs, 0))
    for start in range(0, SIZE, BLOCK):
        some = start + k < SIZE
        value = tl.load(x + row * SIZE + start + k, mask=some, other=0.0)
        d = tl.load(g + row * SIZE + start + k, mask=some, other=0.0) / span
        d += tl.where(value == lowest, at_low, 0.0) - tl.where(value == highest, at_high, 0.0)
        tl.store(out + row * SIZE + start + k, d, mask=some)


def _sample(x: Tensor) -> dict[str, int]:
    size = x.shape[-1]
    block = min(triton.next_power_of_2(size), 16_384)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def renormalise(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Scale samples [S, N, L] to [0, 1], by no less than the least span; return their ends, too, [S, N, 2]."""
    out, ends = torch.empty_like(x), x.new_empty(*x.shape[:2], 2)
    _renormalise[(x.shape[0] * x.shape[1],)](x, out, ends, LEAST=least, **_sample(x))
    return out, ends


def renormalise_back(g: Tensor, x: Tensor, ends: Tensor, least: float) -> Tensor:
    """Return the gradient of what was scaled, [S, N, L]."""
    out = torch.empty_like(x)
    _renormalise_back[(x.shape[0] * x.shape[1],)](g, x, ends, out, LEAST=least, **_sample(x))
    return out
