"""Owns the objective of one agent: what the paper calls L_RL and L_SPR, from a batch of sequences to losses per sample.

Single-agent and pure. Shapes: B batch, T targets, F views that gradients reach, A actions, Z atoms.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spr.config import Config
from spr.draws import Draws
from spr.networks import Networks, Noise, scale_gradient
from spr.replay import Batch
from spr.representations import cosine, representation, uniformity, unit

_PROBABILITY_FLOOR = 1e-6


class Terms(NamedTuple):
    """What the objective gives for each sequence of a batch."""

    losses: dict[str, Tensor]  # [B] each, one per weight of the configuration
    surprise: Tensor  # [B] how far prediction and target are apart: the new priority, before its exponent
    watched: dict[str, Tensor]  # scalars to look at while training


def project_distribution(atoms: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Project distributions on moved atoms [B, Z] onto the fixed support [Z] (Bellemare et al. 2017, equation 7).

    Written as a sum of triangular kernels: an atom shares its mass between its two neighbours by distance.
    """
    spacing = (support[-1] - support[0]) / (len(support) - 1)  # neighbouring atoms are rounded, their ends are not
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


def spread(x: Tensor) -> Tensor:
    """Return 1 - |mean of unit vectors|^2 over [B, D]: 0 when all point one way, that is when they have collapsed."""
    return 1 - unit(x).mean(0).square().sum()


def huber(error: Tensor) -> Tensor:
    """Return half the square of errors up to 1, and their size less a half beyond."""
    size = error.abs()
    return torch.where(size <= 1, 0.5 * error.square(), size - 0.5)


class Objective(nn.Module):
    """The losses of one agent; where it has no target networks, the online ones are their own targets."""

    def __init__(self, config: Config, online: Networks, averaged: Networks | None, copied: Networks | None) -> None:
        """Take the online networks, the moving average of the encoder, and the RL target network if there is one."""
        super().__init__()
        self.online, self.averaged, self.copied = online, averaged, copied
        self.config = config
        self.representation = representation(config.learner.representation) if config.targets else None

    def forward(self, batch: Batch, obs: tuple[Tensor, Tensor], draws: Draws) -> Terms:
        """Return the losses of a batch, seen in the views that gradients reach, [F, B, ...], and in the others."""
        first, others = obs
        views, rows = first.shape[:2]
        z = self.online.encoder(first.flatten(0, 1), _masks(draws.keep, slice(0, views))).unflatten(0, (views, rows))
        with torch.no_grad():
            z_targets, z_n = self._others(others, draws.keep, views)
        rl, surprise, value = self._rl(z[0], batch, z_n, others[-1], draws)
        losses, watched = {"rl": rl}, {"value": value}
        if self.config.targets:
            lead = 1 if self.config.augment.rl else 2  # the last of these views is what the representation starts from
            if not self.config.learner.stop_gradient:
                z_targets = z[lead:].flatten(0, 1)
            learnt, seen = self._representation(z[lead - 1], batch, z_targets)
            losses |= learnt
            watched |= seen
        return Terms(losses, surprise, watched)

    def _others(self, obs: Tensor, keep: tuple[Tensor, ...], views: int) -> tuple[Tensor, Tensor]:
        """Encode the targets by the target encoder, [T * B, ...], and the bootstrap by the online one, [B, ...].

        Where these are one network, one pass does it.
        """
        last, rows = obs.shape[0] - 1, obs.shape[1]
        if self.averaged is None:
            z = self.online.encoder(obs.flatten(0, 1), _masks(keep, slice(views, None)))
            return z[: last * rows], z[last * rows :]
        targets = self.averaged.encoder(obs[:-1].flatten(0, 1), _masks(keep, slice(views, -1)))
        return targets, self.online.encoder(obs[-1], _masks(keep, slice(-1, None)))

    def _rl(
        self, z: Tensor, batch: Batch, z_n: Tensor, bootstrap: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """n-step Q-learning (Mnih et al. 2015; van Hasselt et al. 2016): losses, surprises [B], mean value."""
        online = self.online
        with torch.no_grad():
            chosen_by, valued_by = self._next(z_n, bootstrap, draws)
            best = online.q_values(chosen_by).argmax(-1)  # [B]
            following = take(valued_by, best)  # [B, Z]
        # Dueling networks' convention: two streams flow back into the encoder, so each counts 1/sqrt(2).
        flat = z.flatten(1)
        flat = scale_gradient(flat, 1 / math.sqrt(2)) if online.head.streams == 2 else flat
        outputs = online.head(flat, _first(draws.noise))[0]
        predicted = take(outputs, batch.actions[:, 0])  # [B, Z]
        value = online.q_values(predicted.detach()).mean()
        returns, discount = batch.returns[:, None], batch.discount[:, None]
        if not online.categorical:
            error = (predicted - (returns + discount * following)).squeeze(-1)
            return huber(error), error.detach().abs(), value
        with torch.no_grad():
            support = online.support.to(z.dtype)
            target = project_distribution(returns + discount * support, following.softmax(-1), support)
        return cross_entropy(target, predicted), kl_divergence(target, predicted.detach()), value

    def _next(self, z_n: Tensor, bootstrap: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, A, Z] at the bootstrap that choose the action, and those that value it."""
        if self.copied is None:
            # The target network is the online one (update period 1) under noise of its own.
            outputs = self.online.head(z_n.flatten(1), draws.noise)
            choosing, valuing = outputs[0], outputs[-1]
        else:
            choosing = self.online.head(z_n.flatten(1), _first(draws.noise))[0]
            copied = self.copied.encoder(bootstrap, _masks(draws.keep, slice(-1, None))).flatten(1)
            valuing = self.copied.head(copied, _last(draws.noise))[0]
        return (choosing if self.config.learner.double else valuing), valuing

    def _representation(
        self, z: Tensor, batch: Batch, z_targets: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compare predicted projections with those of the targets; predict by rolling the transition model forward."""
        online, rows = self.online, z.shape[0]
        steps = len(self.config.targets)
        target = (self.averaged or online).project(z_targets.flatten(1)).unflatten(0, (steps, rows))
        if self.config.learner.stop_gradient:
            target = target.detach()
        predicted = [z]
        if self.config.transition:
            planes = online.transition.planes(batch.actions.T.flatten()).unflatten(0, (steps, rows))
            for k in range(steps):
                predicted.append(online.transition(predicted[-1], planes[k]))
            predicted = predicted[1:]
        projected = online.project(torch.cat([latent.flatten(1) for latent in predicted]))  # [T * B, D]
        y = online.predict(projected).unflatten(0, (steps, rows))
        assert self.representation is not None
        losses = {self.config.learner.representation: self.representation(y, target, batch.mask)}
        if "uniformity" in self.config.weights:
            losses["uniformity"] = uniformity(projected.unflatten(0, (steps, rows))).expand(rows)
        alike = cosine(y.detach(), target.detach()).T  # [B, T]
        watched = {
            "cosine": (alike * batch.mask).sum() / batch.mask.sum().clamp(min=1),
            "spread": spread(target[0].detach()),
        }
        return losses, watched


def take(logits: Tensor, action: Tensor) -> Tensor:
    """Return the row [B, Z] of the given actions [B] from all actions' [B, A, Z]."""
    # Not by an index: its gradient would be added atomically, and a GPU's compiler has read a row from the wrong place.
    chosen = action[:, None] == torch.arange(logits.shape[1], device=action.device)  # [B, A]
    return torch.where(chosen[..., None], logits, 0).sum(1)


def _first(noise: Noise) -> Any:
    """Return the first of several draws, still with a leading dimension."""
    return tree_map(lambda e: e[:1], noise)


def _last(noise: Noise) -> Any:
    """Return the last of several draws, still with a leading dimension."""
    return tree_map(lambda e: e[-1:], noise)


def _masks(keep: tuple[Tensor, ...], which: slice) -> tuple[Tensor, ...]:
    """Select the dropout masks [O, B, H, W, C] of some observations, flattened to the encoder's batch."""
    return tuple(mask[which].flatten(0, 1) for mask in keep)


def importance_weighted(losses: dict[str, Tensor], weights: dict[str, float], importance: Tensor) -> Tensor:
    """Return the scalar to minimise: mean over the batch of importance * sum of weighted losses."""
    if losses.keys() != weights.keys():
        raise KeyError(f"losses {sorted(losses)} do not match their weights {sorted(weights)}")
    return (importance * sum(weights[name] * loss for name, loss in losses.items())).mean()
