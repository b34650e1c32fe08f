"""Owns timing: how long an update, an action, an environment step, a whole step and evaluation take on this machine."""

import re
import resource
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from spr.common.hardware import device_name, free_unused, product_dtype
from spr.config.config import Config
from spr.envs.registry import make_each
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import play
from spr.training.actor import ActStep
from spr.training.fleet import assemble
from spr.training.loop import train
from spr.training.update_runner import UpdateRunner

_ROUNDS = 5  # of which the median is taken
_EVALUATING = 20.0  # seconds for which an evaluation is timed, after
_WARM = 3.0  # seconds of it that do not count


# Kinds of kernels by what their names match; the first match counts.
_KINDS = {
    "observations drawn": r"^_draw",
    "the encoder's convolutions and their gradient": r"^_(convolve|kernel|max_pool)",
    "the transition model and its gradient": r"^_(first|second|weights)",
    "matrix products": r"gemm|gemv|cutlass|nvjet|splitK|cublas|xmma",
    "Adam, clipping, targets": r"(?=.*sqrt)(?=.*(lerp|addcmul|addcdiv|pow)).*copy",
    "random numbers": r"^_random",
    "copies": r"[Mm]emcpy|[Mm]emset|copy_kernel|CatArray",
    "reductions": r"triton_(red|per)|reduce|^_renormalise",
    "element by element": r"triton_poi|elementwise|vectorized",
}


class Kernels(NamedTuple):
    """The kernels of one update that are of one kind."""

    kind: str
    number: int
    microseconds: float


def measure(
    config: Config,
    games: Sequence[str],
    agents: int,
    device: torch.device,
    precision: str,
    profiled: bool = False,
    evaluated: bool = False,
) -> dict[str, Any]:
    """Time a fleet of `agents` that play the games in turn, on replay filled by random play; medians of milliseconds.

    With `profiled`, also the kernels of an update by kind; with `evaluated`, how fast its evaluation plays.
    """
    if device.type == "cuda":  # what the size before has taken does not count
        free_unused(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = max(256, config.horizon + config.observation.stack + config.replay.batch_size)
    envs = make_each([games[i % len(games)] for i in range(agents)], config.observation)
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
    who = Agents([games[i % len(games)] for i in range(agents)], fleet.state.acting, range(agents))
    updates = config.schedule.updates_per_step * update
    kernels = kernels_of(learn, device) if device.type == "cuda" else []
    return {
        "games": list(games[:agents]),  # those that are played
        "agents": agents,
        "device": device_name(device),
        "precision": precision,
        "update_ms": update,
        "update_ms_per_agent": update / agents,
        "kernels_per_update": sum(some.number for some in kernels) if kernels else None,
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
        **({"kernels": [some._asdict() for some in kernels]} if profiled else {}),
        **({"evaluation_steps_per_second": evaluation_rate(config, who)} if evaluated else {}),
    }


def evaluation_rate(config: Config, agents: Agents) -> float:
    """Return how many steps of games an evaluation plays in a second, by its beginning, when all emulators are busy."""
    began: float | None = None
    since, before, steps = 0.0, 0, 0  # when counting began, and after how many steps
    for playing in play(config, agents):
        now, steps = time.perf_counter(), playing.steps
        if began is None:
            began, since, before = now, now, steps
        if since == began and now - began >= _WARM:
            since, before = now, steps
        if now - began >= _EVALUATING:
            break
    return (steps - before) / (time.perf_counter() - since)


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


def kernels_of(work: Callable[[], Any], device: torch.device) -> list[Kernels]:
    """Return what a GPU does in one call, by kind of kernel, the longest first."""
    rounds = 5
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            work()
        torch.cuda.synchronize(device)
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type.name == "CUDA":
            kind = next((kind for kind, names in _KINDS.items() if re.search(names, event.name)), "the rest")
            found.setdefault(kind, []).append(event.device_time)
    made = [Kernels(kind, round(len(times) / rounds), sum(times) / rounds) for kind, times in found.items()]
    return sorted(made, key=lambda some: -some.microseconds)


def _memory(device: torch.device) -> float:
    """Return the most memory taken: of the GPU by this fleet, or of the host by this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
