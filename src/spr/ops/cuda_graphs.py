"""Owns how device work is launched: compiled and captured on a GPU, plainly on a CPU; and copies from and to the host.

A GPU finishes the small kernels of one update faster than Python can launch them. So its work is fused by the compiler
and then recorded once as a CUDA graph, which one call replays; everything that changes lies in device memory.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

_EAGER = 3  # calls before a graph is captured


def compiled(function: Callable[..., T], device: torch.device) -> Callable[..., T]:
    """Fuse a function's small kernels on a GPU, where their number rules the time; on a CPU leave it as it is."""
    if device.type != "cuda":
        return function
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        # With padded layouts (torch 2.11) a gather from a padded tensor read with the strides of another layout, which
        # gave wrong losses without a word. `tests/training/test_gpu.py` compares compiled with plain updates.
        "comprehensive_padding": False,
        # Three checks for each pixel of each observation, of indices that are clamped just before.
        "assert_indirect_indexing": False,
        # Else the compiler times several ways to sum, which round differently, and takes the fastest it sees: it may be
        # another one another time, and a run could then not be repeated, nor resumed to the same bits.
        "deterministic": True,
        # What the compiler would look for at length and not find here: with and without, it wrote the same (torch 2.11,
        # `spr`, 1 and 10 agents).
        "pattern_matcher": False,
        "loop_ordering_after_fusion": False,
        "loop_index_inversion_in_fusion": False,
        "max_fusion_buffer_group_pairwise_attempts": 8,
    }
    # Its helpers take seconds to start: let them while games are still played at random.
    import torch._inductor.async_compile as compiler  # noqa: PLC0415 - takes seconds, and a CPU does not need it

    compiler.maybe_warm_pool()
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def captured(function: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Return a function that does the same: on a GPU, from its fourth call on, by replaying a CUDA graph.

    The first calls run eagerly, and count: they let the libraries choose their kernels before these are frozen. What
    the function returns is overwritten by its next call.
    """
    if device.type != "cuda":
        return function
    calls = 0
    graph = torch.cuda.CUDAGraph()
    result: T

    def call() -> T:
        nonlocal calls, result
        calls += 1
        if calls <= _EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = function()
            torch.cuda.current_stream().wait_stream(side)
            return result
        if calls == _EAGER + 1:
            with torch.cuda.graph(graph):
                result = function()
        graph.replay()
        return result

    return call


class HostToDevice:
    """Arrays that the host sends again and again, each to a fixed place on the device, through pinned memory.

    Copies are asynchronous: synchronise on a later result before sending again, or the pinned buffer is overwritten in
    flight.
    """

    def __init__(self, device: torch.device, like: dict[str, NDArray[Any]]) -> None:
        """Take the places; they begin as zeros."""
        pinned = device.type == "cuda"
        self._host = {
            name: torch.zeros_like(torch.from_numpy(array), pin_memory=pinned) for name, array in like.items()
        }
        self._device = {name: tensor.to(device) for name, tensor in self._host.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return where an array arrives."""
        return self._device[name]

    def send(self, **arrays: NDArray[Any]) -> None:
        """Send new contents."""
        for name, array in arrays.items():
            np.copyto(self._host[name].numpy(), array)
            self._device[name].copy_(self._host[name], non_blocking=True)

    def send_some(self, name: str, places: Iterable[int], array: NDArray[Any]) -> None:
        """Send new contents of some places, the first dimension's; the others keep theirs."""
        host, there = self._host[name], self._device[name]
        for place in places:
            np.copyto(host[place].numpy(), array[place])
            there[place].copy_(host[place], non_blocking=True)


class DeviceToHost:
    """A tensor copied from the device to pinned memory, asynchronously."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is on its way."""
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._host: Tensor | None = None

    def post(self, tensor: Tensor) -> None:
        """Copy a tensor to the host as soon as it is computed; the device does not wait."""
        if self._event is None:
            self._host = tensor
            return
        if self._host is None:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event.record()

    def read(self) -> NDArray[Any]:
        """Wait for what was posted, and for nothing later."""
        assert self._host is not None, "nothing was posted"
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[Any] = self._host.numpy().copy()
        return array
