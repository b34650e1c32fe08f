"""Owns operations for which a GPU has kernels of our own (`kernels`); everywhere else they are plain steps.

Each is called for one agent, as everything in the networks is. Its kernel is written for a fleet, so it is a custom
operation of the library, with a rule for `vmap`, a gradient where one is wanted, and a plain twin for other devices:
so that all but the kernels themselves can be tested without a GPU. Shapes: S agents, B batch, N observations.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spr.ops import functional


def has_kernels(x: Tensor) -> bool:
    """Say whether there are kernels of our own for such a tensor."""
    return x.device.type == "cuda" and x.dtype in (torch.uint8, torch.bfloat16, torch.float32)


def convolve_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return relu(convolve(x, weight) + bias).

    A GPU does it in one pass without anything in between, and returns it in a dtype: what is multiplied next need not
    be wider than the product. Its gradient takes two passes.
    """
    run = weight.shape[1] * weight.shape[-1]  # numbers of a kernel's row
    if not has_kernels(weight) or run % 16:
        return F.relu(functional.convolve(x, weight, stride) + bias)
    taps = weight.permute(2, 3, 1, 0).contiguous()
    made: Tensor = _convolve_relu(x.to(weight.dtype)[None], taps[None], bias[None], stride, dtype)
    return made[0]


@torch.library.custom_op("spr::convolve_relu", mutates_args=())
def _convolve_relu(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """[S, N, H, W, C] by [S, k, k, C, out] -> [S, N, H', W', out]."""
    return torch.stack([_plain_convolve(*agent, stride) for agent in zip(x, taps, bias, strict=True)]).to(dtype)


def _plain_convolve(x: Tensor, taps: Tensor, bias: Tensor, stride: int) -> Tensor:
    return F.relu(functional.convolve(x, taps.permute(3, 2, 0, 1), stride) + bias)


@_convolve_relu.register_fake
def _(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    agents, count, *sides, _ = x.shape
    height, width = ((side - taps.shape[1]) // stride + 1 for side in sides)
    return x.new_empty(agents, count, height, width, taps.shape[-1], dtype=dtype)


def _convolve_relu_kernel(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    from spr.ops import fused_triton  # noqa: PLC0415 - Triton is there with a GPU only

    return fused_triton.convolve(x, taps, bias, stride, dtype)


@torch.library.custom_op("spr::convolve_back", mutates_args=())
def _convolve_back(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the gradient of what was convolved from that of y, which the convolution gave."""
    return _plain_convolve_back(g, y, x, taps, stride)[0].to(x.dtype)


@_convolve_back.register_fake
def _(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@torch.library.custom_op("spr::kernel_back", mutates_args=())
def _kernel_back(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the gradients of the kernels, and in a last row of the biases: [S, k * k * C + 1, out] in float32."""
    _, d_taps, d_bias = _plain_convolve_back(g, y, x, taps, stride)
    return torch.cat([d_taps.flatten(1, 3), d_bias[:, None]], 1)


@_kernel_back.register_fake
def _(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:  # noqa: ARG001
    rows = taps[0, ..., 0].numel()
    return taps.new_empty(len(taps), rows + 1, taps.shape[-1], dtype=torch.float32)


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


def _convolve_back_kernel(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    from spr.ops import fused_triton  # noqa: PLC0415

    return fused_triton.convolve_back(g, y, x, taps, stride)


def _kernel_back_kernel(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    from spr.ops import fused_triton  # noqa: PLC0415

    return fused_triton.kernel_back(g, y, x, taps, stride)


def draw(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    """Stack planes shifted, as `ops.shifted_pixels` does, times their brightness [..., P]: one pass, in a dtype.

    Planes [N, H, W] become observations [..., P, H, W] whose planes lie side by side in memory.
    """
    drawn: Tensor = _draw(planes, frame.flatten(0, -2), shift.flatten(0, -2), brightness.flatten(0, -2), dtype)
    observations: Tensor = drawn.unflatten(0, frame.shape[:-1]).movedim(-1, -3)
    return observations


@torch.library.custom_op("spr::draw", mutates_args=())
def _draw(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, H, W] by [M, P] -> [M, H, W, P]."""
    shifted = functional.shifted_pixels(planes, frame, shift).to(brightness.dtype) * brightness[..., None, None]
    return shifted.movedim(-3, -1).contiguous().to(dtype)


@_draw.register_fake
def _(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return brightness.new_empty(len(frame), *planes.shape[1:], frame.shape[-1], dtype=dtype)


def _draw_kernel(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    from spr.ops import fused_triton  # noqa: PLC0415

    return fused_triton.draw(planes, frame.contiguous(), shift.contiguous(), brightness.contiguous(), dtype)


def for_fleets(op: Any) -> Callable[..., Any]:
    """Return how `vmap` calls an operation that was written for fleets, and called for one agent as a fleet of one."""

    def call(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        lifted = [
            arg if not isinstance(arg, Tensor)
            else arg.movedim(dim, 0).squeeze(1) if dim is not None
            else arg.expand(info.batch_size, *arg.shape[1:])
            for arg, dim in zip(args, in_dims, strict=True)
        ]  # fmt: skip
        out = op(*lifted)
        if isinstance(out, Tensor):
            return out.unsqueeze(1), 0
        return tuple(part.unsqueeze(1) for part in out), (0,) * len(out)

    return call


KERNELS: dict[Any, Callable[..., Any]] = {
    _draw: _draw_kernel,
    _convolve_relu: _convolve_relu_kernel,
    _convolve_back: _convolve_back_kernel,
    _kernel_back: _kernel_back_kernel,
}
for _op, _kernel in KERNELS.items():
    _op.register_kernel("cuda", _kernel)
    _op.register_vmap(for_fleets(_op))
