"""Owns what changes over a run: functions of the step, whose values the training loop fills into device scalars."""

from spr.config import Config


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
