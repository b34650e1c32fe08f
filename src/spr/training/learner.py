"""Owns learning: the state of a fleet's learners and one update of all of them.

The objective is written for one agent; `vmap` over rows of parameters makes the fleet. Shapes: S agents first,
everywhere; P the numbers of an agent (see `parameter_layout`).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.optim.adam import adam
from torch.utils._pytree import tree_map

from spr.agent.action_padding import action_masks, pad_actions
from spr.agent.augmentation import Views, make_views
from spr.agent.auxiliary_losses import is_built_in as losses_are_ours
from spr.agent.encoders import is_built_in as encoder_is_ours
from spr.agent.networks import CLIPS, Group, Networks, networks_without_weights
from spr.agent.objective import LossOutput, Objective, importance_weighted
from spr.agent.parameter_layout import Layout
from spr.agent.priorities import priority_of
from spr.agent.random_streams import RawNumbers, RngStreams, UpdateRandomness
from spr.agent.replay import Batch, Replay
from spr.agent.schedules import ScheduledScalars
from spr.config.config import Config
from spr.ops import each_agent
from spr.ops.cuda_graphs import compiled
from spr.training.agent_gradients import AgentGradients


def _acts(group: Group) -> bool:
    return group.acts


def _all(_: Group) -> bool:
    return True


def _in_ema(group: Group) -> bool:
    return group.in_ema


def _clipped_as(name: str | None) -> Callable[[Group], bool]:
    return lambda group: group.clip == name


@dataclass(frozen=True)
class LearnerState:
    """What learning changes, in place."""

    layout: Layout
    weights: Tensor  # [S, P]
    ema: Tensor  # [S, columns in the average]; no columns when the decay is 0, where it would equal the weights
    target: Tensor  # [S, columns that act] the RL target network, or the average of all, [S, P]; else no columns
    first_moment: Tensor  # [S, P]
    second_moment: Tensor  # [S, P]
    count: Tensor  # [] Adam's steps
    action_mask: Tensor | None  # [S, A] which actions each agent's game has; None: all that there is room for
    diverged: Tensor  # [S] whose loss or gradient was not finite: such an agent stays as it was before that update
    averaged: bool  # whether the target is an average of all weights, which then acts and is evaluated

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights by name, [S, ...] each: views, not copies."""
        return self.layout.views(self.weights)

    @property
    def acting(self) -> dict[str, Tensor]:
        """The weights that act, are evaluated and saved, by name, [S, ...] each: the average where there is one."""
        return self.layout.views(self.target if self.averaged else self.weights)


# [S, P]; or, of agents whose gradients were computed each by itself, by name for each: a row would be a copy.
Grads = Tensor | list[dict[str, Tensor]]


class Gradients(NamedTuple):
    """The gradients of one batch."""

    grads: Grads
    norms: dict[str, Tensor]  # [S] each, of the gradients that are clipped together
    metrics: dict[str, Tensor]  # [S] each


class Learner:
    """One update of a fleet."""

    def __init__(
        self,
        config: Config,
        num_actions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        matmul_dtype: torch.dtype | None = None,
        fuse: Callable[..., Any] = compiled,
    ) -> None:
        """Build the objective without weights: they live in the state.

        There is room for `num_actions`; an agent's game may have fewer (see `init`).
        Weights are of `dtype`; matrix products are taken in `matmul_dtype`, or in the same. `fuse` compiles the parts
        of an update on a GPU; with another function the same parts run plainly.
        """
        self.config = config
        self._num_actions = num_actions
        self._device = device
        self._dtype = dtype
        self._matmul_dtype = matmul_dtype or dtype
        # On a CPU the library's own fused Adam; on a GPU its plain one, which the compiler fuses with clipping.
        self._fused = device.type == "cpu"
        self._in_turn = each_agent.takes_turns(device)
        # What a plug-in registers may look at values, which a trace would freeze.
        ours = losses_are_ours(config.learner.aux_loss) and encoder_is_ours(config.network.encoder)
        self._fleet_gradients = AgentGradients(self._agent_gradients, traceable=ours)
        self._has_ema = bool(config.target_offsets) and config.learner.ema_decay > 0
        self._averaged = config.learner.average > 0
        self._has_target = config.learner.target_period > 1 or self._averaged
        self._in_target = _all if self._averaged else _acts
        self._objectives = threading.local()  # one for each thread: a call gives its modules their weights for a while
        online = self._objective.online
        self.layout = Layout({name: p.shape for name, p in online.named_parameters()}, online.groups())
        self.ema_columns = self.layout.columns(_in_ema)
        self.target_columns = self.layout.columns(self._in_target)
        clips = {group.clip for group in self.layout.groups.values()} - {None}
        self._clipped = {name: self.layout.columns(_clipped_as(name)) for name in CLIPS if name in clips}
        self._unclipped = self.layout.columns(_clipped_as(None))
        # AdamW's decay is for what is multiplied: biases, and scales of normalisation, stay. [P]
        decays = self.layout.one_number_each(lambda _, shape: float(len(shape) > 1)).to(device, torch.bool)
        self._decays = decays if config.learner.weight_decay > 0 else None
        self._cut_randomness = fuse(RngStreams.draws, device)
        self._sample_views = fuse(self.sample_views, device)
        self._losses = fuse(self.losses, device)
        self._update_priorities = fuse(self.update_priorities, device)
        self._apply_gradients = fuse(self.apply_gradients, device)

    @property
    def _objective(self) -> Objective:
        """The objective, without weights."""
        if not hasattr(self._objectives, "mine"):
            online, ema, target = (
                networks_without_weights(self.config, self._num_actions, self._device, self._dtype) if wanted else None
                for wanted in (True, self._has_ema, self._has_target)
            )
            assert online is not None
            self._objectives.mine = Objective(self.config, online, ema, target)
        mine: Objective = self._objectives.mine
        return mine

    def init(self, seeds: Sequence[int], game_num_actions: Sequence[int] | None = None) -> LearnerState:
        """Initialise one agent per seed."""
        each = [self._num_actions] * len(seeds) if game_num_actions is None else list(game_num_actions)
        weights = self.init_weights(seeds, game_num_actions)
        ema, target = weights[:, self.ema_columns], weights[:, self.target_columns]
        return LearnerState(
            layout=self.layout,
            weights=weights,
            ema=ema.clone() if self._has_ema else ema[:, :0].clone(),
            target=target.clone() if self._has_target else target[:, :0].clone(),
            first_moment=torch.zeros_like(weights),
            second_moment=torch.zeros_like(weights),
            count=torch.zeros((), device=self._device),
            # Agents whose games have every action get a mask too: an agent computes the same in any fleet.
            action_mask=None if game_num_actions is None else action_masks(each, self._num_actions, self._device),
            diverged=torch.zeros(len(seeds), dtype=torch.bool, device=self._device),
            averaged=self._averaged,
        )

    def init_weights(self, seeds: Sequence[int], game_num_actions: Sequence[int] | None = None) -> Tensor:
        """Draw the weights of new networks, [S, P]: one agent per seed, each from its own stream of numbers.

        Where games have different numbers of actions, each agent is initialised with its own and then padded: so it is
        the same alone, among seeds of its game, and among other games.
        """
        room, agents = self._num_actions, []
        each = [room] * len(seeds) if game_num_actions is None else list(game_num_actions)
        with torch.random.fork_rng(devices=[]):
            for seed, own in zip(seeds, each, strict=True):
                torch.manual_seed(seed)
                networks = Networks(self.config, own)
                agents.append(pad_actions(dict(networks.named_parameters()), networks.action_dims(), own, room))
        stacked = {name: torch.stack([agent[name].detach() for agent in agents]) for name in agents[0]}
        return self.layout.rows(stacked, self._dtype, self._device)

    def update(
        self, state: LearnerState, replay: Replay, rng: RngStreams, raw: RawNumbers, rates: ScheduledScalars
    ) -> dict[str, Tensor]:
        """Do one update of every agent, in place, by the random numbers `raw`; return the metrics, [S] each."""
        draws = self._cut_randomness(rng, raw)
        found = self.gradients_and_priorities(state, replay, draws, rates)
        self._apply_gradients(state, found.grads, found.norms, rates.learning_rate)
        return found.metrics

    def gradients_and_priorities(
        self, state: LearnerState, replay: Replay, draws: UpdateRandomness, rates: ScheduledScalars
    ) -> Gradients:
        """The first half of an update, up to the gradients; a diverged agent is noted, and its priorities stay."""
        # sample, augment
        batch, views = self._sample_views(replay, draws, rates)
        # encode, losses, gradients
        grads, loss, output = self.gradients(state, batch, views, draws)
        # priorities
        found: Gradients = self._update_priorities(state, replay, batch.start, grads, loss, output)
        return found

    def sample_views(self, replay: Replay, draws: UpdateRandomness, rates: ScheduledScalars) -> tuple[Batch, Views]:
        """Sample sequences, and build what the networks see of them, in the dtype of products."""
        batch = replay.sample(draws.sample, rates.beta, rates.n_step, rates.gamma)
        augment = _cast(draws.augment, self._dtype)
        offsets = replay.offsets_at(rates.n_step)
        views = make_views(self.config, batch.frames, offsets, batch.visible, augment, self._matmul_dtype)
        return _cast(batch, self._dtype), views

    def gradients(
        self, state: LearnerState, batch: Batch, views: Views, draws: UpdateRandomness
    ) -> tuple[Grads, Tensor, LossOutput]:
        """Return each agent's gradients, its loss [S], and what the objective gave."""
        if self._in_turn:
            action_mask = () if state.action_mask is None else (state.action_mask,)
            given = state.weights, (state.ema, state.target), batch, views, _cast(draws, self._dtype), *action_mask
            results = self._fleet_gradients(*given)
            loss, output = tree_map(lambda *parts: torch.stack(parts), *((loss, more) for _, loss, more in results))
            return [grads for grads, _, _ in results], loss, output
        rows = state.weights.detach().requires_grad_()
        loss, output = self._losses(rows, state, batch, views, _cast(draws, self._dtype))
        # Agents have nothing in common, so the gradient of the sum is each one's own.
        (grads,) = torch.autograd.grad(loss.sum(), rows)
        return grads, loss.detach(), output

    def _agent_gradients(self, row: Tensor, *given: Any) -> tuple[dict[str, Tensor], Tensor, LossOutput]:
        """Return the gradients of one agent with weights [P] by name, its loss, and what the objective gave."""
        params = {name: p.detach().requires_grad_() for name, p in self.layout.views(row).items()}
        loss, output = self._agent_loss(params, *given)
        found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        # Adam reads them in the order of the weights, whatever the layout that a gradient was computed in.
        grads = {name: grad.contiguous() for name, grad in zip(params, found, strict=True)}
        return grads, loss.detach(), tree_map(Tensor.detach, output)

    def losses(
        self, rows: Tensor, state: LearnerState, batch: Batch, views: Views, draws: UpdateRandomness
    ) -> tuple[Tensor, LossOutput]:
        """Return each agent's loss [S], to be differentiated by its weights [S, P]; and what the objective gave."""
        action_mask = () if state.action_mask is None else (state.action_mask,)
        loss, output = vmap(self._row_loss)(rows, (state.ema, state.target), batch, views, draws, *action_mask)
        return loss, tree_map(Tensor.detach, output)

    def update_priorities(
        self, state: LearnerState, replay: Replay, start: Tensor, grads: Grads, loss: Tensor, output: LossOutput
    ) -> Gradients:
        """Note who has diverged, and set the priorities of the sequences that began at these slots [S, B]."""
        norms, unclipped = self._norms(grads)
        state.diverged.logical_or_(~torch.stack([loss, *norms.values(), unclipped]).isfinite().all(0))
        priority = priority_of(output.raw_priority, self.config.replay.priority_exponent)
        replay.update_priorities(start, priority, frozen=state.diverged)
        means = {name: value.mean(-1) for name, value in output.losses.items()}
        shown = {f"norm_{name}": norm for name, norm in norms.items()}
        return Gradients(grads, norms, {"loss": loss, **means, **output.metrics, **shown})

    def _norms(self, grads: Grads) -> tuple[dict[str, Tensor], Tensor]:
        """Return the norms [S] of the gradients that are clipped together; and a sum of the others, for what it is."""
        if isinstance(grads, Tensor):
            norms = {name: torch.linalg.vector_norm(grads[:, part], dim=1) for name, part in self._clipped.items()}
            return norms, grads[:, self._unclipped].sum(1)
        clip_of = {name: group.clip for name, group in self.layout.groups.items()}
        whole = {
            clip: torch.stack([_norm([g for name, g in mine.items() if clip_of[name] == clip]) for mine in grads])
            for clip in (*self._clipped, None)
        }
        rest = whole.pop(None)
        return {str(name): norm for name, norm in whole.items()}, rest

    def apply_gradients(
        self, state: LearnerState, grads: Grads, norms: dict[str, Tensor], learning_rate: Tensor | None = None
    ) -> None:
        """The second half: clip the gradients; Adam; and then the targets.

        The learning rate is a scalar where it changes; else it is the configuration's.
        """
        learner, healthy = self.config.learner, ~state.diverged[:, None]
        # clip
        if (most := learner.max_grad_norm) > 0:
            scales = {name: (most / (norm + 1e-6)).clamp(max=1)[:, None] for name, norm in norms.items()}
            grads = self._scaled(grads, scales)
        # Adam
        self._adam(state, grads, healthy, learner.learning_rate if learning_rate is None else learning_rate)
        # targets: theta_m <- decay * theta_m + (1 - decay) * theta_o; another RL target is copied once a period
        if self._has_ema:
            share = (1 - learner.ema_decay) * healthy.to(self._dtype)
            state.ema.lerp_(state.weights[:, self.ema_columns], share)
        if self._averaged:
            state.target.lerp_(state.weights, (1 - learner.average) * healthy.to(self._dtype))
        elif self._has_target:
            due = (state.count % learner.target_period == 0) & healthy
            state.target.copy_(torch.where(due, state.weights[:, self.target_columns], state.target))

    def _row_loss(self, row: Tensor, *given: Any) -> tuple[Tensor, LossOutput]:
        """Return the loss of one agent with weights [P], and its parts."""
        return self._agent_loss(self.layout.views(row), *given)

    def _agent_loss(
        self,
        params: dict[str, Tensor],
        targets: tuple[Tensor, Tensor],
        batch: Batch,
        views: Views,
        draws: UpdateRandomness,
        action_mask: Tensor | None = None,
    ) -> tuple[Tensor, LossOutput]:
        """Return the loss of one agent with these weights, and its parts."""
        ema, target = targets
        sets = {"online": params}
        if self._has_ema:
            sets["ema"] = self.layout.views(ema, _in_ema)
        if self._has_target:
            sets["target"] = self.layout.views(target, self._in_target)
        named = {f"{net}.{name}": self._to_matmul_dtype(name, p) for net, ps in sets.items() for name, p in ps.items()}
        output: LossOutput = functional_call(self._objective, named, (batch, views, draws, action_mask))
        loss = importance_weighted(output.losses, self.config.weights, batch.weight)
        return loss, output

    def _to_matmul_dtype(self, name: str, weight: Tensor) -> Tensor:
        """Bring a matrix to the dtype of products, unless its group stays in float32; vectors are not multiplied."""
        kept = weight.dim() == 1 or self.layout.groups[name].fp32
        return weight if kept else weight.to(self._matmul_dtype)

    def _scaled(self, grads: Grads, scales: dict[str, Tensor]) -> Grads:
        """Scale the gradients that are clipped together, each agent's by its own [S, 1].

        A CPU does it in place, and where there is something to do. A GPU scales them where Adam reads them, and writes
        nothing back.
        """
        for name, part in self._clipped.items():
            if isinstance(grads, list):
                for mine, scale in zip(grads, scales[name], strict=True):
                    for key, grad in mine.items() if bool(scale < 1) else ():
                        if self.layout.groups[key].clip == name:
                            grad.mul_(scale)
            elif self._fused:
                grads[:, part] *= scales[name]
            else:
                column = torch.arange(grads.shape[1], device=grads.device)
                grads = torch.where((column >= part.start) & (column < part.stop), grads * scales[name], grads)
        return grads

    def _adam(self, state: LearnerState, grads: Grads, healthy: Tensor, learning_rate: float | Tensor) -> None:
        """One step of Adam for the agents [S, 1] that are healthy; the others stay as they are."""
        learner = self.config.learner
        # On a CPU testing `diverged` is free; on a GPU it would synchronise, so a copy is always kept, which the
        # compiler fuses into Adam.
        guarded = not self._fused or bool(state.diverged.any())
        rows = (state.weights, state.first_moment, state.second_moment)
        before = [row.clone() for row in rows] if guarded else []
        if self._decays is not None:
            less = state.weights * (1 - learning_rate * learner.weight_decay)
            state.weights.copy_(torch.where(self._decays, less, state.weights))
        if isinstance(grads, Tensor):
            parts, gradients = [[row] for row in rows], [grads]
        else:  # an agent's tensor is contiguous, a fleet's is not
            parts = [[view for agent in row for view in self.layout.views(agent).values()] for row in rows]
            gradients = [grad for mine in grads for grad in mine.values()]
        adam(
            parts[0],
            gradients,
            parts[1],
            parts[2],
            [],
            [state.count, *(state.count.clone() for _ in parts[0][1:])],  # each is counted up
            fused=self._fused,
            foreach=False,
            capturable=not self._fused,
            amsgrad=False,
            beta1=learner.adam_beta1,
            beta2=learner.adam_beta2,
            lr=learning_rate,
            weight_decay=0.0,
            eps=learner.adam_eps,
            maximize=False,
        )
        for row, kept in zip(rows, before, strict=False):
            row.copy_(torch.where(healthy, row, kept))


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all numbers in some tensors; 0 without any."""
    if not tensors:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))
    return norm


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    """Bring the floating-point tensors of a batch or of draws to the dtype of the weights."""
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, tensors)
