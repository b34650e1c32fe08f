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

from spr import ops


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
        return F.relu(ops.convolve(x, weight, stride) + bias)
    taps = weight.permute(2, 3, 1, 0).contiguous()
    made: Tensor = _convolve_relu(x.to(weight.dtype)[None], taps[None], bias[None], stride, dtype)
    return made[0]


@torch.library.custom_op("spr::convolve_relu", mutates_args=())
def _convolve_relu(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """[S, N, H, W, C] by [S, k, k, C, out] -> [S, N, H', W', out]."""
    return torch.stack([_plain_convolve(*agent, stride) for agent in zip(x, taps, bias, strict=True)]).to(dtype)


def _plain_convolve(x: Tensor, taps: Tensor, bias: Tensor, stride: int) -> Tensor:
    return F.relu(ops.convolve(x, taps.permute(3, 2, 0, 1), stride) + bias)


@_convolve_relu.register_fake
def _(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    agents, count, *sides, _ = x.shape
    height, width = ((side - taps.shape[1]) // stride + 1 for side in sides)
    return x.new_empty(agents, count, height, width, taps.shape[-1], dtype=dtype)


def _convolve_relu_kernel(x: Tensor, taps: Tensor, bias: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    from spr import kernels  # noqa: PLC0415 - Triton is there with a GPU only

    return kernels.convolve(x, taps, bias, stride, dtype)


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
            return ops.convolve(one, weight.permute(3, 2, 0, 1), stride)

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
    from spr import kernels  # noqa: PLC0415

    return kernels.convolve_back(g, y, x, taps, stride)


def _kernel_back_kernel(g: Tensor, y: Tensor, x: Tensor, taps: Tensor, stride: int) -> Tensor:
    from spr import kernels  # noqa: PLC0415

    return kernels.kernel_back(g, y, x, taps, stride)


# Multiplications of one agent in a convolution from which on it fills a GPU by itself. BBF's sizes are above it: agents
# take turns with the library's convolutions, in channels-last order. Below it are those of a fleet of SPR's size: one
# batched product for all. Expected from the sizes, not yet measured: 2**28 lies between a transition model of 64
# channels (0.14 * 10^9) and BBF's smallest convolution (0.52 * 10^9), both of 32 samples.
_FILLS_A_GPU = 2**28
# Agents whose convolutions are one grouped convolution of the library; 1: each its own. cuDNN's grouped ones were slow
# at few channels (H200); at 64 and 128 channels that is not yet measured.
_GROUPED = 1


def convolve_same(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve [B, H, W, C] to [B, H, W, out] by an odd kernel, stride 1, zeros around, without a bias.

    The only place where it is decided how wide networks convolve. The result is of the weight's dtype or float32.
    """
    assert x.dim() == weight.dim() == 4
    kernel = weight.shape[-1]
    assert kernel % 2 == 1, "an even kernel would need more padding on one side"
    x = x.to(weight.dtype)
    if not has_kernels(weight):
        return ops.convolve(x, weight, padding=kernel // 2)
    if x[..., 0].numel() * weight.numel() < _FILLS_A_GPU:
        return ops.shift_and_add(x, weight, 1, kernel // 2)
    made: Tensor = _convolve_same(x[None], weight[None])
    return made[0]


@torch.library.custom_op("spr::convolve_same", mutates_args=())
def _convolve_same(x: Tensor, weight: Tensor) -> Tensor:
    """[S, N, H, W, C] by [S, out, C, k, k] -> [S, N, H, W, out]."""
    parts = []
    for one, kernels in zip(x.split(_GROUPED), weight.split(_GROUPED), strict=True):
        agents, padding = len(one), weight.shape[-1] // 2
        made = torch.conv2d(_side_by_side(one), kernels.flatten(0, 1), padding=padding, groups=agents)
        parts.append(_apart(made, agents))
    return _together(parts)


def _side_by_side(x: Tensor) -> Tensor:
    """Lay the channels of some agents side by side: [G, N, H, W, C] -> [N, G * C, H, W], channels last in memory."""
    return x.permute(1, 2, 3, 0, 4).flatten(3).contiguous().permute(0, 3, 1, 2)


def _apart(x: Tensor, agents: int) -> Tensor:
    own: Tensor = x.permute(0, 2, 3, 1).unflatten(3, (agents, -1))
    return own.permute(3, 0, 1, 2, 4).contiguous()


def _together(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]  # of one it would be a copy


@_convolve_same.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


@torch.library.custom_op("spr::same_back", mutates_args=())
def _same_back(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of what was convolved."""
    return _together([_apart(d_x, agents) for agents, d_x, _ in _library_gradients(g, x, weight, (True, False))])


@_same_back.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@torch.library.custom_op("spr::same_kernel_back", mutates_args=())
def _same_kernel_back(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the kernels."""
    found = _library_gradients(g, x, weight, (False, True))
    parts: list[Tensor] = [d_weight.contiguous().unflatten(0, (agents, -1)) for agents, _, d_weight in found]
    return _together(parts)


@_same_kernel_back.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG001
    return weight.new_empty(weight.shape)


def _library_gradients(
    g: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> list[tuple[int, Tensor, Tensor]]:
    """Return the number of agents, and the wanted ones of their gradients, for each turn."""
    found, padding = [], weight.shape[-1] // 2
    for mine, one, kernels in zip(g.split(_GROUPED), x.split(_GROUPED), weight.split(_GROUPED), strict=True):
        d_x, d_weight, _ = torch.ops.aten.convolution_backward(
            _side_by_side(mine),
            _side_by_side(one),
            kernels.flatten(0, 1),
            None,
            [1, 1],
            [padding, padding],
            [1, 1],
            False,
            [0, 0],
            len(one),
            [*wanted, False],
        )
        found.append((len(one), d_x, d_weight))
    return found


def _keep_same(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _same_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    d_x = _same_back(g, x, weight) if ctx.needs_input_grad[0] else None
    return d_x, _same_kernel_back(g, x, weight)


_convolve_same.register_autograd(_same_gradient, setup_context=_keep_same)


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
    shifted = ops.shifted_pixels(planes, frame, shift).to(brightness.dtype) * brightness[..., None, None]
    return shifted.movedim(-3, -1).contiguous().to(dtype)


@_draw.register_fake
def _(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return brightness.new_empty(len(frame), *planes.shape[1:], frame.shape[-1], dtype=dtype)


def _draw_kernel(planes: Tensor, frame: Tensor, shift: Tensor, brightness: Tensor, dtype: torch.dtype) -> Tensor:
    from spr import kernels  # noqa: PLC0415

    return kernels.draw(planes, frame.contiguous(), shift.contiguous(), brightness.contiguous(), dtype)


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
for _op in (*KERNELS, _convolve_same, _same_back, _same_kernel_back):
    _op.register_vmap(for_fleets(_op))
