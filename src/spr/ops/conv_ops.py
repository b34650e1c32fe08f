"""Owns the convolution with bias and ReLU: one kernel on a GPU, plain steps elsewhere.

Shapes: S agents, B batch, N observations, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spr.ops import conv_cpu, functional, kernels
from spr.ops.kernels import Deferred, fleet_op

_kernels = Deferred("spr.ops.conv_triton")


def convolve_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return relu(convolve(x, weight) + bias).

    A GPU does it in one pass without anything in between, and returns it in a dtype: what is multiplied next need not
    be wider than the product. Its gradient takes two passes.
    """
    if functional.on_cpu(bias):
        return conv_cpu.convolve(x, weight, bias, stride, relu=True)
    run = weight.shape[1] * weight.shape[-1]  # numbers of a kernel's row
    if not kernels.has_kernels(weight) or run % 16:
        return F.relu(functional.convolve(x, weight, stride) + bias)
    taps = weight.permute(2, 3, 1, 0).contiguous()
    made: Tensor = _convolve_relu(x.to(weight.dtype)[None], taps[None], bias[None], stride, dtype)
    return made[0]


def _convolved_like(x: Tensor, taps: Tensor, _bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    agents, count, *sides, _ = x.shape
    height, width = ((side - taps.shape[1]) // stride + 1 for side in sides)
    return x.new_empty(agents, count, height, width, taps.shape[-1], dtype=dtype)


@fleet_op(like=_convolved_like, kernel=_kernels.convolve)
def _convolve_relu(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """[S, N, H, W, C] by [S, k, k, C, out] -> [S, N, H', W', out]."""
    return torch.stack([_plain_convolve(*agent, stride) for agent in zip(x, taps, bias, strict=True)]).to(dtype)


def _plain_convolve(x: Tensor, taps: Tensor, bias: Tensor, stride: int) -> Tensor:
    return F.relu(functional.convolve(x, taps.permute(3, 2, 0, 1), stride) + bias)


@fleet_op(like=lambda _g, _y, x, _taps, _stride: x.new_empty(x.shape), kernel=_kernels.convolve_back)
def _convolve_back(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the gradient of what was convolved from that of y, which the convolution gave."""
    return _plain_convolve_back(g, y, x, taps, stride)[0].to(x.dtype)


def _kernel_gradient_like(_g: Tensor, _y: Tensor, _x: Tensor, taps: Tensor, _stride: int) -> Tensor:
    return taps.new_empty(len(taps), taps[0, ..., 0].numel() + 1, taps.shape[-1], dtype=torch.float32)


@fleet_op(like=_kernel_gradient_like, kernel=_kernels.kernel_back)
def _kernel_back(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the gradients of the kernels, and in a last row of the biases: [S, k * k * C + 1, out] in float32."""
    _, d_taps, d_bias = _plain_convolve_back(g, y, x, taps, stride)
    return torch.cat([d_taps.flatten(1, 3), d_bias[:, None]], 1)


def _plain_convolve_back(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> list[Tensor]:
    d = torch.where(y > 0, g, 0).float()
    found = []
    for mine, one, weight in zip(d, x.float(), taps.float(), strict=True):

        def convolved(one: Tensor, weight: Tensor) -> Tensor:
            return functional.convolve(one, weight.permute(3, 2, 0, 1), stride)

        pull: Any = torch.func.vjp(convolved, one, weight)[1]
        found.append((*pull(mine), mine.sum((0, 1, 2))))
    return [torch.stack(part) for part in zip(*found, strict=True)]


def _keep_convolved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, taps, _, ctx.stride, _ = inputs
    ctx.save_for_backward(output, x, taps)


def _convolve_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    y, x, taps = ctx.saved_tensors
    d_x = _convolve_back(g, y, x, taps, ctx.stride) if ctx.needs_input_grad[0] else None
    d_taps, d_bias = _kernel_back(g, y, x, taps, ctx.stride).split([taps[0, ..., 0].numel(), 1], 1)
    return d_x, d_taps.reshape(taps.shape).to(taps.dtype), d_bias.squeeze(1), None, None


_convolve_relu.register_autograd(_convolve_gradient, setup_context=_keep_convolved)
