"""Owns distributions of returns on fixed atoms (Bellemare et al. 2017): projection, and how far two are apart.

Shapes: B batch, Z atoms.
"""

from torch import Tensor

_PROBABILITY_FLOOR = 1e-6


def project_distribution(atoms: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Project distributions on moved atoms [B, Z] onto the fixed support [Z] (Bellemare et al. 2017, equation 7).

    Written as a sum of triangular kernels: an atom shares its mass between its two neighbours by distance.
    """
    assert (atoms.dim(), probabilities.dim(), support.dim()) == (2, 2, 1)
    spacing = (support[-1] - support[0]) / (len(support) - 1)  # neighbouring atoms are rounded, their ends are not
    clipped = atoms.clamp(support[0], support[-1])
    share = (1 - (clipped[:, None, :] - support[None, :, None]).abs() / spacing).clamp(0, 1)  # [B, Z, Z]
    return (share * probabilities[:, None, :]).sum(-1)


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Return - sum over atoms of target * log softmax(logits), [B]."""
    assert target.dim() == logits.dim() == 2
    return -(target * logits.log_softmax(-1)).sum(-1)


def kl_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return KL(target || softmax(logits)), [B], with the target clamped so that its logarithm exists."""
    assert target.dim() == logits.dim() == 2
    floored = target.clamp(_PROBABILITY_FLOOR, 1)
    return (floored * (floored.log() - logits.log_softmax(-1))).sum(-1)
