"""Owns timing: how long an update, an action, an environment step and a whole step take on this machine."""

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from spr.actor import ActStep
from spr.config import Config
from spr.envs import make
from spr.fleet import assemble
from spr.hardware import device_name, product_dtype
from spr.learner import UpdateRunner
from spr.train import train

_ROUNDS = 5  # of which the median is taken


def measure(config: Config, game: str, agents: int, device: torch.device, precision: str) -> dict[str, Any]:
    """Time a fleet of `agents` on a game, on replay filled by random play; milliseconds are medians."""
    start = max(256, config.horizon + config.observation.stack + config.replay.batch_size)
    envs = make(game, agents, obs=config.observation)
    try:
        began = time.perf_counter()
        fleet = assemble(
            config.override({"schedule.learning_starts": start}), envs, range(agents), device, product_dtype(precision)
        )
        loop = train(fleet)
        next(info for info in loop if info.step == start)
        random_play = time.perf_counter() - began
        few = 1 if device.type == "cpu" else 50
        # Compiling and capturing are done within the first learning steps.
        first = _seconds(device, lambda: next(loop), 6)
        step = _milliseconds(device, lambda: next(loop), few)
        update = _milliseconds(
            device, learn := UpdateRunner(fleet.learner, fleet.state, fleet.replay, fleet.rng), 2 * few
        )
        act_step = ActStep(fleet)

        def act() -> None:
            act_step.act_async(greedy=True)
            act_step.act_wait()

        still = np.zeros(agents, np.int64)

        def move() -> None:
            envs.send(still)
            envs.recv()

        act_ms, env_ms = _milliseconds(device, act, 20), _milliseconds(device, move, 20)
    finally:
        envs.close()
    updates = config.schedule.updates_per_step * update
    return {
        "game": game,
        "agents": agents,
        "device": device_name(device),
        "precision": precision,
        "update_ms": update,
        "update_ms_per_agent": update / agents,
        "kernels_per_update": _kernels(device, learn),
        "act_ms": act_ms,
        "env_ms": env_ms,
        "env_steps_per_second": agents / env_ms * 1e3,
        "step_ms": step,
        # Environments step while a GPU learns: what of them is seen is what the other two leave of a real step.
        "share_update": min(1.0, updates / step),
        "share_action": min(1.0, act_ms / step),
        "share_environment": max(0.0, 1 - (updates + act_ms) / step),
        "run_minutes": step * config.schedule.steps / 6e4,
        "random_play_seconds": random_play,
        "first_learning_steps_seconds": first,
        "memory_mib": _memory(device),
    }


def _seconds(device: torch.device, work: Callable[[], Any], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _milliseconds(device: torch.device, work: Callable[[], Any], times: int) -> float:
    """Return the time of one call: the median over rounds of several, without waiting in between."""
    _seconds(device, work, 5 if device.type == "cuda" else 1)  # a graph is captured at the fourth call
    return median(_seconds(device, work, times) for _ in range(_ROUNDS)) / times * 1e3


def _kernels(device: torch.device, learn: Callable[[], Any]) -> int | None:
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        learn()
        torch.cuda.synchronize(device)
    return sum(1 for event in seen.events() if event.device_type.name == "CUDA")


def _memory(device: torch.device) -> float:
    """Return the most memory taken so far: of the GPU by this process, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
