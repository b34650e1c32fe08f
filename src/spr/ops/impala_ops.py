"""Owns how wide networks convolve, pool and renormalise: by the library, and by kernels of our own beside it.

Wide are Impala's encoder and transition models without batch norm. Called for one agent and written for a fleet, as
every `fleet_op` is. Shapes: S agents, N observations, H height, W width, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spr.ops import functional, kernels
from spr.ops.kernels import Deferred, fleet_op

_kernels = Deferred("spr.ops.impala_triton")

# Multiplications of one agent in a convolution from which on it fills a GPU by itself: agents take turns with the
# library's convolutions, in channels-last order. Below it are those of a fleet of SPR's size: one batched product for
# all. On an H200, 11x11 latents of 64 channels (2**27) take 5.5 us by the library and 7.9 as a product for one agent,
# 138 and 57 for 26 agents; every convolution of one BBF agent (2**29 and more) is faster by the library.
_FILLS_A_GPU = 2**28
# Channels up to which a convolution and the pool behind it are one kernel: three pixels fill the least product.
_FEW_CHANNELS = 5


# ---- convolutions


def convolve_same(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve [N, H, W, C] to [N, H, W, out] by an odd kernel, stride 1, zeros around, without a bias.

    The only place where it is decided how wide networks convolve. The result is of the weight's dtype or float32.
    """
    assert x.dim() == weight.dim() == 4
    kernel = weight.shape[-1]
    assert kernel % 2 == 1, "an even kernel would need more padding on one side"
    x = x.to(weight.dtype)
    if not kernels.has_kernels(weight):
        return functional.convolve(x, weight, padding=kernel // 2)
    if x[..., 0].numel() * weight.numel() < _FILLS_A_GPU:
        return functional.shift_and_add(x, weight, 1, kernel // 2)
    # Laid out as the library reads it, which the cast before does on its way; else it is copied at every call.
    made: Tensor = _convolve_same(x[None], weight.permute(0, 2, 3, 1).contiguous()[None])
    return made[0]


@fleet_op(like=lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[1]))
def _convolve_same(x: Tensor, weight: Tensor) -> Tensor:
    """[S, N, H, W, C] by [S, out, k, k, C] -> [S, N, H, W, out]."""
    padding = weight.shape[-2] // 2
    made = [torch.conv2d(_shown(one), _shown(mine), padding=padding) for one, mine in zip(x, weight, strict=True)]
    return _together(made)


def _shown(x: Tensor) -> Tensor:
    """Show [N, H, W, C] as the library does: [N, C, H, W], channels last in memory."""
    return x.contiguous().permute(0, 3, 1, 2)


def _together(parts: list[Tensor]) -> Tensor:
    """Put what the library made for each agent together, channels last: [N, C, H, W] each -> [S, N, H, W, C]."""
    own = [part.permute(0, 2, 3, 1).contiguous() for part in parts]
    return torch.stack(own) if len(own) > 1 else own[0][None]  # of one it would be a copy


@fleet_op(like=lambda _g, x, _weight: x.new_empty(x.shape))
def _same_back(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of what was convolved."""
    return _together([_library_gradient(*agent, 0) for agent in zip(g, x, weight, strict=True)])


@fleet_op(like=lambda _g, _x, weight: weight.new_empty(weight.shape))
def _same_kernel_back(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the kernels."""
    return _together([_library_gradient(*agent, 1) for agent in zip(g, x, weight, strict=True)])


def _library_gradient(g: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    """Return one agent's gradient of what was convolved (0), or of the kernels (1), as the library lays it out."""
    wanted, padding = [which == 0, which == 1, False], weight.shape[-2] // 2
    given = (_shown(g), _shown(x), _shown(weight), None, [1, 1], [padding, padding], [1, 1], False, [0, 0], 1)
    found: Tensor = torch.ops.aten.convolution_backward(*given, wanted)[which]
    return found


def _keep_same(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _same_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    d_x = _same_back(g, x, weight) if ctx.needs_input_grad[0] else None
    return d_x, _same_kernel_back(g, x, weight)


_convolve_same.register_autograd(_same_gradient, setup_context=_keep_same)


# ---- pools


def convolve_pool(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve [N, H, W, C] by 3x3 kernels, add a bias, and halve each way by `functional.max_pool_same`.

    The largest value stays the largest when all get the same bias: it is added to a quarter of them. Of few channels,
    as observations have, a GPU takes one kernel; their own gradient is then not to be had.
    """
    if kernels.has_kernels(weight) and x.shape[-1] <= _FEW_CHANNELS:
        taps = weight.permute(2, 3, 1, 0).flatten(1, 2).contiguous()  # [3, 3 * C, out]
        given = x.to(weight.dtype).contiguous()[None], taps[None], bias[None]
        made: Tensor = _convolve_pool(*given, torch.is_grad_enabled())[0]
        return made[0]
    return max_pool_same(convolve_same(x, weight).to(weight.dtype)) + bias


def max_pool_same(x: Tensor) -> Tensor:
    """`functional.max_pool_same`, whose gradient goes to the first of equal values.

    A GPU reads and writes it channels last, as convolutions do. The compiler would lay the result out channels first,
    and since torch 2.13 add up its gradient atomically, which gives other bits another time.
    """
    if not kernels.has_kernels(x):
        return functional.max_pool_same(x)
    pooled: Tensor = _max_pool(x.contiguous()[None], torch.is_grad_enabled())[0]
    return pooled[0]


@fleet_op(
    like=lambda x, which: functional.pooled_like(x, x.shape[-1], which),
    kernel=lambda x, which: _kernels.max_pool(x.contiguous(), *_outside(x), which),
)
def _max_pool(x: Tensor, which: bool) -> tuple[Tensor, Tensor]:
    """[S, N, H, W, C] -> [S, N, ceil(H / 2), ceil(W / 2), C]; and which of its window's nine each is, if wanted."""
    up, left = _outside(x)
    pooled, place = F.max_pool2d(
        x.flatten(0, 1).permute(0, 3, 1, 2), 3, 2, (up, left), ceil_mode=True, return_indices=True
    )
    row, column = (torch.arange(side, device=x.device) * 2 for side in pooled.shape[2:])
    down, right = place // x.shape[3] - (row - up)[:, None], place % x.shape[3] - (column - left)
    found = (3 * down + right).to(torch.uint8)
    values, window = (part.permute(0, 2, 3, 1).unflatten(0, x.shape[:2]).contiguous() for part in (pooled, found))
    return values, window if which else window.new_empty(len(x), 0)


def _outside(x: Tensor) -> tuple[int, int]:
    """Return how many rows and columns of the first windows lie outside of [S, N, H, W, C]."""
    up, left = (functional.same_padding(side, 3, 2)[0] for side in x.shape[2:4])
    return up, left


def _max_pool_back_by_kernel(g: Tensor, which: Tensor, height: int, width: int) -> Any:
    outside = (functional.same_padding(side, 3, 2)[0] for side in (height, width))
    return _kernels.max_pool_back(g.contiguous(), which.contiguous(), height, width, *outside)


@fleet_op(
    like=lambda g, _which, height, width: g.new_empty(*g.shape[:2], height, width, g.shape[-1]),
    kernel=_max_pool_back_by_kernel,
)
def _max_pool_back(g: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient of what was pooled, [S, N, H, W, C]."""
    agents, count, rows, columns, channels = g.shape
    padded = functional.at_least_fp32(g).new_zeros(agents, count, 2 * rows + 1, 2 * columns + 1, channels)
    for tap in range(9):
        window = padded[:, :, tap // 3 :: 2, tap % 3 :: 2][:, :, :rows, :columns]
        window += torch.where(which == tap, g, 0)
    up, left = functional.same_padding(height, 3, 2)[0], functional.same_padding(width, 3, 2)[0]
    return padded[:, :, up : up + height, left : left + width].contiguous().to(g.dtype)


def _keep_pooled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.sides = inputs[0].shape[2:4]


def _pool_gradient(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor, None]:
    (which,) = ctx.saved_tensors
    return _max_pool_back(g, which, *ctx.sides), None


_max_pool.register_autograd(_pool_gradient, setup_context=_keep_pooled)


def _convolve_pool_by_kernel(x: Tensor, taps: Tensor, bias: Tensor, which: bool) -> Any:
    given = (x.contiguous(), taps.contiguous(), bias.contiguous())
    return _kernels.convolve_pool(*given, *_outside(x), which)


@fleet_op(
    like=lambda x, taps, _bias, which: functional.pooled_like(x, taps.shape[-1], which),
    kernel=_convolve_pool_by_kernel,
)
def _convolve_pool(x: Tensor, taps: Tensor, bias: Tensor, which: bool) -> tuple[Tensor, Tensor]:
    """[S, N, H, W, C] by [S, 3, 3 * C, out] -> what `_max_pool` returns, with a bias [S, out] added."""
    convolved = torch.stack(
        [functional.convolve(one, _unfolded(mine), padding=1) for one, mine in zip(x, taps, strict=True)]
    )
    pooled, window = _max_pool(convolved.contiguous(), which)
    return (pooled + bias[:, None, None, None]).to(x.dtype), window.clone()


def _unfolded(taps: Tensor) -> Tensor:
    """[3, 3 * C, out] -> [out, C, 3, 3]."""
    kernels: Tensor = taps.unflatten(1, (3, -1))
    return kernels.permute(3, 2, 0, 1)


def _pool_gradient_like(g: Tensor, _: Tensor, x: Tensor) -> Tensor:
    return functional.at_least_fp32(x).new_empty(len(x), 3, 3 * x.shape[-1], g.shape[-1])


def _convolve_pool_back_by_kernel(g: Tensor, which: Tensor, x: Tensor) -> Any:
    return _kernels.convolve_pool_back(g.contiguous(), which.contiguous(), x.contiguous(), *_outside(x))


@fleet_op(like=_pool_gradient_like, kernel=_convolve_pool_back_by_kernel)
def _convolve_pool_back(g: Tensor, which: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of its kernels, [S, 3, 3 * C, out] in float32 or wider."""
    whole, found = functional.at_least_fp32(_max_pool_back(g, which, *x.shape[2:4])), []
    for mine, one in zip(whole, functional.at_least_fp32(x), strict=True):
        padded = F.pad(one, (0, 0, 1, 1, 1, 1))
        rows = [
            torch.cat([padded[:, down : down + x.shape[2], right : right + x.shape[3]] for right in range(3)], -1)
            for down in range(3)
        ]
        found.append(torch.stack([row.flatten(0, 2).T @ mine.flatten(0, 2) for row in rows]))
    return torch.stack(found)


def _keep_convolved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, taps, bias, _ = inputs
    ctx.save_for_backward(output[1], x)
    ctx.dtypes = taps.dtype, bias.dtype


def _convolved_gradient(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    assert not ctx.needs_input_grad[0], "the gradient of observations is not computed"
    which, x = ctx.saved_tensors
    d_bias = functional.at_least_fp32(g).sum((1, 2, 3))
    return None, _convolve_pool_back(g, which, x).to(ctx.dtypes[0]), d_bias.to(ctx.dtypes[1]), None


_convolve_pool.register_autograd(_convolved_gradient, setup_context=_keep_convolved)


# ---- latents


def renormalise(x: Tensor) -> Tensor:
    """`functional.renormalise`: a GPU takes one program per sample.

    The compiler's gradient of a least value is one reduction after another over few samples: 517 us of BBF's update.
    """
    if not kernels.has_kernels(x):
        return functional.renormalise(x)
    flat = functional.at_least_fp32(x).flatten(1).contiguous()
    scaled: Tensor = _renormalise(flat[None])[0]
    return scaled[0].view(x.shape)


@fleet_op(
    like=lambda x: (torch.empty_like(x), x.new_empty(*x.shape[:2], 2)),
    kernel=lambda x: _kernels.renormalise(x.contiguous(), functional.LEAST_SPAN),
)
def _renormalise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[S, N, L] -> the same, scaled; and the least and largest value of each sample, [S, N, 2]."""
    return torch.stack([functional.renormalise(one) for one in x]), torch.stack([x.amin(-1), x.amax(-1)], -1)


def _renormalise_back_by_kernel(g: Tensor, x: Tensor, ends: Tensor) -> Any:
    return _kernels.renormalise_back(g.contiguous(), x.contiguous(), ends.contiguous(), functional.LEAST_SPAN)


@fleet_op(like=lambda _g, x, _ends: torch.empty_like(x), kernel=_renormalise_back_by_kernel)
def _renormalise_back(g: Tensor, x: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's
    """Return the gradient of what was scaled, [S, N, L]."""
    pulls: list[Any] = [torch.func.vjp(functional.renormalise, one)[1] for one in x]
    return torch.stack([pull(mine)[0] for pull, mine in zip(pulls, g, strict=True)])


def _keep_scaled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _scaled_gradient(ctx: Any, g: Tensor, _: Any) -> Tensor:
    d_x: Tensor = _renormalise_back(g, *ctx.saved_tensors)
    return d_x


_renormalise.register_autograd(_scaled_gradient, setup_context=_keep_scaled)
