"""Owns priorities: how surprising a transition is, what that makes its priority, and the weight that corrects for it.

Shapes: S agents, B batch.
"""

from torch import Tensor

from spr.agent.distributions import cross_entropy, kl_divergence
from spr.config.schema import PRIORITIES

# By `replay.priority`: how far apart a target and a prediction are, [B].
DISTANCES = dict(zip(PRIORITIES, (kl_divergence, cross_entropy), strict=True))
_FLOOR = 1e-6
_WEIGHT_EPS = 1e-5


def priority_of(distance: Tensor, exponent: float) -> Tensor:
    """Return the priorities of transitions [S, B] whose targets and predictions are this far apart.

    The floor keeps a perfectly predicted transition from never being sampled again.
    """
    return distance.clamp(min=_FLOOR) ** exponent


def importance_weight(priority: Tensor, beta: Tensor) -> Tensor:
    """Return the importance weights [S, B] of sampled transitions, before they are divided by the largest."""
    return (1 / (priority + _WEIGHT_EPS)) ** beta
