"""Owns the choice of actions in an evaluation: many environments of several agents in one batch on the device.

Shapes: S agents, R rows of E environments; L lanes, groups of rows that act by the same parameters; A actions.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from spr.agent.action_padding import action_masks, crop_actions, pad_actions
from spr.agent.networks import networks_without_weights
from spr.agent.q_head import num_actions_of
from spr.common.errors import UserError
from spr.config.config import Config
from spr.envs.gymnasium_adapter import Argument
from spr.evaluation.episodes import Arrays, Row
from spr.evaluation.screen_resize import Resizer
from spr.ops.cuda_graphs import DeviceToHost, HostToDevice, captured
from spr.training.actor import Actor


class Agents(NamedTuple):
    """Who plays: S agents, each at its place."""

    games: Sequence[str]
    params: dict[str, Tensor]  # [S, ...] each
    seeds: Sequence[int]
    arguments: Mapping[str, Argument] = MappingProxyType({})  # of their environments


class BatchedPolicy:
    """Selects the actions of half of the rows, [R, E]: keeps their frames and the weights of each row's agent.

    Every row is a lane of its own, L = R, since any agent may get it. An agent that plays alone has all rows, so they
    are one lane, L = 1: its weights are not copied, and all frames are one batch, which fills a GPU better.
    """

    def __init__(
        self,
        config: Config,
        params: dict[str, Tensor],
        action_mask: Tensor | None,
        heights: Sequence[int | None],
        arrays: Arrays,
    ) -> None:
        """No row is assigned yet. `heights` are those of the agents' screens, or None where frames are shown."""
        shape = arrays.action.shape
        device = next(iter(params.values())).device
        room = num_actions_of(config, {name: p.shape for name, p in params.items()})
        lanes = 1 if len(heights) == 1 else shape[0]
        actor = Actor(config, room, (lanes, shape[0] * shape[1] // lanes), device)
        self._arrays = arrays
        # The weights of all agents, and those of the agent that each row is assigned to.
        self._agents = {name: p for name, p in params.items() if name in actor.names}
        self._lanes = lanes
        self._lent = {name: p.new_zeros((lanes, *p.shape[1:])) for name, p in self._agents.items()}
        self._action_mask = action_mask
        self._lent_mask = None if action_mask is None else action_mask.new_zeros((lanes, room))
        self._heights = heights
        resizer = None if None in heights else Resizer(shape[0], config.observation, device)
        self._resizer = resizer
        self._whose = [-1] * shape[0]
        self._moved = np.zeros(shape[0], np.bool_)
        to_device = HostToDevice(device, {"frame": arrays.frame, "is_first": arrays.is_first, "moved": self._moved})

        def in_lanes(x: Tensor) -> Tensor:
            return x.reshape(lanes, -1, *x.shape[2:])

        def act() -> Tensor:
            shown, is_first = to_device["frame"], to_device["is_first"]
            frames = shown if resizer is None else resizer(shown)
            moved = to_device["moved"][:, None].expand_as(is_first)
            actor.observe(in_lanes(frames), in_lanes(is_first), in_lanes(moved))
            return actor.greedy(self._lent, noise=(), action_mask=self._lent_mask).view(shape)

        self._to_device, self._to_host = to_device, DeviceToHost(device)
        self._act = captured(act, device)

    def act(self, ready: Mapping[int, int]) -> None:
        """Select actions for some places, by the agents given for them; the others keep what they have seen."""
        for place, agent in ready.items():
            if self._whose[place] != agent:
                self._lend(place, agent)
        places = list(ready)
        self._moved[:] = False
        self._moved[places] = True
        # Rows at work may write meanwhile; what they have not finished is not looked at.
        self._to_device.send_some("frame", places, self._arrays.frame)
        self._to_device.send(is_first=self._arrays.is_first, moved=self._moved)
        self._to_host.post(self._act())
        self._arrays.action[places] = self._to_host.read()[places]

    def _lend(self, place: int, agent: int) -> None:
        self._whose[place] = agent
        if self._resizer is not None and (height := self._heights[agent]) is not None:
            self._resizer.lend(place, height)
        lane = place % self._lanes
        for name, p in self._agents.items():
            self._lent[name][lane].copy_(p[agent])
        if self._action_mask is not None and self._lent_mask is not None:
            self._lent_mask[lane].copy_(self._action_mask[agent])


def with_action_room(
    config: Config, games: Sequence[str], params: dict[str, Tensor], rows: Mapping[int, Row]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Give agents room for as many actions as their environments have, and return which are valid, [S, A].

    In a fleet they have it already; stored agents have their own actions only.
    """
    room = rows[0].num_actions
    learnt = num_actions_of(config, {name: p.shape for name, p in params.items()})
    own = [rows[i].game_num_actions or room for i in range(len(games))]
    device = next(iter(params.values())).device
    dims = networks_without_weights(config, room, device).action_dims()
    for i, (game, mine) in enumerate(zip(games, own, strict=True)):
        agent = {name: p[i] for name, p in params.items()}
        if learnt == room:  # what an agent of a fleet has no use for is zero
            again = pad_actions(crop_actions(agent, dims, mine, room), dims, mine, room)
            fits = all(bool((again[name] == agent[name]).all()) for name in dims)
        else:
            fits = learnt == mine
        if not fits:
            raise UserError(f"this agent chooses between {learnt} actions, but {game} has {mine}")
    if learnt != room:
        # One dimension more: that of the agents comes first.
        wider = {name: dim._replace(dim=dim.dim + 1) for name, dim in dims.items()}
        params = pad_actions(params, wider, learnt, room)
    return params, None if rows[0].game_num_actions is None else action_masks(own, room, device)
