"""Owns the objective of one agent: what the paper calls L_RL and L_SPR, from a batch of sequences to losses per sample.

Single-agent and pure. Shapes: B batch, T targets, A actions, Z atoms, D projection; latents z are [B, H, W, C].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spr.agent.action_padding import ActionMask
from spr.agent.augmentation import Observed, Planes, Views, view_indices
from spr.agent.auxiliary_losses import aux_loss, cosine, uniformity, unit
from spr.agent.distributions import cross_entropy, project_distribution
from spr.agent.networks import Networks
from spr.agent.priorities import DISTANCES
from spr.agent.q_head import Noise
from spr.agent.random_streams import UpdateRandomness
from spr.agent.replay import Batch
from spr.config.config import Config
from spr.ops.functional import scale_gradient, take_action


class LossOutput(NamedTuple):
    """What the objective gives for each sequence of a batch."""

    losses: dict[str, Tensor]  # [B] each, one per weight of the configuration
    raw_priority: Tensor  # [B] how far prediction and target are apart: the new priority, before its exponent
    metrics: dict[str, Tensor]  # scalars to look at while training


def spread(x: Tensor) -> Tensor:
    """Return 1 - |mean of unit vectors|^2 over [B, D]: 0 when all point one way, that is when they have collapsed."""
    assert x.dim() == 2
    return 1 - unit(x).mean(0).square().sum()


def huber(error: Tensor) -> Tensor:
    """Return half the square of errors up to 1, and their size less a half beyond."""
    size = error.abs()
    return torch.where(size <= 1, 0.5 * error.square(), size - 0.5)


class Objective(nn.Module):
    """The losses of one agent; where it has no target networks, the online ones are their own targets."""

    def __init__(self, config: Config, online: Networks, ema: Networks | None, target: Networks | None) -> None:
        """Take the online networks, the moving average of the encoder, and the RL target network if there is one.

        Where that target is an average of everything, it gives the auxiliary loss its targets too.
        """
        super().__init__()
        self.online, self.ema, self.target = online, ema, target
        self.averaged = config.learner.average > 0
        self.config = config
        self.places = view_indices(config)
        self.distance = DISTANCES[config.replay.priority]
        self.aux_loss = aux_loss(config.learner.aux_loss) if config.target_offsets else None

    def forward(
        self, batch: Batch, views: Views, draws: UpdateRandomness, action_mask: ActionMask = None
    ) -> LossOutput:
        """Encode the views of a batch and return its losses; `action_mask` says which actions the agent's game has."""
        places, stop_gradient = self.places, self.config.learner.stop_gradient
        z = _encode(self.online, views.with_grad, draws.dropout, slice(0, places.with_grad))
        with torch.no_grad():
            z_targets, z_choosing, z_valuing = self._encode_fixed(views.without_grad, draws.dropout)
        rl, raw_priority, value = self._rl_loss(z[places.obs], batch, z_choosing, z_valuing, draws, action_mask)
        losses, metrics = {"rl": rl}, {"value": value}
        if self.aux_loss is not None:
            targets = z_targets if stop_gradient else z[places.targets]
            more_losses, more_metrics = self._aux_losses(z[places.anchor], batch, targets)
            losses |= more_losses
            metrics |= more_metrics
        return LossOutput(losses, raw_priority, metrics)

    def _encode_fixed(self, obs: Observed, dropout: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the targets by the target encoder, [T, B, ...], and the bootstrap, [B, ...], twice.

        That is by the online encoder, to choose an action, and by the RL target's, to value it. Where some of these are
        one network, one pass does it.
        """
        first, targets, bootstrap = self.places.with_grad, self.places.targets, self.places.bootstrap
        last, everything = slice(bootstrap, bootstrap + 1), slice(first, bootstrap + 1)
        of_bootstrap = slice(bootstrap - first, None)
        if self.target is not None and self.averaged:
            z = _encode(self.target, obs, dropout, everything)
            z_choosing = _encode(self.online, _part(obs, of_bootstrap), dropout, last)[0]
            return z[: bootstrap - first], z_choosing, z[bootstrap - first]
        if self.ema is None:
            z = _encode(self.online, obs, dropout, everything)
            z_targets, z_choosing = z[: bootstrap - first], z[bootstrap - first]
        else:
            z_targets = _encode(self.ema, _part(obs, slice(0, targets.stop - first)), dropout, targets)
            z_choosing = _encode(self.online, _part(obs, of_bootstrap), dropout, last)[0]
        if self.target is None:
            return z_targets, z_choosing, z_choosing
        return z_targets, z_choosing, _encode(self.target, _part(obs, of_bootstrap), dropout, last)[0]

    def _rl_loss(
        self,
        z: Tensor,
        batch: Batch,
        z_choosing: Tensor,
        z_valuing: Tensor,
        draws: UpdateRandomness,
        action_mask: ActionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """n-step Q-learning (Mnih et al. 2015; van Hasselt et al. 2016): losses and raw priorities [B], mean value."""
        online = self.online
        with torch.no_grad():
            chosen_by, valued_by = self._bootstrap_outputs(z_choosing, z_valuing, draws, action_mask)
            best = online.q_values(chosen_by, action_mask).argmax(-1)  # [B]
            following = take_action(valued_by, best)  # [B, Z]
        flat = scale_gradient(z.flatten(1), online.head.gradient_scale)
        outputs = online.head(flat, _first(draws.noise), action_mask)[0]
        predicted = take_action(outputs, batch.actions[:, 0])  # [B, Z]
        value = online.q_values(predicted.detach()).mean()
        returns, discount = batch.returns[:, None], batch.discount[:, None]
        if not online.categorical:
            error = (predicted - (returns + discount * following)).squeeze(-1)
            return huber(error), error.detach().abs(), value
        with torch.no_grad():
            support = online.support
            target = project_distribution(returns + discount * support, following.softmax(-1), support)
        return cross_entropy(target, predicted), self.distance(target, predicted.detach()), value

    def _bootstrap_outputs(
        self, z_choosing: Tensor, z_valuing: Tensor, draws: UpdateRandomness, action_mask: ActionMask
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, A, Z] at the bootstrap that choose the action, and those that value it."""
        if self.target is None:
            # The target network is the online one (update period 1) under noise of its own.
            outputs = self.online.head(z_choosing.flatten(1), draws.noise, action_mask)
            choosing, valuing = outputs[0], outputs[-1]
        else:
            choosing = self.online.head(z_choosing.flatten(1), _first(draws.noise), action_mask)[0]
            valuing = self.target.head(z_valuing.flatten(1), _last(draws.noise), action_mask)[0]
        return (choosing if self.config.learner.double_q else valuing), valuing

    def _aux_losses(self, z: Tensor, batch: Batch, z_targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compare predicted projections with those of the targets; predict by rolling the transition model forward."""
        online, rows = self.online, z.shape[0]
        steps = len(self.config.target_offsets)
        targets_of = self.target if self.averaged else self.ema
        target = (targets_of or online).project(z_targets.flatten(0, 1).flatten(1)).unflatten(0, (steps, rows))
        if self.config.learner.stop_gradient:
            target = target.detach()
        predicted = z[None]  # [T, B, H, W, C]
        if self.config.has_model:
            bias = online.transition.action_bias(batch.actions.T.flatten()).unflatten(0, (steps, rows))
            predicted = online.transition(z, bias)
        projected = online.project(predicted.flatten(0, 1).flatten(1))  # [T * B, D]
        y = online.predict(projected).unflatten(0, (steps, rows))
        assert self.aux_loss is not None
        losses = {self.config.learner.aux_loss: self.aux_loss(y, target, batch.mask)}
        if "uniformity" in self.config.weights:
            losses["uniformity"] = uniformity(projected.unflatten(0, (steps, rows))).expand(rows)
        alike = cosine(y.detach(), target.detach()).T  # [B, T]
        metrics = {
            "cosine": (alike * batch.mask).sum() / batch.mask.sum().clamp(min=1),
            "spread": spread(target[0].detach()),
        }
        return losses, metrics


def _first(noise: Noise) -> Any:
    """Return the first of several draws, still with a leading dimension."""
    return tree_map(lambda e: e[:1], noise)


def _last(noise: Noise) -> Any:
    """Return the last of several draws, still with a leading dimension."""
    return tree_map(lambda e: e[-1:], noise)


def _part(obs: Observed, which: slice) -> Observed:
    """Return some of the views [O, B, ...]."""
    part: Observed = tree_map(lambda t: t[which], obs)
    return part


def _encode(networks: Networks, obs: Observed, dropout: tuple[Tensor, ...], which: slice) -> Tensor:
    """Encode views [O, B, ...] under the dropout masks [all views, B, H, W, C] of these.

    Those that are not scaled yet are encoded one by one, others in one pass.
    """
    masks = tuple(mask[which] for mask in dropout)
    if isinstance(obs, Tensor):
        z: Tensor = networks.encoder(obs.flatten(0, 1), tuple(mask.flatten(0, 1) for mask in masks))
        parts: Tensor = z.unflatten(0, obs.shape[:2])
        return parts
    each = [
        networks.encoder(Planes(pixels, brightness).scaled(), tuple(mask[i] for mask in masks))
        for i, (pixels, brightness) in enumerate(zip(*obs, strict=True))
    ]
    return torch.stack(each) if len(each) > 1 else each[0][None]


def importance_weighted(losses: dict[str, Tensor], weights: dict[str, float], importance: Tensor) -> Tensor:
    """Return the scalar to minimise: mean over the batch of importance * sum of weighted losses."""
    assert importance.dim() == 1
    if losses.keys() != weights.keys():
        raise KeyError(f"losses {sorted(losses)} do not match their weights {sorted(weights)}")
    return (importance * sum(weights[name] * loss for name, loss in losses.items())).mean()
