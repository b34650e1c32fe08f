"""Owns the aggregates over games: pure functions from per-game scores to the numbers in the paper's tables."""

from collections.abc import Mapping
from statistics import fmean, median
from typing import NamedTuple

from spr.errors import UserError
from spr.games import game_names, normalised


class Aggregates(NamedTuple):
    """The rows of the paper's Table 1."""

    human_mean: float
    human_median: float
    dqn_mean: float
    dqn_median: float
    superhuman: int


def aggregate(scores: Mapping[str, float]) -> Aggregates:
    """Aggregate one mean raw score for each of the 26 games; an incomplete set is refused, not averaged over."""
    missing = [game for game in game_names() if game not in scores]
    if missing:
        raise UserError(f"aggregates need all 26 games; missing: {', '.join(missing)}")
    human = [_normalised(game, scores[game], "human") for game in game_names()]
    dqn = [_normalised(game, scores[game], "dqn_50m") for game in game_names()]
    return Aggregates(fmean(human), median(human), fmean(dqn), median(dqn), sum(value > 1 for value in human))


def _normalised(game: str, score: float, by: str) -> float:
    value = normalised(game, score, by)
    if value is None:
        raise UserError(f"'{game}' has no reference scores")
    return value
