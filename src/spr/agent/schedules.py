"""Owns what changes over a run: pure functions of the step and the update, and the device scalars they are filled into.

What an update reads lies in device memory, and nothing that changes is captured as a number. What stays as the
configuration has it is a number there, so that methods without schedules compute as if there were none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from spr.config.config import Config


class ScheduledScalars(NamedTuple):
    """What an update reads of the schedules, 0-d tensors on the device; None: constant, as in the configuration."""

    beta: Tensor  # importance-correction exponent
    n_step: Tensor | None = None  # int64, length of the multi-step return
    gamma: Tensor | None = None  # float64 discount per step; there if and only if n_step is
    learning_rate: Tensor | None = None


def new_scalars(config: Config, device: torch.device) -> ScheduledScalars:
    """Return the scalars of a configuration as they are when learning starts."""

    def scalar(wanted: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros((), device=device, dtype=dtype) if wanted else None

    rates = ScheduledScalars(
        beta=torch.zeros((), device=device),
        n_step=scalar(config.return_changes, torch.int64),
        gamma=scalar(config.return_changes, torch.float64),
        learning_rate=scalar(config.learner.learning_rate_end > 0, torch.float32),
    )
    fill(rates, config, config.schedule.learning_starts, 0)
    return rates


def fill(rates: ScheduledScalars, config: Config, step: int, update: int) -> None:
    """Set the scalars for one of a step's updates, counted from 0."""
    if update == 0:
        rates.beta.fill_(beta_at(config, step))
    updates = updates_before(config, step) + update
    if rates.n_step is not None and rates.gamma is not None:
        rates.n_step.fill_(n_step_at(config, updates))
        rates.gamma.fill_(gamma_at(config, updates))
    if rates.learning_rate is not None:
        rates.learning_rate.fill_(learning_rate_at(config, updates))


def epsilon_at(config: Config, step: int) -> float:
    """Return the probability of a random action: a straight line from the first step of learning, then constant."""
    schedule = config.schedule
    share = min(1.0, max(0.0, (step - schedule.learning_starts) / schedule.epsilon_steps))
    return schedule.epsilon_start + (schedule.epsilon_end - schedule.epsilon_start) * share


def beta_at(config: Config, step: int) -> float:
    """Return the importance-correction exponent: linear from the first step of learning to the last step."""
    schedule, replay = config.schedule, config.replay
    share = (step - schedule.learning_starts) / (schedule.steps - schedule.learning_starts)
    return replay.beta_start + (replay.beta_end - replay.beta_start) * share


def resets_until(config: Config, step: int) -> int:
    """Return which reset is the last one that comes before a step's action; 0: none has come yet.

    Resets come at multiples of their interval, counted from the run's first step. There is none in the last interval:
    the agent that is evaluated has learnt for a whole one. One before learning starts counts, but is not carried out.
    """
    interval, schedule = config.reset_interval, config.schedule
    if interval == 0:
        return 0
    number = min(step, schedule.steps - interval) // interval
    return number if number * interval > schedule.learning_starts else 0


def reset_at(config: Config, step: int) -> int:
    """Return the number of the reset that comes before a step's action, after the updates before it; 0: none comes."""
    number = resets_until(config, step)
    return number if number and number * config.reset_interval == step else 0


def updates_before(config: Config, step: int) -> int:
    """Return how many updates have been made when a step's own begin: since the last reset, or since the start."""
    schedule = config.schedule
    since = max(schedule.learning_starts, resets_until(config, step) * config.reset_interval)
    return schedule.updates_per_step * max(0, step - since)


def n_step_at(config: Config, updates: int) -> int:
    """Return the length of the multi-step return after so many updates: along an exponential, in whole steps."""
    replay = config.replay
    return round(_exponential(replay.n_step, replay.n_step_end, _share(config, updates)))


def gamma_at(config: Config, updates: int) -> float:
    """Return the discount after so many updates: its distance from 1 follows an exponential."""
    replay = config.replay
    end = 1 - replay.gamma_end if replay.gamma_end else 0.0
    return 1 - _exponential(1 - replay.gamma, end, _share(config, updates))


def learning_rate_at(config: Config, updates: int) -> float:
    """Return the learning rate after so many updates: along an exponential."""
    learner = config.learner
    return _exponential(learner.learning_rate, learner.learning_rate_end, _share(config, updates))


def _share(config: Config, updates: int) -> float:
    """Return how much of the way from a start to an end is done."""
    return min(1.0, updates / max(1, config.schedule.anneal_updates))


def _exponential(start: float, end: float, share: float) -> float:
    """Return what lies between a start and an end, in equal ratios; without an end (0) it is the start."""
    return start * (end / start) ** share if end else start
