"""Owns matrix products on a CPU, by oneDNN: on many processors it is twice as fast as the library's choice for float32.

The plain twin is `torch.nn.functional.linear`. Shapes: B batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 8  # fewer rows, such as those of acting, are left to the library's own choice
# Of one matrix by another, with what is added to each row; PyTorch's own layers use it where they are compiled.
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T + bias of [B, in], [out, in] and [out], in float32; the product is taken in the dtype of b."""
    if b.dtype == torch.float32 and len(a) < _FEW:
        return F.linear(a, b, bias)
    if b.dtype == torch.float32 and _linear is not None:
        made: Tensor = _linear(a, b, bias, "none", [], "")
        return made
    made = (a.to(b.dtype) @ b.t()).to(torch.float32)
    return made if bias is None else made + bias


class _Linear(torch.autograd.Function):
    """`product` with its gradient; as many products as the library's own takes, each by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        narrow = g.to(weight.dtype)
        return (
            product(narrow, weight.t()) if wanted[0] else None,
            product(narrow.t(), x.t()).to(weight.dtype) if wanted[1] else None,
            g.sum(0) if wanted[2] else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, [B, out] in float32, of [B, in] in float32."""
    if not torch.is_grad_enabled():
        return product(x.to(weight.dtype), weight, bias)
    made: Tensor = _Linear.apply(x, weight, bias)
    return made
