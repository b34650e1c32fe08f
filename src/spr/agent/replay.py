"""Owns what a fleet remembers: rings of frames, actions, rewards and priorities on the device, and sampling from them.

A slot holds one environment step: the newest frame of its observation, whether that frame begins an episode, the action
taken and the clipped reward received. Only `is_first` is stored: returns, masks and frame stacks are cut at the next
`is_first`. Sequences that would cross a truncation never become eligible.
Shapes: S agents, N slots, B batch, O observations, T targets, K depth, L consecutive frames of a sequence; frames are
[C, H, W] (channels, height, width).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spr.agent.augmentation import views_of
from spr.agent.n_step_targets import NStepTargets
from spr.agent.priorities import importance_weight
from spr.agent.sum_tree import SumTree
from spr.config.config import Config


class Batch(NamedTuple):
    """Sequences sampled for one update; discount and mask carry termination, no loss sees an end."""

    start: Tensor  # [S, B] slot of s_t
    frames: Tensor  # [S, B, L, C, H, W] uint8, from the stack of s_t to the horizon; the bootstrap's own may follow
    visible: Tensor  # [S, B, O, stack] 0 where a stacked frame is from before the observation's episode
    actions: Tensor  # [S, B, max(K, 1)] a_t ...
    returns: Tensor  # [S, B] n-step return
    discount: Tensor  # [S, B] gamma^n, or 0 when the episode ended within n steps (see `replay.ends`)
    mask: Tensor  # [S, B, T] 1 where no end lies between s_t and the target
    weight: Tensor  # [S, B] importance weight, at most 1


class Replay:
    """The memory of a fleet whose agents step together."""

    def __init__(self, config: Config, agents: int, device: torch.device) -> None:
        """Take the device memory for all agents at once."""
        self.capacity = min(config.replay.capacity, config.schedule.steps)
        self._config = config
        stack, shape = config.observation.stack, (agents, self.capacity)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # environment steps appended so far, per agent
        self.frames = torch.zeros(*shape, *config.observation.frame, dtype=torch.uint8, device=device)
        # The same memory in words of eight pixels, where a frame is whole words: sampled frames are copied by these.
        pixels = self.frames.flatten(2)
        self._words = pixels.view(torch.int64) if pixels.shape[-1] % 8 == 0 else pixels
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(shape, dtype=torch.float32, device=device)
        self.is_first = torch.zeros(shape, dtype=torch.bool, device=device)
        self.truncated = torch.zeros(shape, dtype=torch.bool, device=device)
        self._tree = SumTree(agents, self.capacity, device)
        self.priority = self._tree.leaves

        self._n_step = NStepTargets(config, device)
        self._window = torch.arange(1 - stack, config.horizon + 1, device=device)
        # Observation o starts its stack at frame offsets[o] of the sequence.
        views = views_of(config)
        steps = [view.offset for view in views]
        if self._n_step.only_first_end:
            bootstrap = [view.role for view in views].index("bootstrap")
            steps[bootstrap] = len(self._window)  # its own frames follow the sequence's
        self.offsets = torch.tensor(steps, device=device, dtype=torch.int32)
        self._is_bootstrap = torch.tensor([view.role == "bootstrap" for view in views], device=device)
        self._stack = torch.arange(stack, device=device)
        self._ahead = torch.arange(config.horizon + 1, device=device)
        self._crossed = torch.arange(self._n_step.steps, device=device)
        self._targets = slice(offsets[0], offsets[-1] + 1) if (offsets := config.target_offsets) else slice(0, 0)
        self._depth = max(config.learner.depth, 1)
        self._agent = self._tree.agent

    def write_frame(self, frame: Tensor) -> None:
        """Write the newest frame of every agent, [S, C, H, W] uint8, to the slot of the step that begins next.

        A call of its own, never compiled: to choose a kernel the compiler runs it on copies of all that it writes, and
        the frames are gigabytes.
        """
        self.frames.index_copy_(1, self._count % self.capacity, frame[:, None])

    def begin_step(self, is_first: Tensor, action: Tensor) -> None:
        """Add a step whose frame is written: whether that begins an episode, [S], and every agent's action, [S].

        A full ring drops its oldest step. The reward may arrive later: the sequence that becomes sampleable now ends
        with this frame and uses rewards and ends of earlier steps only.
        """
        assert is_first.dim() == action.dim() == 1
        slot = self._count % self.capacity
        self.is_first.index_copy_(1, slot, is_first[:, None])
        self.actions.index_copy_(1, slot, action[:, None])
        # Starts whose own step or stacked frames are overwritten by this one can't be sampled any more.
        lost = (slot + self._stack) % self.capacity
        self.priority.index_copy_(1, lost, self.priority[:, lost] * (self._count < self.capacity))
        # The first windows are incomplete; the zero written then is already there.
        start = self._count - self._config.horizon
        crossed = self.truncated[:, (start + self._crossed) % self.capacity].any(1)
        sampleable = (~crossed & (start >= 0)).to(self.priority.dtype)
        self.priority.index_copy_(1, start % self.capacity, sampleable[:, None])
        self._count += 1

    def finish_step(self, reward: Tensor, truncated: Tensor) -> None:
        """Add the outcome of the step that was begun, [S] each: the clipped reward, and whether the time was up."""
        assert reward.dim() == truncated.dim() == 1
        slot = (self._count - 1) % self.capacity
        self.rewards.index_copy_(1, slot, reward[:, None])
        self.truncated.index_copy_(1, slot, truncated[:, None])

    def recent(self, agent: int) -> Tensor:
        """Return an agent's frames from the oldest kept to the newest, [min(steps, N), C, H, W], on the host."""
        return self.frames[agent, self._kept(self.steps)].to("cpu", copy=True)

    def refill(self, frames: Tensor, is_first: Tensor, actions: Tensor, rewards: Tensor, truncated: Tensor) -> None:
        """Restore a saved memory: the frames it kept [S, ...], and everything else of all steps [S, steps]."""
        steps = actions.shape[1]
        kept = self._kept(steps)
        past = torch.arange(steps - len(kept), steps)
        self.frames[:, kept] = frames.to(self.frames.device)
        for memory, all_of_it in (
            (self.is_first, is_first),
            (self.actions, actions),
            (self.rewards, rewards),
            (self.truncated, truncated),
        ):
            memory[:, kept] = all_of_it[:, past].to(memory.device, memory.dtype)
        self._count.fill_(steps)

    def _kept(self, steps: int) -> Tensor:
        """Return the slots of the steps that are kept, oldest first."""
        return torch.arange(max(0, steps - self.capacity), steps, device=self.frames.device) % self.capacity

    @property
    def steps(self) -> int:
        """Environment steps appended so far, per agent; it reads the device."""
        return int(self._count)

    def offsets_at(self, n_step: Tensor | None) -> Tensor:
        """Return where each observation's stack starts in a sequence, [O], if the bootstrap is n steps ahead."""
        if n_step is None:
            return self.offsets
        return torch.where(self._is_bootstrap, n_step.to(self.offsets.dtype) - self._n_step.early, self.offsets)

    def sample(self, uniform: Tensor, beta: Tensor, n_step: Tensor | None = None, gamma: Tensor | None = None) -> Batch:
        """Sample sequences with probability proportional to priority, by uniform numbers [S, B]; beta is a scalar.

        So are length and discount of the multi-step return, where these change; else they are the configuration's.
        Sequences are as long as the longest return in any case, and none of them crosses a truncation.
        """
        assert (uniform.dim(), beta.dim()) == (2, 0)
        stack = len(self._stack)
        index = self._tree.find(uniform)
        slots = (index[..., None] + self._window) % self.capacity  # [S, B, L]
        agent = self._agent[..., None]
        not_first = ~self.is_first[agent, slots]  # [S, B, L], false where a frame begins an episode
        # alive[i]: no episode has begun at t+1 .. t+i, so step t+i still belongs to the episode of s_t.
        later = not_first[..., stack:]
        steps_alive = torch.where(later, later.shape[-1], self._ahead[:-1]).amin(-1, keepdim=True)
        alive = (self._ahead <= steps_alive).float()
        bootstraps = self._n_step.bootstraps(alive)
        if self._n_step.only_first_end:
            valued = self._stack_at(index, self._n_step.released_bootstrap(steps_alive))
            slots, not_first = torch.cat([slots, valued], -1), torch.cat([not_first, ~self.is_first[agent, valued]], -1)
        rewards = self.rewards[agent, slots[..., stack - 1 : stack - 1 + self._n_step.steps]]
        n_steps = self._n_step.of(bootstraps, steps_alive, n_step, gamma)
        priority = self.priority[self._agent, index]
        weight = importance_weight(priority, beta)
        return Batch(
            start=index,
            frames=self._words[agent, slots].view(torch.uint8).unflatten(-1, self._config.observation.frame),
            visible=self._visible(not_first, self.offsets_at(n_step)),
            actions=self.actions[agent, slots[..., stack - 1 : stack - 1 + self._depth]],
            returns=n_steps.returns(rewards, alive),
            discount=n_steps.discount,
            mask=alive[..., self._targets],
            weight=weight / weight.amax(-1, keepdim=True),
        )

    def _stack_at(self, index: Tensor, ahead: Tensor) -> Tensor:
        """Return the slots [S, B, stack] of the frames seen so many steps [S, B, 1] after a sequence's start."""
        return (index[..., None] + ahead + self._stack - (len(self._stack) - 1)) % self.capacity

    def can_sample(self) -> bool:
        """Say whether every agent has a sequence to sample; it reads the device: call it once, not at each step."""
        return bool((self.priority.amax(1) > 0).all())

    def update_priorities(self, index: Tensor, priority: Tensor, frozen: Tensor) -> None:
        """Set new priorities [S, B]; those of frozen agents [S] stay.

        A start sampled twice takes the larger, whatever order the device writes in.
        """
        priority = torch.where(frozen[:, None], self.priority.gather(1, index), priority.to(self.priority.dtype))
        self.priority.scatter_reduce_(1, index, priority, "amax", include_self=False)

    def check(self) -> None:
        """Assert the invariants of the ring; for tests and debugging, since it reads the device."""
        assert self.priority.isfinite().all()
        assert (self.priority >= 0).all()
        assert not self.priority[:, self.capacity :].any()
        sampleable = self.priority[:, : self.capacity] > 0
        newest = torch.arange(max(self.steps - self._config.horizon, 0), self.steps, device=sampleable.device)
        assert not sampleable[:, newest % self.capacity].any(), "a start whose window is not written yet can be sampled"

    def _visible(self, not_first: Tensor, offsets: Tensor) -> Tensor:
        """Return [S, B, O, stack]: a stacked frame is visible while no later frame of the stack begins an episode."""
        stacks = not_first.unfold(-1, len(self._stack), 1)[..., offsets, 1:].float()  # [S, B, O, stack - 1]
        older = stacks.flip(-1).cumprod(-1).flip(-1)
        return F.pad(older, (0, 1), value=1.0)


def learning_reward(config: Config, reward: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what is stored of raw rewards."""
    return reward.clip(-1, 1) if config.replay.clip_rewards else reward


def memory_needed(config: Config, agents: int) -> int:
    """Return the bytes that the rings of a fleet take."""
    capacity = min(config.replay.capacity, config.schedule.steps)
    per_step = math.prod(config.observation.frame) + 8 + 4 + 1 + 1 + 4  # frame, action, reward, two flags, priority
    return agents * capacity * per_step
