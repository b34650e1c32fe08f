"""Owns sampling by priority: a sum tree over the slots of a fleet's replay.

Shapes: S agents, N slots, B batch, f the fan-out of the tree.
"""

import torch
from torch import Tensor


class SumTree:
    """Priorities as the leaves of a tree with two inner levels, whose nodes are summed again at each sampling.

    They are summed in a fixed order: a parallel scan over all leaves has none, and would sample differently from run to
    run.
    """

    def __init__(self, agents: int, slots: int, device: torch.device) -> None:
        """Start with priorities of zero, which are never sampled."""
        self.fanout = next(f for f in range(2, slots + 2) if f**3 >= slots)
        self.leaves = torch.zeros(agents, self.fanout**3, device=device)  # [S, f * f * f]
        self.agent = torch.arange(agents, device=device)[:, None]  # [S, 1] picks each agent's own rows

    def find(self, uniform: Tensor) -> Tensor:
        """Return the slots [S, B] in whose shares of the sum uniform numbers [S, B] fall."""
        f = self.fanout
        leaves = self.leaves.double().view(-1, f, f, f)
        middle = leaves.sum(-1)
        top = middle.sum(-1)  # [S, f]
        x = uniform * top.sum(-1, keepdim=True)
        i, x = _pick(top[:, None, :].expand(-1, uniform.shape[1], -1), x)
        j, x = _pick(middle[self.agent, i], x)
        k, _ = _pick(leaves[self.agent, i, j], x)
        return (i * f + j) * f + k


def _pick(share: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the children [S, B, f] holds x [S, B], and what of x is left within it."""
    ends = share.cumsum(-1)
    last = ((share > 0) * torch.arange(share.shape[-1], device=share.device)).amax(-1)
    # Rounding may leave x at or past the last end; children with no share are never picked.
    child = torch.minimum((ends <= x[..., None]).sum(-1), last)
    start = (ends - share).gather(-1, child[..., None]).squeeze(-1)
    return child, (x - start).clamp(min=0)
