"""Owns the aggregates over games and runs: pure functions from scores to the numbers of tables, with intervals."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from statistics import median as median_of
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spr.common.errors import UserError
from spr.envs.atari100k import game_names, normalise, reference_scores


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
    human, dqn = (
        [normalise(game, scores[game], reference_scores(by)[game]) for game in game_names()]
        for by in ("human", "dqn_50m")
    )
    return Aggregates(fmean(human), median_of(human), fmean(dqn), median_of(dqn), sum(value > 1 for value in human))


Scores = Sequence[NDArray[np.float64]]  # one array per game, its runs last; what comes before are replicates


class Interval(NamedTuple):
    """An estimate with the interval that holds it with 95% confidence."""

    value: float
    low: float
    high: float


def mean(scores: Scores) -> NDArray[np.float64]:
    """Return the mean over games of each game's mean over runs."""
    value: NDArray[np.float64] = _per_game(scores).mean(-1)
    return value


def median(scores: Scores) -> NDArray[np.float64]:
    """Return the median over games of each game's mean over runs."""
    value: NDArray[np.float64] = np.median(_per_game(scores), -1)
    return value


def iqm(scores: Scores) -> NDArray[np.float64]:
    """Return the interquartile mean: of all runs of all games, without the best and the worst quarter.

    Games count alike, so a run counts the less the more there are of its game; one on a quarter's edge counts in part.
    (rliable leaves out whole runs, which is the same where all games have as many, and four divide the number of all.)
    """
    runs = np.concatenate(scores, -1)
    order = np.argsort(runs, -1)
    share = np.concatenate([np.full(x.shape[-1], 1 / (len(scores) * x.shape[-1])) for x in scores])[order]
    end = np.cumsum(share, -1)
    kept = np.clip(np.minimum(end, 0.75) - np.maximum(end - share, 0.25), 0, None)
    value: NDArray[np.float64] = (kept * np.take_along_axis(runs, order, -1)).sum(-1) / kept.sum(-1)
    return value


def optimality_gap(scores: Scores, goal: float = 1.0) -> NDArray[np.float64]:
    """Return how far runs stay below the goal in the mean over games; what exceeds it counts as the goal."""
    value: NDArray[np.float64] = goal - _per_game([np.minimum(runs, goal) for runs in scores]).mean(-1)
    return value


def superhuman(scores: Scores) -> NDArray[np.float64]:
    """Return how many games' means over runs exceed 1."""
    value: NDArray[np.float64] = (_per_game(scores) > 1).sum(-1).astype(np.float64)
    return value


def profile(scores: Scores, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of runs above each threshold, in the mean over games, [..., thresholds]."""
    shares = [(runs[..., None, :] > thresholds[:, None]).mean(-1) for runs in scores]
    value: NDArray[np.float64] = np.mean(shares, 0)
    return value


def probability_of_improvement(ours: Scores, theirs: Scores) -> NDArray[np.float64]:
    """Return the chance that a run of ours beats one of theirs on the same game, ties half, mean over games."""
    chances = []
    for x, y in zip(ours, theirs, strict=True):
        above = (x[..., :, None] > y[..., None, :]) + 0.5 * (x[..., :, None] == y[..., None, :])
        chances.append(above.mean((-1, -2)))
    value: NDArray[np.float64] = np.mean(chances, 0)
    return value


Statistic = Callable[..., NDArray[np.float64]]  # of one or more sets of scores


def replicates(statistic: Statistic, *sets: Scores, draws: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return a statistic of sets of scores resampled: each game's runs with replacement, each set for itself."""
    found = []
    for begin in range(0, draws, _PIECE):
        count = min(_PIECE, draws - begin)
        again = [[runs[random.integers(runs.size, size=(count, runs.size))] for runs in scores] for scores in sets]
        found.append(statistic(*again))
    return np.concatenate(found)


def bootstrap(statistic: Statistic, *sets: Scores, draws: int, random: np.random.Generator) -> Interval:
    """Estimate a statistic of sets of scores with a 95% interval by the stratified percentile bootstrap."""
    low, high = np.quantile(replicates(statistic, *sets, draws=draws, random=random), [0.025, 0.975])
    return Interval(float(statistic(*sets)), float(low), float(high))


_PIECE = 2_000  # replicates that are held in memory together


def _per_game(scores: Scores) -> NDArray[np.float64]:
    return np.stack([runs.mean(-1) for runs in scores], -1)
