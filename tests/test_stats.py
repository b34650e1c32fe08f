"""Aggregates over runs and games against hand-computed numbers, slow loops, and what a bootstrap has to do."""

import numpy as np
import pytest

from spr.stats import (
    bootstrap,
    iqm,
    mean,
    middle,
    optimality_gap,
    probability_of_improvement,
    profile,
    superhuman,
)

TWO_GAMES = [np.array([0.0, 0.2, 0.4, 0.6]), np.array([1.0, 2.0, 3.0, 10.0])]


def test_aggregates_by_hand():
    assert mean(TWO_GAMES) == pytest.approx((0.3 + 4) / 2)
    assert middle([*TWO_GAMES, np.array([7.0])]) == pytest.approx(4)
    # Of 0, .2, .4, .6, 1, 2, 3, 10 the two lowest and the two highest are left out.
    assert iqm(TWO_GAMES) == pytest.approx((0.4 + 0.6 + 1 + 2) / 4)
    assert optimality_gap(TWO_GAMES) == pytest.approx((1 + 0.8 + 0.6 + 0.4) / 8)
    assert superhuman(TWO_GAMES) == 1
    assert profile(TWO_GAMES, np.array([-1.0, 0.4, 1.0, 10.0])).tolist() == [1, 5 / 8, 3 / 8, 0]


def test_probability_of_improvement_by_hand():
    ours, theirs = [np.array([1.0, 3.0]), np.array([5.0])], [np.array([2.0, 3.0]), np.array([6.0, 7.0, 8.0])]
    assert probability_of_improvement(ours, theirs) == pytest.approx((1.5 / 4 + 0) / 2)
    assert probability_of_improvement(theirs, ours) == pytest.approx(1 - 1.5 / 8)
    assert probability_of_improvement(ours, ours) == pytest.approx(0.5)


@pytest.mark.parametrize("statistic", [mean, middle, iqm, optimality_gap, superhuman])
def test_replicates_are_treated_one_by_one(statistic):
    random = np.random.default_rng(0)
    games = [random.normal(1, 1, (6, runs)) for runs in (3, 5, 4)]
    together = statistic(games)
    for i in range(6):
        assert together[i] == pytest.approx(statistic([runs[i] for runs in games]))


def test_the_bootstrap_draws_each_games_own_runs_and_obeys_its_generator():
    games = [np.array([1.0, 1.0, 1.0]), np.array([5.0, 5.0])]  # no run differs within its game: nothing is uncertain
    assert bootstrap(mean, games, replicates=100, random=np.random.default_rng(0)) == (3, 3, 3)
    one, two, other = (
        bootstrap(iqm, TWO_GAMES, replicates=500, random=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert one == two != other
    assert one.low < one.value < one.high


def test_the_bootstraps_interval_is_that_of_the_normal_approximation():
    runs = np.random.default_rng(3).normal(0, 1, 400)
    found = bootstrap(mean, [runs], replicates=5_000, random=np.random.default_rng(4))
    half = 1.96 * runs.std() / 20
    assert found.low == pytest.approx(runs.mean() - half, abs=0.01)
    assert found.high == pytest.approx(runs.mean() + half, abs=0.01)


def test_intervals_of_two_sets():
    random = np.random.default_rng(0)
    better, worse = [random.normal(m, 1, (10,)) for m in (2, 2)], [random.normal(m, 1, (10,)) for m in (0, 0)]
    chance = bootstrap(probability_of_improvement, better, worse, replicates=500, random=random)
    assert 0.7 < chance.low < chance.value < chance.high <= 1
