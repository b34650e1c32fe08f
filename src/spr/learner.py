"""Owns learning: the state of a fleet's learners and one update of all of them.

The objective is written for one agent; `vmap` over rows of weights makes the fleet. Shapes: S agents first, everywhere;
P the numbers of an agent (see `rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.optim.adam import adam
from torch.utils._pytree import tree_map

from spr.augment import observations
from spr.config import Config
from spr.draws import Dice, Draws, Looks, Numbers
from spr.graphs import captured, compiled
from spr.losses import Objective, Terms, importance_weighted
from spr.networks import Networks
from spr.replay import Batch, Replay
from spr.rows import Layout

_SURPRISE_FLOOR = 1e-6
_AGENT = ("out", "sigma", "averaged")  # the sections of encoder and Q-head, which act
# What is clipped together, by section; the predictor is not clipped.
_CLIP_GROUPS = {"agent": _AGENT, "model": ("model",)}


@dataclass(frozen=True)
class LearnerState:
    """What learning changes, in place."""

    layout: Layout
    weights: Tensor  # [S, P]
    averaged: Tensor  # [S, columns of the averaged section]; no columns when tau is 0, where it would equal the weights
    copied: Tensor  # [S, columns of encoder and Q-head] the RL target network; no columns when its period is 1
    first_moment: Tensor  # [S, P]
    second_moment: Tensor  # [S, P]
    count: Tensor  # [] Adam's steps
    faulty: Tensor  # [S] whose loss or gradient was not finite: such an agent stays as it was before that update

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights by name, [S, ...] each: views, not copies."""
        return self.layout.views(self.weights)


class Learner:
    """One update of a fleet: sample, augment, losses, gradients, clip, Adam, targets, priorities."""

    def __init__(
        self,
        config: Config,
        actions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        product: torch.dtype | None = None,
    ) -> None:
        """Build the objective without weights: they live in the state.

        Weights are of `dtype`; matrix products are taken in `product`, or in the same.
        """
        self._config = config
        self._actions = actions
        self._device = device
        self._dtype = dtype
        self._product = product or dtype
        # On a CPU the library's own fused Adam; on a GPU its plain one, which the compiler fuses with clipping.
        self._fused = device.type == "cpu"
        self.losses, self.has_targets = list(config.weights), bool(config.targets)
        self._averages = bool(config.targets) and config.learner.tau > 0
        self._copies = config.learner.target_period > 1
        with torch.device("meta"):
            averaged = self._networks() if self._averages else None
            copied = self._networks() if self._copies else None
            objective = Objective(config, self._networks(), averaged, copied)
        objective.online.support = objective.online.support.to(device)
        self._objective = objective
        self.layout = Layout({name: p.shape for name, p in objective.online.named_parameters()})

    def init(self, seeds: Sequence[int]) -> LearnerState:
        """Initialise one agent per seed, each from its own stream of numbers."""
        agents = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.manual_seed(seed)
                agents.append(dict(self._networks().named_parameters()))
        stacked = {name: torch.stack([agent[name].detach() for agent in agents]) for name in agents[0]}
        weights = self.layout.rows(stacked, self._dtype, self._device)
        averaged, copied = weights[:, self.layout.columns("averaged")], weights[:, self.layout.columns(*_AGENT)]
        return LearnerState(
            layout=self.layout,
            weights=weights,
            averaged=averaged.clone() if self._averages else averaged[:, :0].clone(),
            copied=copied.clone() if self._copies else copied[:, :0].clone(),
            first_moment=torch.zeros_like(weights),
            second_moment=torch.zeros_like(weights),
            count=torch.zeros((), device=self._device),
            faulty=torch.zeros(len(seeds), dtype=torch.bool, device=self._device),
        )

    def update(self, state: LearnerState, replay: Replay, draws: Draws, beta: Tensor) -> dict[str, Tensor]:
        """Do one update of every agent in place and return what to watch, [S] each."""
        grads, watched = self.prepare(state, replay, draws, beta)
        self.step(state, grads, watched)
        return watched

    def prepare(
        self, state: LearnerState, replay: Replay, draws: Draws, beta: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw a batch, set its priorities anew, and return the gradients [S, P] and what to watch."""
        config = self._config
        batch = replay.sample(draws.sample, beta)

        def seen(which: slice) -> Tensor:
            """Make some of the views, [S, O, B, 4, 84, 84]."""
            shift, corner, side, factor = draws.looks
            looks = Looks(*(look[:, :, which] for look in (shift, corner, side, factor.to(self._dtype))))
            visible = batch.visible[:, :, which]
            return observations(batch.frames, replay.offsets[which], visible, looks, config.augment.shift)

        # Those that gradients reach apart: cut from a whole they would be copied.
        obs = seen(slice(0, config.learnt_views)), seen(slice(config.learnt_views, None))
        grads, loss, terms = self.gradients(state, batch, obs, draws)
        means = {name: value.mean(-1) for name, value in terms.losses.items()}
        norms = {
            f"norm_{group}": torch.linalg.vector_norm(grads[:, columns], dim=1)
            for group, columns in self.clip_groups().items()
        }
        unclipped = grads[:, self.layout.columns("predictor")].sum(1)
        state.faulty.logical_or_(~torch.stack([loss, *norms.values(), unclipped]).isfinite().all(0))
        # The floor keeps a transition that is predicted perfectly from never being drawn again.
        priority = terms.surprise.clamp(min=_SURPRISE_FLOOR) ** config.replay.exponent
        replay.reprioritise(batch.start, priority, state.faulty)
        return grads, {"loss": loss, **means, **terms.watched, **norms}

    def gradients(
        self, state: LearnerState, batch: Batch, obs: tuple[Tensor, Tensor], draws: Draws
    ) -> tuple[Tensor, Tensor, Terms]:
        """Return each agent's gradients [S, P], its loss [S], and the terms of that."""
        draws, batch = _cast(draws, self._dtype), _cast(batch, self._dtype)
        per_agent = vmap(grad(self._agent_loss, has_aux=True))
        grads, (loss, terms) = per_agent(state.weights, (state.averaged, state.copied), batch, obs, draws)
        return grads, loss, terms

    def _agent_loss(
        self, row: Tensor, targets: tuple[Tensor, Tensor], batch: Batch, obs: tuple[Tensor, Tensor], draws: Draws
    ) -> tuple[Tensor, tuple[Tensor, Terms]]:
        """Return the loss of one agent with weights [P], to be differentiated by them; and it again with its terms."""
        averaged, copied = targets
        sets = {"online": self.layout.views(row)}
        if self._averages:
            sets["averaged"] = self.layout.views(averaged, "averaged")
        if self._copies:
            sets["copied"] = self.layout.views(copied, *_AGENT)
        named = {f"{which}.{name}": self._multiplied(name, p) for which, ps in sets.items() for name, p in ps.items()}
        terms: Terms = functional_call(self._objective, named, (batch, obs, draws))
        loss = importance_weighted(terms.losses, self._config.weights, batch.weight)
        return loss, (loss, terms)

    def _multiplied(self, name: str, weight: Tensor) -> Tensor:
        """Bring a matrix to the dtype of products; the out layers stay, since actions differ by little in value."""
        kept = weight.dim() == 1 or name.startswith(("head.value.", "head.advantage."))
        return weight if kept else weight.to(self._product)

    def clip_groups(self) -> dict[str, slice]:
        """Return the columns of each clip group that this agent has."""
        columns = {group: self.layout.columns(*sections) for group, sections in _CLIP_GROUPS.items()}
        return {group: part for group, part in columns.items() if part.start < part.stop}

    @torch.no_grad()
    def step(self, state: LearnerState, grads: Tensor, watched: dict[str, Tensor]) -> None:
        """Clip the gradients [S, P], in place, by the norms watched; Adam; and then the targets.

        The moving average is theta_m <- tau * theta_m + (1 - tau) * theta_o; the RL target is copied once a period.
        """
        learner, healthy = self._config.learner, ~state.faulty[:, None]
        # On a CPU looking costs nothing; a GPU can't look, but its compiler makes one kernel of all this.
        guarded = not self._fused or bool(state.faulty.any())
        rows = (state.weights, state.first_moment, state.second_moment)
        before = [row.clone() for row in rows] if guarded else []
        for group, columns in self.clip_groups().items():
            grads[:, columns] *= (learner.clip / (watched[f"norm_{group}"] + 1e-6)).clamp(max=1)[:, None]
        adam(
            [state.weights],
            [grads],
            [state.first_moment],
            [state.second_moment],
            [],
            [state.count],
            fused=self._fused,
            foreach=False,
            capturable=not self._fused,
            amsgrad=False,
            beta1=learner.adam_beta1,
            beta2=learner.adam_beta2,
            lr=learner.learning_rate,
            weight_decay=0.0,
            eps=learner.adam_eps,
            maximize=False,
        )
        for row, kept in zip(rows, before, strict=False):
            row.copy_(torch.where(healthy, row, kept))
        if self._averages:
            share = (1 - learner.tau) * healthy.to(self._dtype)
            state.averaged.lerp_(state.weights[:, self.layout.columns("averaged")], share)
        if self._copies:
            due = (state.count % learner.target_period == 0) & healthy
            state.copied.copy_(torch.where(due, state.weights[:, self.layout.columns(*_AGENT)], state.copied))

    def _networks(self) -> Networks:
        return Networks(self._config, self._actions)


class Updates:
    """The updates of one fleet: called once per update, eager on a CPU, one captured CUDA graph on a GPU.

    What changes from update to update is read from device memory: the draws come from the fleet's own generators, which
    the graph advances at each replay, and `beta` is a tensor that the training loop fills.
    """

    def __init__(self, learner: Learner, state: LearnerState, replay: Replay, dice: Dice) -> None:
        """Nothing is compiled or captured yet."""
        self.beta = torch.zeros((), device=dice.device)
        self._learner, self._state, self._replay, self._dice = learner, state, replay, dice
        # Apart from the rest: cut within it, the draws would be computed anew for each pixel that they shift.
        self._cut = compiled(dice.draws, dice.device)
        self._prepare = compiled(self._from_draws, dice.device)
        self._step = compiled(learner.step, dice.device)
        self._sums: Tensor | None = None
        self._names: list[str] = []
        # The numbers of the last update of each agent, or of the one that failed.
        self.last = Numbers(*(torch.zeros_like(part) for part in dice.empty()))
        self._made = 0
        self._once = captured(self._update, dice.device, dice.generators)

    def __call__(self) -> None:
        """Do one update."""
        self._made += 1
        self._once()

    def means(self) -> dict[str, list[float]]:
        """Return the means of what was watched since the last time, by agent; nothing before the first update."""
        if self._sums is None or self._made == 0:
            return {}
        columns = (self._sums / self._made).tolist()
        self._sums.zero_()
        self._made = 0
        return dict(zip(self._names, columns, strict=True))

    def names(self) -> list[str]:
        """Return the names of what is watched."""
        norms = [f"norm_{group}" for group in self._learner.clip_groups()]
        seen = ["value", *(["cosine", "spread"] if self._learner.has_targets else [])]
        return ["loss", *self._learner.losses, *seen, *norms]

    def watched(self) -> tuple[list[str], Tensor, int]:
        """Return the names, sums [W, S] and number of updates behind the next means, for a checkpoint."""
        if self._sums is None:
            return [], torch.zeros(0, len(self._dice.generators)), 0
        return self._names, self._sums.cpu(), self._made

    def restore(self, names: list[str], sums: Tensor, made: int) -> None:
        """Take up what `watched` returned."""
        if names:
            self._names, self._sums, self._made = names, sums.to(self._dice.device), made

    def _update(self) -> None:
        numbers = self._dice.roll()
        grads, watched = self._prepare(numbers, self._cut(numbers))
        self._step(self._state, grads, watched)
        if self._sums is None:
            self._names, self._sums = list(watched), torch.zeros(len(watched), len(grads), device=grads.device)
        self._sums += torch.stack(list(watched.values()))

    def _from_draws(self, numbers: Numbers, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        for kept, new in zip(self.last, numbers, strict=True):
            kept.copy_(torch.where(self._state.faulty[:, None], kept, new))
        return self._learner.prepare(self._state, self._replay, draws, self.beta)


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    """Bring the floating-point tensors of a batch or of draws to the dtype of the weights."""
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, tensors)
