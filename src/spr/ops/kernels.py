"""Owns how an operation that has a kernel of ours is made known to PyTorch: for each device, the compiler and `vmap`.

An operation is called for one agent, as everything in the networks is. Its kernel is written for a fleet: its tensors
are [S, ...]. On other devices its plain version runs, so that all but the kernels themselves can be tested without a
GPU.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

KERNELS: dict[Any, Callable[..., Any]] = {}  # what launches the kernel of an operation that has one


def has_kernels(x: Tensor) -> bool:
    """Say whether there are kernels of our own for such a tensor."""
    return x.device.type == "cuda" and x.dtype in (torch.uint8, torch.bfloat16, torch.float32)


class Deferred:
    """The functions of a module that is imported when one is called: Triton comes with a GPU's PyTorch only."""

    def __init__(self, name: str) -> None:
        """Import nothing."""
        self._name = name

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """Return what imports the module and calls its function."""

        def call(*args: Any) -> Any:
            return getattr(import_module(self._name), function)(*args)

        return call


def fleet_op(
    like: Callable[..., Any], kernel: Callable[..., Any] | None = None, schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation `spr::NAME` of its plain version, a function called `_NAME`.

    `like` returns empty tensors of the result's shapes. `kernel` computes the result on a GPU; without one the plain
    version does.
    """

    def make(plain: Callable[..., Any]) -> Any:
        name = f"spr::{plain.__name__.removeprefix('_')}"
        op = torch.library.custom_op(name, plain, mutates_args=(), schema=schema)
        op.register_fake(like)
        op.register_vmap(_over_agents(op))
        if kernel is not None:
            op.register_kernel("cuda", kernel)
            KERNELS[op] = kernel
        return op

    return make


def _over_agents(op: Any) -> Callable[..., Any]:
    """Return how `vmap` calls an operation: its agents, each a fleet of one, become one fleet."""

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
