"""Owns a fleet: S agents of one configuration, of one or several games, their parts put together on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from spr.agent.action_padding import crop_actions
from spr.agent.augmentation import views_of
from spr.agent.encoders import encoder_activations
from spr.agent.networks import networks_without_weights
from spr.agent.random_streams import RngStreams
from spr.agent.replay import Replay, memory_needed
from spr.common.errors import UserError
from spr.common.hardware import free_memory
from spr.config.config import Config
from spr.envs.atari import ROOM
from spr.envs.base import Envs
from spr.training.learner import Learner, LearnerState

# Beside the replay, from `spr bench` on pong: of PyTorch on a GPU, and of the whole process on a CPU.
_BESIDE = {"cuda": (360 * 2**20, 290 * 2**20), "cpu": (370 * 2**20, 210 * 2**20)}  # once, and per agent
_BYTES = {"cuda": 2, "cpu": 4}  # of a number between two products


@dataclass(frozen=True)
class Fleet:
    """S agents that are trained in lockstep; one agent is a fleet of one."""

    config: Config
    seeds: tuple[int, ...]
    device: torch.device
    envs: Envs
    learner: Learner
    state: LearnerState
    replay: Replay
    rng: RngStreams

    def agent(self, i: int) -> dict[str, Tensor]:
        """Return the weights by which one agent acts, with its own actions only."""
        room = self.envs.num_actions
        own = room if self.envs.game_num_actions is None else self.envs.game_num_actions[i]
        dims = networks_without_weights(self.config, room, self.device).action_dims()
        return crop_actions({name: p[i] for name, p in self.state.acting.items()}, dims, own, room)


def assemble(
    config: Config, envs: Envs, seeds: Sequence[int], device: torch.device, matmul_dtype: torch.dtype = torch.float32
) -> Fleet:
    """Put a fleet together, one agent per seed; its matrix products are taken in the dtype `matmul_dtype`."""
    learner = Learner(config, envs.num_actions, device, matmul_dtype=matmul_dtype)
    return Fleet(
        config=config,
        seeds=tuple(seeds),
        device=device,
        envs=envs,
        learner=learner,
        state=learner.init(seeds, envs.game_num_actions),
        replay=Replay(config, len(seeds), device),
        rng=RngStreams(config, envs.num_actions, seeds, device, envs.game_num_actions),
    )


def fleet_memory(config: Config, agents: int, device: torch.device) -> int:
    """Return about how many bytes a fleet takes on a device."""
    once, each = _BESIDE[device.type]
    obs, usual = config.observation, Config().observation
    larger = max(1.0, obs.planes * obs.height * obs.width / (usual.planes * usual.height * usual.width))
    wider = max(0.0, _counted(config, device.type) - _counted(Config(), device.type) * larger)
    return once + int(agents * (each * larger + wider)) + memory_needed(config, agents)


@cache
def _counted(config: Config, device: str) -> int:
    """Return about how many bytes an agent's weights and activations take: what was measured is of the usual networks.

    Weights, gradients, two moments, and as much again while they are changed; target networks. What an encoder computes
    is kept for gradients, beside their own; where none are wanted, two layers at a time are there.
    """
    networks = networks_without_weights(config, ROOM, torch.device("cpu"))
    parameters = sum(p.numel() for p in networks.parameters())
    learner = config.learner
    targets = (learner.ema_decay > 0) + (learner.target_period > 1) + (learner.average > 0)
    views = views_of(config)
    with_grad = sum(view.needs_grad for view in views)
    passes = 3 * with_grad + (len(views) - with_grad) / 2
    activations = int(config.replay.batch_size * passes * encoder_activations(*config.encoder_arguments))
    return 4 * parameters * (6 + targets) + _BYTES[device] * activations


def largest_fleet(config: Config, device: torch.device, together: int = 1) -> int:
    """Return how many agents each of several fleets may have, to fit into the memory that is free now."""
    free = free_memory(device) // together
    one, two = (fleet_memory(config, agents, device) for agents in (1, 2))
    if one > free:
        raise UserError(
            f"one agent takes about {one / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free for it on the "
            f"{device.type}: set a smaller replay.capacity"
        )
    return 1 + (free - one) // (two - one)
