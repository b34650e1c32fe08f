"""Owns timing: how long an update, an action and an environment step take on this machine."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from spr.config import Config
from spr.draws import Dice
from spr.envs import Envs, make
from spr.learner import Updates
from spr.machine import device_name, product_dtype
from spr.train import assemble, train

_WARM, _TIMED = 5, 15


def measure(config: Config, game: str, agents: int, device: torch.device, precision: str) -> dict[str, Any]:
    """Time a fleet of `agents` on a game: milliseconds (medians) of its parts, on replay filled by random play."""
    start = max(256, config.horizon + config.replay.batch)
    early = config.override({"schedule.random_steps": start})
    envs = make(game, agents)
    try:
        fleet = assemble(early, envs, range(agents), device, product_dtype(precision))
        next(tick for tick in train(fleet) if tick.step > start)
        learn = Updates(fleet.learner, fleet.state, fleet.replay, fleet.dice)
        params = fleet.state.params
        update = _timed(device, learn)
        act = _timed(device, lambda: fleet.actor.greedy(params, fleet.dice.head_noise(fleet.dice.roll_action())).cpu())
        step = _timed(device, lambda: _step(envs, fleet.dice))
    finally:
        envs.close()
    # One after the other: an upper bound, since the loop lets the environments step while the agents learn.
    whole = config.schedule.updates_per_step * update + act + step
    return {
        "game": game,
        "agents": agents,
        "device": device_name(device),
        "precision": precision,
        "update_ms": update,
        "update_ms_per_agent": update / agents,
        "act_ms": act,
        "env_ms": step,
        "step_ms": whole,
        "run_hours_per_agent": whole * config.schedule.steps / agents / 3.6e6,
        "peak_memory_mb": _peak(device),
    }


def _step(envs: Envs, dice: Dice) -> None:
    envs.send(dice.actions()[:, 0].cpu().numpy())
    envs.receive()


def _timed(device: torch.device, work: Callable[[], Any]) -> float:
    times = []
    for i in range(_WARM + _TIMED):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= _WARM:
            times.append(time.perf_counter() - begin)
    return median(times) * 1e3


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
