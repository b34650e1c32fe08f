"""Owns a fleet: its parts put together, and one step of it as the device sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.actor import Actor
from spr.config import SIDE, Config
from spr.draws import Dice, Numbers
from spr.envs import Envs, Frames, Step
from spr.graphs import Inbox, Outbox, captured, compiled
from spr.learner import Learner, LearnerState
from spr.replay import Replay


@dataclass(frozen=True)
class Fleet:
    """S agents of one game and one configuration on one device; one agent is a fleet of one."""

    config: Config
    seeds: tuple[int, ...]
    device: torch.device
    envs: Envs
    learner: Learner
    state: LearnerState
    replay: Replay
    dice: Dice
    actor: Actor


def assemble(
    config: Config, envs: Envs, seeds: Sequence[int], device: torch.device, product: torch.dtype = torch.float32
) -> Fleet:
    """Put a fleet together, one agent per seed; its matrix products are taken in the dtype `product`."""
    learner = Learner(config, envs.actions, device, product=product)
    return Fleet(
        config=config,
        seeds=tuple(seeds),
        device=device,
        envs=envs,
        learner=learner,
        state=learner.init(seeds),
        replay=Replay(config, len(seeds), device),
        dice=Dice(config, envs.actions, seeds, device),
        actor=Actor(config, envs.actions, (len(seeds), 1), device),
    )


class Turn:
    """A step of a fleet as the device sees it: what came of the last action, a new frame, an action, both stored."""

    def __init__(self, fleet: Fleet) -> None:
        """Nothing has been seen yet."""
        agents, device = len(fleet.seeds), fleet.device
        self._fleet = fleet
        self._inbox = Inbox(
            device,
            {
                "frame": np.zeros((agents, SIDE, SIDE), np.uint8),
                "first": np.ones(agents, np.bool_),
                "reward": np.zeros(agents, np.float32),
                "truncated": np.zeros(agents, np.bool_),
            },
        )
        self._outbox = Outbox(device)
        self.epsilon = torch.zeros((), device=device)
        self._seen = compiled(self._see, device)
        self._greedy = captured(self._best, device, fleet.dice.generators)

    def start(self, frame: Frames) -> None:
        """Show the first frame of every game, [S, 84, 84]."""
        self._inbox.send(frame=frame, first=np.ones(len(frame), np.bool_))

    def choose(self, greedy: bool) -> None:
        """Begin the step: pick actions, the best under noise or random ones, and store them with what was seen."""
        action = self._greedy() if greedy else self._given(self._fleet.dice.actions())
        self._outbox.post(action)

    def repeat(self, action: NDArray[np.int64]) -> None:
        """Do a step of the past again: see, and store the actions that were taken then, [S].

        It waits for the device, as choosing an action does: what came of the step may then be sent.
        """
        self._outbox.post(self._given(torch.from_numpy(action).to(self._fleet.device)[:, None]))
        self._outbox.read()

    def chosen(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait for the actions, [S], and with them for whose learning has failed, [S]."""
        action, faulty = self._outbox.read()
        return action, faulty.astype(np.bool_)

    def settle(self, out: Step) -> None:
        """Send what came of the step; it is stored at once, so that the replay is whole between two steps."""
        reward = out.reward.clip(-1, 1)
        self._inbox.send(frame=out.frame, first=out.terminal | out.truncated, reward=reward, truncated=out.truncated)
        self._fleet.replay.settle(self._inbox["reward"], self._inbox["truncated"])

    def _best(self) -> Tensor:
        self._fleet.replay.keep(self._inbox["frame"])
        return self._seen(self._fleet.dice.roll_action(), None)

    def _given(self, action: Tensor) -> Tensor:
        self._fleet.replay.keep(self._inbox["frame"])
        return self._see(None, action)

    @torch.no_grad()
    def _see(self, numbers: Numbers | None, action: Tensor | None) -> Tensor:
        """See the newest frame, which is kept, and store an action: the given one, or the best by these numbers.

        Returns the actions and whose learning has failed, [2, S].
        """
        fleet, frame, first = self._fleet, self._inbox["frame"], self._inbox["first"]
        fleet.actor.observe(frame[:, None], first[:, None])
        if action is None:
            assert numbers is not None
            action = fleet.actor.greedy(fleet.state.params, fleet.dice.head_noise(numbers.normal))
            action = fleet.dice.explored(action, numbers, self.epsilon)
        fleet.replay.append(first, action[:, 0])
        return torch.stack([action[:, 0], fleet.state.faulty.to(action.dtype)])
