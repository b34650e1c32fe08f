"""Owns snapshots: what of a training is saved between two steps, and how it is restored.

Frames are saved only where an environment can't repeat itself; else the games are played again from their log, and
compared with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.agent.replay import learning_reward
from spr.common.errors import UserError
from spr.common.json_files import is_number
from spr.envs.base import seeds_for
from spr.training.checkpoint import Checkpoint, Spec
from spr.training.loop import GAME_OVER, TERMINAL, TRUNCATED, Training

_STATE = ("weights", "ema", "target", "first_moment", "second_moment")  # rows of the learner's state
_LOG = ("actions", "rewards", "ends")


def snapshots(training: Training) -> list[Checkpoint]:
    """Return a copy of everything that the next step depends on, per agent."""
    return [snapshot(training, agent) for agent in range(len(training.fleet.seeds))]


def snapshot(training: Training, agent: int) -> Checkpoint:
    """Return a copy of everything that the next step of one agent depends on."""
    names, sums, updates = training.update.sums()
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(training, agent, sums).items()}
    if not training.fleet.envs.deterministic:
        tensors["frames"] = _tall(training.fleet.replay.recent(agent))
    about = {"metrics": names, "metrics_updates": updates, "restarts": training.restarts}
    return Checkpoint(training.step, tensors, {"seed": training.fleet.seeds[agent], **about})


def _tensors(training: Training, agent: int, sums: Tensor) -> dict[str, Tensor]:
    """Return what one agent's checkpoint holds besides frames, not copied."""
    fleet, step = training.fleet, training.step
    return {
        **{name: getattr(fleet.state, name)[agent] for name in _STATE},
        "count": fleet.state.count.view(1),
        "priority": fleet.replay.priority[agent],
        "generator": fleet.rng.state(agent),
        "metrics": sums[:, agent],
        **{name: torch.from_numpy(getattr(training.log, name)[agent, :step]) for name in _LOG},
    }


def _tall(frames: Tensor) -> Tensor:
    """Lay the channels of frames [N, C, H, W] one below the other: gray frames are saved as [N, H, W]."""
    return frames.flatten(1, 2)


def specs(training: Training, step: int, metrics: int) -> dict[str, Spec]:
    """Return what every tensor of an agent's checkpoint after a step has to be, if it holds so many metrics."""
    fleet = training.fleet
    found = _tensors(training, 0, torch.zeros(metrics, 1))
    wanted = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
    wanted |= {name: Spec((step,), found[name].dtype) for name in _LOG}
    if not fleet.envs.deterministic:
        channels, height, width = fleet.config.observation.frame
        wanted["frames"] = Spec((min(step, fleet.replay.capacity), channels * height, width), torch.uint8)
    return wanted


def check(about: Mapping[str, Any]) -> None:
    """Raise ValueError for what no checkpoint says of itself; its tensors are checked by `specs`."""
    metrics, restarts = about["metrics"], about["restarts"]
    named = isinstance(metrics, list) and all(isinstance(name, str) for name in metrics)
    counted = isinstance(restarts, list) and all(type(step) is int for step in [*restarts, about["metrics_updates"]])
    if not named or not counted or not is_number(about["seconds"]):
        raise ValueError("what a checkpoint says of itself is damaged")


def restore(training: Training, saved: Sequence[Checkpoint]) -> Iterator[int]:
    """Bring a new training to where a fleet was saved, by playing its games again; yields the steps played so far."""
    fleet, about = training.fleet, saved[0].about
    training.restarts = [int(step) for step in about["restarts"]]
    yield from _play_again(training, saved) if fleet.envs.deterministic else _begin_again(training, saved)
    for i, one in enumerate(saved):
        for name in _STATE:
            getattr(fleet.state, name)[i].copy_(one.tensors[name])
        fleet.replay.priority[i].copy_(one.tensors["priority"])
        fleet.rng.restore(i, one.tensors["generator"])
    fleet.state.count.copy_(saved[0].tensors["count"][0])
    sums = torch.stack([one.tensors["metrics"] for one in saved], 1)
    training.update.restore(about["metrics"], sums, int(about["metrics_updates"]))


def diverged_update(training: Training, agent: int) -> Checkpoint:
    """Return a checkpoint that reproduces a diverged update: the state before it and its random numbers."""
    step = training.diverged[agent]
    whole = snapshot(training, agent)
    raw = training.update.last_raw._asdict()
    tensors = whole.tensors | {f"raw_{name}": numbers[agent].cpu() for name, numbers in raw.items()}
    tensors |= {name: tensors[name][:step] for name in _LOG}
    # The host learns of it a step later, when one more sequence can be sampled than could be then.
    later = torch.arange(step, training.step) - training.fleet.config.horizon
    tensors["priority"][later[later >= 0] % training.fleet.replay.capacity] = 0
    return Checkpoint(step, tensors, whole.about)


def _play_again(training: Training, saved: Sequence[Checkpoint]) -> Iterator[int]:
    """Bring deterministic environments back to where they were."""
    envs, act, log = training.fleet.envs, training.act, training.log
    actions, rewards, ends = _logs(saved)
    act.start(envs.reset(training.env_seeds()))
    for step in range(saved[0].step):
        chosen = actions[:, step].astype(np.int64)
        act.replay_action(chosen)
        envs.send(chosen)
        out = envs.recv()
        act.finish_step(out)
        training.count_step(chosen, out)
        if (log.rewards[:, step] != rewards[:, step]).any() or (log.ends[:, step] != ends[:, step]).any():
            raise UserError(
                f"the game did not repeat itself at step {step:,}: its checkpoint was made with another version of "
                "the emulator or by other rules, and can't be resumed here"
            )
        if training.row_is_due():
            training.games.rows()
        yield training.step


def _begin_again(training: Training, saved: Sequence[Checkpoint]) -> Iterator[int]:
    """Refill the memory and begin a new game, as after a time limit: the old one can't be restored."""
    steps, fleet, log = saved[0].step, training.fleet, training.log
    actions, rewards, ends = _logs(saved)
    ends[:, -1] |= TRUNCATED
    log.actions[:, :steps], log.rewards[:, :steps], log.ends[:, :steps] = actions, rewards, ends
    for step in range(steps):
        training.games.count(actions[:, step], rewards[:, step], (ends[:, step] & GAME_OVER) > 0)
        training.step = step + 1
        if training.row_is_due():
            training.games.rows()
    training.games.abandon()
    ended = (ends & (TERMINAL | TRUNCATED)) > 0
    is_first = np.concatenate([np.ones_like(ended[:, :1]), ended[:, :-1]], 1)
    frames = torch.stack([one.tensors["frames"] for one in saved])
    fleet.replay.refill(
        frames.unflatten(2, fleet.config.observation.frame[:2]),
        *(
            torch.from_numpy(a)
            for a in (is_first, actions, learning_reward(fleet.config, rewards), (ends & TRUNCATED) > 0)
        ),
    )
    training.act.start(fleet.envs.reset([seeds_for(seed, f"after {steps}", 1)[0] for seed in fleet.seeds]))
    training.restarts = [*training.restarts, steps]
    yield steps


def _logs(saved: Sequence[Checkpoint]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the actions, rewards and ends of a fleet, [S, steps] each."""
    actions, rewards, ends = (torch.stack([one.tensors[name] for one in saved]).numpy() for name in _LOG)
    return actions, rewards, ends
