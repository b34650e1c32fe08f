"""Owns convolutions on a CPU, by oneDNN: with bias and ReLU in one pass, and a gradient that is laid out for it.

The plain twin is `torch.nn.functional.conv2d`. Shapes: B batch, H, W sides, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LAST = torch.channels_last
# Of images and kernels, with a bias and what follows it; PyTorch's own layers use it where they are compiled.
_convolution = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, relu: bool = False
) -> Tensor:
    """Convolve [B, H, W, C] to [B, H', W', out], add a bias, and take the ReLU, as far as wanted."""
    given = x.permute(0, 3, 1, 2), weight, bias, stride, padding, relu
    made: Tensor = _Convolution.apply(*given) if torch.is_grad_enabled() else _forward(*given)
    return made.permute(0, 2, 3, 1)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, relu: bool) -> Tensor:
    """Convolve [B, C, H, W], with products in the dtype of the weight."""
    # Pixels as they are drawn are channels first, which oneDNN reads as fast where there are few channels.
    weight = weight if x.is_contiguous() else weight.contiguous(memory_format=_LAST)
    x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    if _convolution is None:
        made = F.conv2d(x, weight, bias, stride, padding)
        return made.relu_() if relu else made
    then = "relu" if relu else "none"
    done: Tensor = _convolution(x, weight, bias, [padding] * 2, [stride] * 2, [1, 1], 1, then, [], "")
    return done


class _Convolution(torch.autograd.Function):
    """The convolution of [B, C, H, W], whose products are taken in the dtype of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, relu: bool
    ) -> Tensor:
        x = x.to(weight.dtype)
        y = _forward(x, weight, bias, stride, padding, relu)
        ctx.save_for_backward(x, weight, *([y] if relu else []))
        ctx.rule = stride, padding, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *after = ctx.saved_tensors
        stride, padding, has_bias = ctx.rule
        g = g.to(weight.dtype).contiguous(memory_format=_LAST)
        if after:
            g = torch.ops.aten.threshold_backward(g, after[0].contiguous(memory_format=_LAST), 0)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], has_bias and ctx.needs_input_grad[2]]
        # Channels last: the gradient of a kernel of four channels takes a quarter of the time.
        given = g, x.contiguous(memory_format=_LAST), weight.contiguous(memory_format=_LAST)
        rule = [len(weight)], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(*given, *rule, wanted)
        return (*found, None, None, None)
