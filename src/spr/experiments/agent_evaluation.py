"""Owns the evaluation of trained agents as events: every game of each, with its score and length."""

from typing import NamedTuple

from spr.config.config import Config
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import play
from spr.experiments import events
from spr.experiments.events import Consumer


class AgentScores(NamedTuple):
    """The games of one agent's evaluation."""

    scores: list[float]  # raw
    lengths: list[int]  # steps


def evaluate_agents(
    config: Config, agents: Agents, on_event: Consumer, epsilon: float | None = None
) -> list[AgentScores]:
    """Play the evaluation's games, and return every agent's."""
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(agents.seeds)
    on_event(events.Evaluated(title, 0, total))
    for playing in play(config, agents, epsilon):
        on_event(events.Evaluated(title, playing.finished, total))
    scores = [[score for score in each if score is not None] for each in playing.scores]
    return [AgentScores(*both) for both in zip(scores, playing.lengths, strict=True)]
