"""Owns the gradients of a fleet on a CPU: of one agent after another, or of several side by side.

An agent by itself has all threads. Agents of a fleet divide them, and several are computed at once. On two cores four
agents then took 0.76 to 0.89 of the time of one after another. After some updates the computation is traced: the same
operations with the same bits, without the work of Python and autograd around each.
Shapes: S agents.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from spr.ops.cpu_trace import Traced

_UNTRACED = 200  # updates before it is traced: tests and short runs do without


class AgentGradients:
    """Applies a function to each agent's part of its arguments."""

    def __init__(self, function: Callable[..., Any], traceable: bool = True) -> None:
        """Take a function of one agent that several threads may call at once, and whether it looks at no values."""
        self._function, self._traceable = function, traceable
        self._calls = 0
        self._traced: Traced | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, *args: Any) -> list[Any]:
        """Return what the function computes of each agent's part of the arguments, [S, ...] each."""
        flat, spec = tree_flatten(args)
        each = [[tensor[i] for tensor in flat] for i in range(len(flat[0]))]

        def of_agent(*tensors: Tensor) -> Any:
            return self._function(*tree_unflatten(tensors, spec))

        compute: Callable[..., Any] = of_agent
        if self._traceable and self._calls >= _UNTRACED:
            self._traced = compute = self._traced or Traced(of_agent, each[0])
        self._calls += 1
        if len(each) == 1:
            return [compute(*each[0])]
        return list(self._side_by_side(len(each)).map(lambda tensors: compute(*tensors), each))

    def _side_by_side(self, agents: int) -> ThreadPoolExecutor:
        if self._pool is None:
            threads = torch.get_num_threads()
            workers = min(agents, threads)
            self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
        return self._pool
