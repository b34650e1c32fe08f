"""Owns the transition model applied K times: its kernels for a GPU, with a gradient, and its plain steps elsewhere.

Called for one agent and written for a fleet, as every `fleet_op` is. Shapes: S agents, B batch, K steps.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spr.ops import functional, impala_ops, kernels
from spr.ops.kernels import Deferred, fleet_op

_kernels = Deferred("spr.ops.rollout_triton")
_MOST_PIXELS, _CHANNELS = 64, (16, 32, 64)  # of a latent that one program holds


def rollout(
    z: Tensor,
    action_bias: Tensor,
    first: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    second: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """Apply `functional.transition` K times, each to the last result: [B, H, W, C], [K, B, H, W, C] -> [K, B, H, W, C].

    A GPU takes one program per sample, in whose registers a whole latent fits: two kernels a step instead of eight.
    """
    assert (z.dim(), action_bias.dim(), first.dim()) == (4, 5, 4)
    height, width, channels = z.shape[1:]
    if kernels.has_kernels(first) and height * width <= _MOST_PIXELS and channels in _CHANNELS:
        taps = [weight.permute(2, 3, 1, 0).flatten(0, 1).contiguous()[None] for weight in (first, second)]
        vectors = [vector[None] for vector in (bn_weight, bn_bias, bias)]
        given = (z.contiguous()[None], action_bias.contiguous()[None], taps[0], *vectors[:2], taps[1], vectors[2], eps)
        latents: Tensor = _rollout(*given)[0]
        return latents[0]
    return _step_by_step(z, action_bias, first, bn_weight, bn_bias, second, bias, eps)


def rollout_without_norm(z: Tensor, action_bias: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """Do the same without batch norm, by plain steps for the compiler to fuse, for latents of any size."""
    assert (z.dim(), action_bias.dim(), first.dim()) == (4, 5, 4)
    steps = []
    for added in action_bias:
        x = F.relu(impala_ops.convolve_same(z, first) + added)
        z = impala_ops.renormalise(F.relu(impala_ops.convolve_same(x, second) + bias))
        steps.append(z)
    return torch.stack(steps)


_GIVEN = "Tensor z, Tensor action_bias, Tensor first, Tensor bn_weight, Tensor bn_bias, Tensor second, Tensor bias"
_MADE = "Tensor latents, Tensor r, Tensor sums, Tensor scales, Tensor inputs, Tensor normal"
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _made_for_gradient(action_bias: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    agents, steps, batch, *latent = action_bias.shape
    product = first.dtype
    return (
        torch.empty_like(action_bias),
        action_bias.new_empty(agents, steps, batch, 2, latent[-1]),
        action_bias.new_empty(agents, steps, batch, 2),
        action_bias.new_empty(agents, steps + 1, batch, *latent, dtype=product),
        torch.empty_like(action_bias, dtype=product),
    )


def _rolled_out_like(_: Tensor, action_bias: Tensor, first: Tensor, *_more: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(action_bias), *_made_for_gradient(action_bias, first)


def _rollout_by_kernel(*given: Any) -> Any:
    # An agent's weights are parts of its row: side by side with others of its own, not with other agents'.
    return _kernels.rollout(*(tensor.contiguous() for tensor in given[:-1]), given[-1])


@fleet_op(like=_rolled_out_like, kernel=_rollout_by_kernel, schema=f"({_GIVEN}, float eps) -> {_SIX}")
def _rollout(*given: Any) -> tuple[Tensor, ...]:
    """`rollout` of a fleet; convolutions are [S, 9, C, C]. Returns the latents, and what their gradient needs.

    That is [S, K, B, H, W, C] after the first ReLU; [S, K, B, 2, C] sums of it and of its square; [S, K, B, 2] the
    least value of each sample, and by how much the largest is larger; what was multiplied: [S, K + 1, B, H, W, C]
    by the first convolution, [S, K, B, H, W, C] by the second.
    """
    tensors, eps = given[:-1], given[-1]
    latents = torch.stack([_plain_rollout(*agent, eps) for agent in zip(*tensors, strict=True)])
    return latents, *(torch.zeros_like(made) for made in _made_for_gradient(*tensors[1:3]))


def _plain_rollout(z: Tensor, action_bias: Tensor, first: Tensor, *rest: Any) -> Tensor:
    bn_weight, bn_bias, second, bias, eps = rest
    kernels = [taps.unflatten(0, (3, 3)).permute(3, 2, 0, 1) for taps in (first, second)]
    return _step_by_step(z, action_bias, kernels[0], bn_weight, bn_bias, kernels[1], bias, eps)


def _step_by_step(z: Tensor, action_bias: Tensor, *weights: Any) -> Tensor:
    steps = []
    for added in action_bias:
        z = functional.transition(z, added, *weights)
        steps.append(z)
    return torch.stack(steps)


def _parts(z: Tensor, action_bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    agents, steps, batch, channels = *action_bias.shape[:3], action_bias.shape[-1]
    taps = (agents, 9, channels, channels)
    return (
        torch.empty_like(z),
        torch.empty_like(action_bias),
        *(z.new_empty(taps) for _ in range(2)),
        z.new_empty(agents, steps, batch, 2, channels),
        z.new_empty(agents, steps, batch, channels),
    )


def _rollout_back_by_kernel(g: Tensor, *given: Any) -> Any:
    needed = (g, *given[7:-1], *given[2:6])
    return _kernels.rollout_back(*(tensor.contiguous() for tensor in needed), given[-1])


@fleet_op(
    like=lambda _g, *given: _parts(*given),
    kernel=_rollout_back_by_kernel,
    schema=f"(Tensor g, {_GIVEN}, {_MADE}, float eps) -> {_SIX}",
)
def _rollout_back(g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of z, action_bias and convolutions from that of the latents, and parts of the others.

    Those are [S, 9, C, C] of each convolution, [S, K, B, 2, C] parts of batch norm's bias and weight, [S, K, B, C] of
    the bias.
    """
    given, eps = rest[:7], rest[-1]
    d_z, d_action, d_first, d_second, d_norm, d_bias = (torch.zeros_like(part) for part in _parts(*given))
    for agent, both in enumerate(zip(g, *given, strict=True)):
        mine, one = both[0], both[1:]
        pull: Any = torch.func.vjp(lambda *tensors: _plain_rollout(*tensors, eps), *one)[1]
        d_z[agent], d_action[agent], d_first[agent], weight, move, d_second[agent], last = pull(mine)
        d_norm[agent, 0, 0] = torch.stack([move, weight])
        d_bias[agent, 0, 0] = last
    return d_z, d_action, d_first, d_second, d_norm, d_bias


def _keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output)


def _rollout_gradient(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    d_z, d_action, *parts = _rollout_back(g, *ctx.saved_tensors, ctx.eps)
    d_first, d_second = (part.to(ctx.saved_tensors[2].dtype) for part in parts[:2])
    d_move, d_scale = parts[2].sum((1, 2)).unbind(1)
    return d_z, d_action, d_first, d_scale, d_move, d_second, parts[3].sum((1, 2)), None


_rollout.register_autograd(_rollout_gradient, setup_context=_keep_for_gradient)
