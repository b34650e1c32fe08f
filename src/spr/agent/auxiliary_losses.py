"""Owns the auxiliary losses by name: pure functions from predictions and targets to one loss per sample.

Shapes: T targets per sample (K steps ahead, or 1 where nothing is predicted in time), B batch, D projection.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spr.agent.encoders import encoder_shapes
from spr.common.errors import UserError, did_you_mean
from spr.config.config import Config

# (predicted [T, B, D], target [T, B, D], mask [B, T] of the targets that count) -> loss [B]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TEMPERATURE = 0.1  # of the contrastive loss's similarities
_SHARPNESS = 2.0  # t of the uniformity loss
_NORM_FLOOR = 1e-3


def _check_ranks(predicted: Tensor, target: Tensor, mask: Tensor) -> None:
    assert (predicted.dim(), target.dim(), mask.dim()) == (3, 3, 2), "predicted and target [T, B, D], mask [B, T]"


def unit(x: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1; shorter than the floor they stay shorter."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=_NORM_FLOOR)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of the angle between vectors [..., D], their norms clamped from below."""
    return (unit(x) * unit(y)).sum(-1)


def spr(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return minus the sum of cosines over the steps that count (equation 4 of the paper)."""
    _check_ranks(predicted, target, mask)
    return -(cosine(predicted, target).T * mask).sum(-1)


def quadratic(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of squared distances, without normalisation: the paper's variant that collapses."""
    _check_ranks(predicted, target, mask)
    return ((predicted - target).square().sum(-1).T * mask).sum(-1)


def contrastive(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return InfoNCE (van den Oord et al. 2018) of cosines, sharpened by a temperature."""
    return bilinear(unit(predicted) / TEMPERATURE, unit(target), mask)


def bilinear(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return InfoNCE of plain products, as CURL has it (Laskin et al. 2020): the predictor is its bilinear form.

    Every other target of the whole batch, of whatever sample and time, is a negative.
    """
    _check_ranks(predicted, target, mask)
    steps, rows, size = predicted.shape
    scores = predicted.reshape(-1, size) @ target.reshape(-1, size).T  # [T * B, T * B]
    own = scores.log_softmax(-1).diagonal().view(steps, rows)
    return -(own.T * mask).sum(-1)


def uniformity(projected: Tensor) -> Tensor:
    """Return log mean exp(-2 |x - y|^2) over pairs of different samples' unit projections [T, B, D], mean over T.

    Lowest where they are spread evenly over the sphere (Wang and Isola 2020).
    """
    assert projected.dim() == 3
    x = unit(projected)
    apart = 2 - 2 * (x @ x.mT)  # [T, B, B] squared distances of unit vectors
    rows = x.shape[1]
    same = torch.eye(rows, dtype=torch.bool, device=x.device)
    weights = (-_SHARPNESS * apart).masked_fill(same, -torch.inf)
    return (weights.flatten(1).logsumexp(-1) - torch.tensor(rows * (rows - 1.0), device=x.device).log()).mean()


_KNOWN: dict[str, Loss] = {"spr": spr, "quadratic": quadratic, "contrastive": contrastive, "bilinear": bilinear}


_BUILT_IN = frozenset(_KNOWN)
_TAKEN = ("rl", "uniformity", "loss")  # by other losses, beside which it is logged


def register(name: str) -> Callable[[Loss], Loss]:
    """Register a custom function as `learner.aux_loss=NAME`; a name is given once."""

    def remember(function: Loss) -> Loss:
        if name in (*_KNOWN, *_TAKEN):
            raise UserError(f"an auxiliary loss named '{name}' is there already: choose another name")
        _KNOWN[name] = function
        return function

    return remember


def known() -> list[str]:
    """Return the names of all auxiliary losses."""
    return list(_KNOWN)


def is_built_in(name: str) -> bool:
    """Say whether a loss is one of this package's, which are functions of their tensors and look at no values."""
    return name in _BUILT_IN


def check_names(config: Config) -> None:
    """Refuse to train with a loss or an encoder that is not registered, or images too small for the encoder."""
    encoder_shapes(*config.encoder_arguments)
    if config.learner.aux_weight > 0:
        aux_loss(config.learner.aux_loss)


def aux_loss(name: str) -> Loss:
    """Return an auxiliary loss by its name; only what trains needs it."""
    if name not in _KNOWN:
        close = did_you_mean(name, _KNOWN)
        hint = close or "; if a plug-in registers it: --plugin MODULE"
        raise UserError(f"learner.aux_loss must be one of {', '.join(_KNOWN)}, not '{name}'{hint}")
    return _KNOWN[name]
