"""Owns acting: frame stacks, the greedy choice of actions, and one environment step of a fleet on the device.

Shapes: S agents, E environments per agent (one while training, many in evaluation), A actions; frames are [C, H, W].
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap

from spr.agent.action_padding import ActionMask
from spr.agent.networks import networks_without_weights
from spr.agent.q_head import Noise
from spr.agent.random_streams import RawNumbers
from spr.agent.replay import learning_reward
from spr.config.config import Config
from spr.envs.base import Frames, Step
from spr.ops import each_agent
from spr.ops.cuda_graphs import DeviceToHost, HostToDevice, captured, compiled
from spr.training.fleet import Fleet


class Actor:
    """Keeps the frame stack of every environment, and picks the best action."""

    def __init__(self, config: Config, num_actions: int, shape: tuple[int, int], device: torch.device) -> None:
        """Prepare black stacks for (S, E) environments."""
        obs = config.observation
        self.stack = torch.zeros(*shape, obs.planes, obs.height, obs.width, dtype=torch.uint8, device=device)
        self._channels = obs.channels
        networks = networks_without_weights(config, num_actions, device)

        def q_values(params: dict[str, Tensor], obs: Tensor, noise: Noise, action_mask: ActionMask = None) -> Any:
            return functional_call(networks, params, (obs, noise, action_mask))

        # Several agents have few frames each: by one batch of all, four agents were evaluated a third faster.
        alone = each_agent.takes_turns(device) and shape[0] == 1
        self._q_values = each_agent.in_turn(q_values) if alone else vmap(q_values)
        self.names = frozenset(name for name, group in networks.groups().items() if group.acts)

    def observe(self, frame: Tensor, is_first: Tensor, moved: Tensor | None = None) -> None:
        """Push frames [S, E, C, H, W]; where an episode begins [S, E], the frames before it become black.

        With `moved` [S, E], only some stacks change.
        """
        assert (frame.dim(), is_first.dim()) == (5, 2)
        older = self.stack[:, :, self._channels :] * ~is_first[..., None, None, None]
        stack = torch.cat([older, frame], 2)
        self.stack.copy_(stack if moved is None else torch.where(moved[..., None, None, None], stack, self.stack))

    @torch.no_grad()
    def greedy(self, params: dict[str, Tensor], noise: Noise, action_mask: ActionMask = None) -> Tensor:
        """Return the best actions [S, E] under one draw of noise per agent, or under none; of the valid ones [S, A]."""
        used = {name: p for name, p in params.items() if name in self.names}
        obs = self.stack.to(next(iter(used.values())).dtype) / 255
        q: Tensor = self._q_values(used, obs, noise, *(() if action_mask is None else (action_mask,)))
        return q.argmax(-1)


class ActStep:
    """One environment step on the device: push the new frame, select actions, store both; the reward follows."""

    def __init__(self, fleet: Fleet) -> None:
        """Nothing has been seen yet."""
        agents, device, frame = len(fleet.seeds), fleet.device, fleet.config.observation.frame
        self._fleet = fleet
        self._actor = Actor(fleet.config, fleet.envs.num_actions, (agents, 1), device)
        self._to_device = HostToDevice(
            device,
            {
                "frame": np.zeros((agents, *frame), np.uint8),
                "is_first": np.ones(agents, np.bool_),
                "reward": np.zeros(agents, np.float32),
                "truncated": np.zeros(agents, np.bool_),
            },
        )
        self._to_host = DeviceToHost(device)
        self.epsilon = torch.zeros((), device=device)
        self._select = compiled(self._select_and_store, device)
        self._act = captured(self._act_greedily, device)

    def start(self, frame: Frames) -> None:
        """Show the first frame of every game, [S, C, H, W]."""
        self._to_device.send(frame=frame, is_first=np.ones(len(frame), np.bool_))

    def act_async(self, greedy: bool) -> None:
        """Begin the step: select actions, the best under noise or random ones, and store them with what was seen."""
        self._to_host.post(self._act() if greedy else self._store(self._fleet.rng.random_actions()))

    def act_wait(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait for the actions, [S], and with them for whose learning has diverged, [S]."""
        action, diverged = self._to_host.read()
        return action, diverged.astype(np.bool_)

    def replay_action(self, action: NDArray[np.int64]) -> None:
        """Do a step of the past again, with the actions that were taken then, [S].

        It waits for the device, as `act_wait` does: the outcome of the step may then be sent.
        """
        self._to_host.post(self._store(torch.from_numpy(action).to(self._fleet.device)[:, None]))
        self._to_host.read()

    def finish_step(self, out: Step) -> None:
        """Send the outcome of the step; it is stored at once, so that the replay is whole between two steps."""
        reward = learning_reward(self._fleet.config, out.reward)
        self._to_device.send(
            frame=out.frame, is_first=out.terminal | out.truncated, reward=reward, truncated=out.truncated
        )
        self._fleet.replay.finish_step(self._to_device["reward"], self._to_device["truncated"])

    def _act_greedily(self) -> Tensor:
        self._fleet.replay.write_frame(self._to_device["frame"])
        return self._select(self._fleet.rng.sample_raw_action(), None)

    def _store(self, action: Tensor) -> Tensor:
        self._fleet.replay.write_frame(self._to_device["frame"])
        return self._select_and_store(None, action)

    @torch.no_grad()
    def _select_and_store(self, raw: RawNumbers | None, action: Tensor | None) -> Tensor:
        """Push the newest frame, and store an action: the given one, or the best by these random numbers.

        Returns the actions and whose learning has diverged, [2, S].
        """
        fleet, frame, is_first = self._fleet, self._to_device["frame"], self._to_device["is_first"]
        self._actor.observe(frame[:, None], is_first[:, None])
        if action is None:
            assert raw is not None
            action = self._actor.greedy(fleet.state.acting, fleet.rng.head_noise(raw.normal), fleet.state.action_mask)
            action = fleet.rng.epsilon_greedy(action, raw, self.epsilon)
        fleet.replay.begin_step(is_first, action[:, 0])
        return torch.stack([action[:, 0], fleet.state.diverged.to(action.dtype)])
