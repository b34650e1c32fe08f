"""Owns learning: the state of a fleet's learners and one update of all of them.

The objective is written for one agent; `vmap` over stacked parameters makes the fleet. Agents share nothing, so the
gradient of the sum of their losses is each agent's own gradient. Shapes: S agents first, everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.optim.adam import adam
from torch.utils._pytree import tree_map

from spr.augment import observations
from spr.config import Config
from spr.draws import Dice, Draws
from spr.losses import Objective, Terms, importance_weighted
from spr.networks import Networks
from spr.replay import Batch, Replay

Params = dict[str, Tensor]
T = TypeVar("T")

_KL_FLOOR = 1e-6

# Names by their beginning; what no group names (the predictor) is not clipped.
_CLIP_GROUPS = {"agent": ("encoder.", "head."), "model": ("transition.",)}
# What the target encoder f_m and projection g_m are made of; the projection uses no noise, so no sigmas.
_TARGET_NAMES = ("encoder.", "head.value_hidden.", "head.advantage_hidden.")


class LearnerState(NamedTuple):
    """What learning changes, in place; each tensor is [S, ...]."""

    params: Params
    target: Params  # moving average of encoder and projection; empty when tau is 0, where it would equal params
    first_moment: Params
    second_moment: Params
    counts: Tensor  # [number of parameters] Adam's step count, one each because its kernel wants that


class Learner:
    """One update of a fleet: sample, augment, losses, gradients, clip, Adam, targets, priorities."""

    def __init__(self, config: Config, actions: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Build the objective without weights: they live in the state."""
        self._config = config
        self._actions = actions
        self._device = device
        self._dtype = dtype
        with torch.device("meta"):
            objective = Objective(self._networks(), self._networks(), frozenset(config.weights))
        objective.online.support = objective.online.support.to(device)
        self._objective = objective
        self._sample = _compiled(Replay.sample, device)
        self._observations = _compiled(observations, device)
        self._losses = _compiled(vmap(self._agent_loss), device)

    def init(self, seeds: Sequence[int]) -> LearnerState:
        """Initialise one agent per seed, each from its own stream of numbers."""
        agents = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.manual_seed(seed)
                agents.append(dict(self._networks().named_parameters()))
        stacked = {
            name: torch.stack([a[name].detach() for a in agents]).to(self._device, self._dtype) for name in agents[0]
        }
        copied = [name for name in stacked if name.startswith(_TARGET_NAMES) and "sigma" not in name]
        return LearnerState(
            params={name: p.clone().requires_grad_() for name, p in stacked.items()},
            target={name: stacked[name].clone() for name in copied} if self._config.learner.tau > 0 else {},
            first_moment={name: torch.zeros_like(p) for name, p in stacked.items()},
            second_moment={name: torch.zeros_like(p) for name, p in stacked.items()},
            counts=torch.zeros(len(stacked), device=self._device),
        )

    def update(self, state: LearnerState, replay: Replay, draws: Draws, beta: Tensor) -> dict[str, Tensor]:
        """Do one update of every agent in place and return what to watch, [S] each."""
        config = self._config
        batch = self._sample(replay, draws.sample, beta)
        factor = draws.factor.to(self._dtype)
        obs = self._observations(
            batch.frames, replay.offsets, batch.visible, draws.shift, factor, largest_shift=config.augment.shift
        )
        loss, terms, grads = self.gradients(state, batch, obs, draws)
        norms = clip_(grads, config.learner.clip)
        self._adam(state, grads)
        self._average(state)
        # The floor keeps a transition that is predicted perfectly from never being drawn again.
        replay.reprioritise(batch.start, terms.kl.clamp(min=_KL_FLOOR) ** config.replay.exponent)
        means = {name: value.detach().mean(-1) for name, value in terms.losses.items()}
        return {"loss": loss.detach(), **means, **terms.watched, **norms}

    def gradients(
        self, state: LearnerState, batch: Batch, obs: Tensor, draws: Draws
    ) -> tuple[Tensor, Terms, dict[str, Tensor]]:
        """Return each agent's loss [S], its terms, and its gradients by parameter name."""
        draws, batch = _cast(draws, self._dtype), _cast(batch, self._dtype)
        target = state.target or {name: p.detach() for name, p in state.params.items()}
        loss, terms = self._losses(state.params, target, batch, obs, draws)
        grads = torch.autograd.grad(loss.sum(), list(state.params.values()))
        # vmap returns some gradients transposed in memory, and Adam's fused kernel walks memory, not indices.
        return loss, terms, {name: g.contiguous() for name, g in zip(state.params, grads, strict=True)}

    def _agent_loss(
        self, params: Params, target: Params, batch: Batch, obs: Tensor, draws: Draws
    ) -> tuple[Tensor, Terms]:
        named = {f"online.{n}": p for n, p in params.items()} | {f"target.{n}": p for n, p in target.items()}
        terms: Terms = functional_call(self._objective, named, (batch, obs, draws))
        return importance_weighted(terms.losses, self._config.weights, batch.weight), terms

    @torch.no_grad()
    def _adam(self, state: LearnerState, grads: Params) -> None:
        learner = self._config.learner
        adam(
            list(state.params.values()),
            [grads[name] for name in state.params],
            [state.first_moment[name] for name in state.params],
            [state.second_moment[name] for name in state.params],
            [],
            list(state.counts.unbind()),
            fused=True,
            amsgrad=False,
            beta1=learner.adam_beta1,
            beta2=learner.adam_beta2,
            lr=learner.learning_rate,
            weight_decay=0.0,
            eps=learner.adam_eps,
            maximize=False,
        )

    @torch.no_grad()
    def _average(self, state: LearnerState) -> None:
        """theta_m <- tau * theta_m + (1 - tau) * theta_o, after the optimiser's step."""
        if state.target:
            online = [state.params[name] for name in state.target]
            torch._foreach_lerp_(list(state.target.values()), online, 1 - self._config.learner.tau)

    def _networks(self) -> Networks:
        return Networks(self._config.network, self._actions, with_model="spr" in self._config.weights)


class Updates:
    """The updates of one fleet: called once per update, eager on a CPU, one captured CUDA graph on a GPU.

    What changes from update to update is read from device memory: the draws come from the fleet's own generators, which
    the graph advances at each replay, and `beta` is a tensor that the training loop fills. The first updates run
    eagerly, as real updates: they let the libraries choose their kernels before these are frozen.
    """

    _EAGER = 3

    def __init__(self, learner: Learner, state: LearnerState, replay: Replay, dice: Dice) -> None:
        """Nothing is captured yet."""
        self.beta = torch.zeros((), device=dice.device)
        self._update: Callable[[], dict[str, Tensor]] = lambda: learner.update(state, replay, dice.update(), self.beta)
        self._dice = dice
        self._made = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._watched: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Tensor]:
        """Do one update and return what to watch, [S] each; the next update on a GPU overwrites it."""
        self._made += 1
        if self._dice.device.type != "cuda":
            return self._update()
        if self._made <= self._EAGER:
            return self._off_stream()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._watched

    def _off_stream(self) -> dict[str, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            watched = self._update()
        torch.cuda.current_stream().wait_stream(side)
        return watched

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._dice.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            self._watched = self._update()
        self._graph = graph


def _compiled(function: Callable[..., T], device: torch.device) -> Callable[..., T]:
    """Fuse a function's small kernels on a GPU, where their number rules the time; on a CPU leave it as it is."""
    return torch.compile(function, fullgraph=True, dynamic=False) if device.type == "cuda" else function


@torch.no_grad()
def clip_(grads: Params, limit: float) -> dict[str, Tensor]:
    """Scale each clip group of gradients in place to at most `limit`, per agent; return the norms before, [S] each."""
    norms = {}
    for group, beginnings in _CLIP_GROUPS.items():
        members = [grad for name, grad in grads.items() if name.startswith(beginnings)]
        if not members:
            continue
        lengths = [torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.dim()))) for grad in members]
        norm = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
        scale = (limit / (norm + 1e-6)).clamp(max=1)
        for grad in members:
            grad.mul_(scale.view(-1, *(1,) * (grad.dim() - 1)))
        norms[f"norm_{group}"] = norm
    return norms


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    """Bring the floating-point tensors of a batch or of draws to the dtype of the weights."""
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, tensors)
