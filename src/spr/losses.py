"""Owns the objective of one agent: what the paper calls L_RL and L_SPR, from a batch of sequences to losses per sample.

Single-agent and pure. Shapes: B batch, K depth, O = K + 2 observations (bootstrap last), A actions, Z atoms.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spr.draws import Draws
from spr.networks import HeadNoise, LayerNoise, Networks, expected_value, scale_gradient
from spr.replay import Batch

_NORM_FLOOR = 1e-3
_PROBABILITY_FLOOR = 1e-6


class Terms(NamedTuple):
    """What the objective gives for each sequence of a batch."""

    losses: dict[str, Tensor]  # [B] each, one per weight of the configuration
    kl: Tensor  # [B] divergence of prediction from target: the new priority, before its exponent
    watched: dict[str, Tensor]  # scalars to look at while training


def project_distribution(atoms: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Project distributions on moved atoms [B, Z] onto the fixed support [Z] (Bellemare et al. 2017, equation 7).

    Written as a sum of triangular kernels: an atom shares its mass between its two neighbours by distance.
    """
    spacing = support[1] - support[0]
    clipped = atoms.clamp(support[0], support[-1])
    share = (1 - (clipped[:, None, :] - support[None, :, None]).abs() / spacing).clamp(0, 1)  # [B, Z, Z]
    return (share * probabilities[:, None, :]).sum(-1)


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Return - sum over atoms of target * log softmax(logits), [B]."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def kl_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return KL(target || softmax(logits)), [B], with the target clamped so that its logarithm exists."""
    floored = target.clamp(_PROBABILITY_FLOOR, 1)
    return (floored * (floored.log() - logits.log_softmax(-1))).sum(-1)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of the angle between vectors [..., D], their norms clamped from below."""
    return (unit(x) * unit(y)).sum(-1)


def unit(x: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1; shorter than the floor they stay shorter."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=_NORM_FLOOR)


def spread(x: Tensor) -> Tensor:
    """Return 1 - |mean of unit vectors|^2 over [B, D]: 0 when all point one way, that is when they have collapsed."""
    return 1 - unit(x).mean(0).square().sum()


class Objective(nn.Module):
    """The losses of one agent; without target networks, the online ones are their own targets."""

    def __init__(self, online: Networks, target: Networks | None, losses: frozenset[str]) -> None:
        super().__init__()
        self.online = online
        self.target = target
        self.names = losses

    def forward(self, batch: Batch, obs: tuple[Tensor, Tensor], draws: Draws) -> Terms:
        """Return the losses of a batch, seen first as [1, B, 4, 84, 84] and later as [O - 1, B, 4, 84, 84]."""
        first, later = obs
        z = self.online.encoder(first[0], _masks(draws.keep, slice(0, 1)))
        with torch.no_grad():
            z_future, z_n = self._later(later, draws.keep)
        rl, kl, value = self._rl(z, batch, z_n, draws)
        losses, watched = {"rl": rl}, {"value": value}
        if "spr" in self.names:
            spr, seen = self._spr(z, batch, z_future)
            losses["spr"] = spr
            watched |= seen
        return Terms(losses, kl, watched)

    def _later(self, obs: Tensor, keep: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Encode the next K observations by the target encoder, [K * B, ...], the bootstrap by the online, [B, ...].

        Where these are one network, one pass does it.
        """
        depth, rows = obs.shape[0] - 1, obs.shape[1]
        if self.target is None:
            z = self.online.encoder(obs.flatten(0, 1), _masks(keep, slice(1, None)))
            return z[: depth * rows], z[depth * rows :]
        future = self.target.encoder(obs[:-1].flatten(0, 1), _masks(keep, slice(1, -1)))
        return future, self.online.encoder(obs[-1], _masks(keep, slice(-1, None)))

    def _rl(self, z: Tensor, batch: Batch, z_n: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """n-step double categorical Q-learning (Bellemare et al. 2017; van Hasselt et al. 2016)."""
        head, support = self.online.head, self.online.support.to(z.dtype)
        with torch.no_grad():
            # The target network is the online one (update period 1) under noise of its own.
            online, target = head(z_n.flatten(1), draws.noise).softmax(-1)
            best = expected_value(online, support).argmax(-1)  # [B]
            atoms = batch.returns[:, None] + batch.discount[:, None] * support
            expected = project_distribution(atoms, take(target, best), support)
        # Dueling networks' convention: two streams flow back into the encoder, so each counts 1/sqrt(2).
        logits = head(scale_gradient(z.flatten(1), 1 / math.sqrt(2)), _first(draws.noise))[0]
        chosen = take(logits, batch.actions[:, 0])
        value = expected_value(chosen.detach().softmax(-1), support).mean()
        return cross_entropy(expected, chosen), kl_divergence(expected, chosen.detach()), value

    def _spr(self, z: Tensor, batch: Batch, z_future: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Predict the target projections of the next K states by rolling the transition model forward."""
        online, depth, rows = self.online, batch.mask.shape[-1], z.shape[0]
        with torch.no_grad():
            y_target = (self.target or online).head.project(z_future.flatten(1)).view(depth, rows, -1)
        planes = online.transition.planes(batch.actions.T.flatten()).unflatten(0, (depth, rows))
        predicted = []
        for k in range(depth):
            z = online.transition(z, planes[k])
            predicted.append(z.flatten(1))
        y = online.predict(online.head.project(torch.cat(predicted)))  # [K * B, D]
        similarity = cosine(y.view(depth, rows, -1), y_target).T  # [B, K]
        watched = {
            "cosine": ((similarity * batch.mask).sum() / batch.mask.sum().clamp(min=1)).detach(),
            "spread": spread(y_target[0]),
        }
        return -(similarity * batch.mask).sum(-1), watched


def take(logits: Tensor, action: Tensor) -> Tensor:
    """Return the row [B, Z] of the given actions [B] from all actions' [B, A, Z]."""
    # Not by an index: its gradient would be added atomically, and a GPU's compiler has read a row from the wrong place.
    chosen = action[:, None] == torch.arange(logits.shape[1], device=action.device)  # [B, A]
    return torch.where(chosen[..., None], logits, 0).sum(1)


def _first(noise: HeadNoise) -> HeadNoise:
    """Return the first of several draws, still with a leading dimension."""
    return HeadNoise(*(LayerNoise(layer.input[:1], layer.output[:1]) for layer in noise))


def _masks(keep: tuple[Tensor, ...], which: slice) -> tuple[Tensor, ...]:
    """Select the dropout masks [O, B, H, W, C] of some observations, flattened to the encoder's batch."""
    return tuple(mask[which].flatten(0, 1) for mask in keep)


def importance_weighted(losses: dict[str, Tensor], weights: dict[str, float], importance: Tensor) -> Tensor:
    """Return the scalar to minimise: mean over the batch of importance * sum of weighted losses."""
    if losses.keys() != weights.keys():
        raise KeyError(f"losses {sorted(losses)} do not match their weights {sorted(weights)}")
    return (importance * sum(weights[name] * loss for name, loss in losses.items())).mean()
