"""Aggregates over runs and games against hand-computed numbers, slow loops, and what a bootstrap has to do."""

import tracemalloc

import numpy as np
import pytest

from spr.report.statistics import (
    bootstrap,
    iqm,
    mean,
    median,
    optimality_gap,
    probability_of_improvement,
    profile,
    superhuman,
)

TWO_GAMES = [np.array([0.0, 0.2, 0.4, 0.6]), np.array([1.0, 2.0, 3.0, 10.0])]


def test_aggregates_by_hand():
    assert mean(TWO_GAMES) == pytest.approx((0.3 + 4) / 2)
    assert median([*TWO_GAMES, np.array([7.0])]) == pytest.approx(4)
    # Of 0, .2, .4, .6, 1, 2, 3, 10 the two lowest and the two highest are left out.
    assert iqm(TWO_GAMES) == pytest.approx((0.4 + 0.6 + 1 + 2) / 4)
    assert optimality_gap(TWO_GAMES) == pytest.approx((1 + 0.8 + 0.6 + 0.4) / 8)
    assert superhuman(TWO_GAMES) == 1
    assert profile(TWO_GAMES, np.array([-1.0, 0.4, 1.0, 10.0])).tolist() == [1, 5 / 8, 3 / 8, 0]


def test_games_count_alike_however_many_runs_they_have():
    repeated = [np.repeat(TWO_GAMES[0], 3), TWO_GAMES[1]]  # as if each of its runs had been made three times
    for statistic in (mean, median, iqm, optimality_gap, superhuman):
        assert statistic(repeated) == pytest.approx(statistic(TWO_GAMES))
    thresholds = np.linspace(-1, 11, 49)
    assert profile(repeated, thresholds) == pytest.approx(profile(TWO_GAMES, thresholds))
    # Shares of 0, .2, .4, .6, 1, 3 in eighths: 1, 1, 1, 1, 2, 2; two are cut at either end.
    uneven = [np.array([0.0, 0.2, 0.4, 0.6]), np.array([1.0, 3.0])]
    assert iqm(uneven) == pytest.approx((0.4 + 0.6 + 2 * 1) / 4)
    # In twelfths: 3, 3, 2, 2, 2; three are cut at either end, so of .8 one of two is kept.
    assert iqm([np.array([0.1, 0.2]), np.array([0.7, 0.8, 0.9])]) == pytest.approx((3 * 0.2 + 2 * 0.7 + 0.8) / 6)
    assert optimality_gap(uneven) == pytest.approx(((1 + 0.8 + 0.6 + 0.4) / 4 + 0) / 2)
    assert profile(uneven, np.array([0.3])) == pytest.approx([(0.5 + 1) / 2])


def test_probability_of_improvement_by_hand():
    ours, theirs = [np.array([1.0, 3.0]), np.array([5.0])], [np.array([2.0, 3.0]), np.array([6.0, 7.0, 8.0])]
    assert probability_of_improvement(ours, theirs) == pytest.approx((1.5 / 4 + 0) / 2)
    assert probability_of_improvement(theirs, ours) == pytest.approx(1 - 1.5 / 8)
    assert probability_of_improvement(ours, ours) == pytest.approx(0.5)


@pytest.mark.parametrize("statistic", [mean, median, iqm, optimality_gap, superhuman])
def test_replicates_are_treated_one_by_one(statistic):
    random = np.random.default_rng(0)
    games = [random.normal(1, 1, (6, runs)) for runs in (3, 5, 4)]
    together = statistic(games)
    for i in range(6):
        assert together[i] == pytest.approx(statistic([runs[i] for runs in games]))


def test_the_bootstrap_draws_each_games_own_runs_and_obeys_its_generator():
    games = [np.array([1.0, 1.0, 1.0]), np.array([5.0, 5.0])]  # no run differs within its game: nothing is uncertain
    assert bootstrap(mean, games, draws=100, random=np.random.default_rng(0)) == (3, 3, 3)
    one, two, other = (bootstrap(iqm, TWO_GAMES, draws=500, random=np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert one.low < one.value < one.high


def test_the_bootstraps_interval_is_that_of_the_normal_approximation():
    runs = np.random.default_rng(3).normal(0, 1, 400)
    found = bootstrap(mean, [runs], draws=5_000, random=np.random.default_rng(4))
    half = 1.96 * runs.std() / 20
    assert found.low == pytest.approx(runs.mean() - half, abs=0.01)
    assert found.high == pytest.approx(runs.mean() + half, abs=0.01)


def test_intervals_of_two_sets():
    random = np.random.default_rng(0)
    better, worse = [random.normal(m, 1, (10,)) for m in (2, 2)], [random.normal(m, 1, (10,)) for m in (0, 0)]
    chance = bootstrap(probability_of_improvement, better, worse, draws=500, random=random)
    assert 0.7 < chance.low < chance.value < chance.high <= 1


def test_aggregates_are_those_of_rliable():
    library = pytest.importorskip("rliable.metrics")
    random = np.random.default_rng(5)
    for runs, games in ((10, 26), (4, 7), (6, 10)):  # four divide the number of all runs
        ours = [random.normal(0.5, 0.6, runs) for _ in range(games)]
        theirs = [random.normal(0.4, 0.6, runs + 2).round(1) for _ in range(games)]
        rows = np.stack(ours, 1)  # theirs is [runs, games]
        assert iqm(ours) == pytest.approx(library.aggregate_iqm(rows))
        assert mean(ours) == pytest.approx(library.aggregate_mean(rows))
        assert median(ours) == pytest.approx(library.aggregate_median(rows))
        assert optimality_gap(ours) == pytest.approx(library.aggregate_optimality_gap(rows))
        expected = library.probability_of_improvement(rows, np.stack(theirs, 1))
        assert probability_of_improvement(ours, theirs) == pytest.approx(expected)


@pytest.mark.slow
def test_intervals_and_profiles_are_those_of_rliable():
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    random = np.random.default_rng(6)
    ours = [random.normal(game / 20, 0.4, 10) for game in range(26)]
    scores = {"ours": np.stack(ours, 1)}
    _, bounds = library.get_interval_estimates(scores, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=4_000)
    found = bootstrap(iqm, ours, draws=20_000, random=random)
    width = found.high - found.low
    assert found.low == pytest.approx(bounds["ours"][0, 0], abs=0.05 * width)
    assert found.high == pytest.approx(bounds["ours"][1, 0], abs=0.05 * width)
    thresholds = np.linspace(-0.5, 2, 26)
    expected, _ = library.create_performance_profile(scores, thresholds, reps=2)
    assert profile(ours, thresholds) == pytest.approx(expected["ours"])


def test_the_bootstrap_of_a_whole_benchmark_stays_small():
    """In pieces: 50,000 replicates of 26 x 10 runs at once would be over 100 MB for the draws alone."""
    random = np.random.default_rng(0)
    games = [random.normal(0.5, 0.5, 10) for _ in range(26)]
    tracemalloc.start()
    bootstrap(iqm, games, draws=50_000, random=random)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 60e6
