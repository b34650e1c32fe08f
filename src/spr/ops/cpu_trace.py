"""Owns tracing on a CPU: a function of tensors becomes the list of the library's operations that it carries out.

What a CUDA graph is on a GPU: the same operations in the same order, with the same bits, without the work of Python and
autograd around each. It takes two seconds to make, so only functions that are called often are traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


class Traced:
    """A pure function of tensors that does not look at their values, as the operations that it carries out."""

    def __init__(self, function: Callable[..., Any], example: Sequence[Tensor]) -> None:
        """Note what it does with tensors like these."""
        self._graph = make_fx(function)(*example)

    def __call__(self, *given: Tensor) -> Any:
        """Call it; several threads may."""
        with torch.no_grad():
            return self._graph(*given)
