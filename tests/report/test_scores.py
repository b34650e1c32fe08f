"""The score arithmetic reproduces every aggregate of the paper's Table 1 from its per-game scores."""

import pytest

from spr.common.errors import UserError
from spr.envs.atari100k import game_names, normalised, published_curves, reference_scores, reference_table
from spr.report.statistics import aggregate

# Table 1: mean and median human-normalised, mean and median DQN-normalised, games above human.
TABLE_1 = {
    "random": (0.000, 0.000, 0.000, 0.000, 0),
    "simple": (0.443, 0.144, 0.232, 0.118, 2),
    "der": (0.285, 0.161, 0.239, 0.142, 2),
    "otrainbow": (0.264, 0.204, 0.197, 0.103, 1),
    "curl": (0.381, 0.175, 0.325, 0.142, 2),
    "drq": (0.357, 0.268, 0.171, 0.131, 2),
    "spr_noaug": (0.463, 0.307, 0.336, 0.225, 5),
    # The paper prints 0.704, from unrounded scores; its own per-game table gives 0.703.
    "spr": (0.703, 0.415, 0.510, 0.361, 7),
}


@pytest.mark.parametrize("method", TABLE_1)
def test_aggregates_of_table_1(method):
    computed = aggregate(reference_scores(method))
    assert tuple(round(value, 3) for value in computed) == pytest.approx(TABLE_1[method], abs=0.0011)
    assert computed.superhuman == TABLE_1[method][-1]


def test_human_column():
    computed = aggregate(reference_scores("human"))
    assert round(computed.dqn_mean, 3) == 23.382
    assert round(computed.dqn_median, 3) == 0.994
    assert computed.human_mean == pytest.approx(1)


def test_normalised_by_hand():
    assert normalised("pong", -20.7) == 0
    assert normalised("pong", 14.6) == 1
    assert normalised("breakout", 16.1) == pytest.approx(0.5)
    assert normalised("catch", 5.0) is None


def test_there_are_26_games_and_incomplete_sets_are_refused():
    assert len(game_names()) == len(set(game_names())) == 26
    scores = dict(reference_scores("spr"))
    del scores["qbert"]
    with pytest.raises(UserError, match="qbert"):
        aggregate(scores)


def test_variants_of_the_paper_are_there():
    variants = {row["preset"]: row for row in reference_table("paper_variants")}
    assert variants["spr"]["human_median"] == "0.415"
    assert variants["rainbow_noaug"]["human_mean"] == "0.240"


@pytest.mark.parametrize(
    ("agent", "mean", "median"),
    [("spr_resets", 0.911, 0.514), ("sr_spr", 1.272, 0.685), ("bbf", 2.175, 0.755), ("bbf_rr8", 2.247, 0.917)],
)
def test_scores_by_game_of_the_agents_that_followed_give_their_published_aggregates(agent, mean, median):
    """Those of `sr_spr` and `bbf_rr8` are recalled, and off by rounding at most."""
    scores = {row["game"]: float(row[agent]) for row in reference_table("later_agents")}
    found = aggregate(scores)
    assert found.human_mean == pytest.approx(mean, abs=2e-3)
    assert found.human_median == pytest.approx(median, abs=2e-3)


def test_the_published_learning_curves_end_where_the_published_scores_are():
    ends = {row["game"]: float(row["jax_mean_49"]) for row in reference_table("spr_run_spread")}
    for game, points in published_curves().items():
        assert [step for step, _ in points] == list(range(10_000, 110_000, 10_000))
        assert points[-1][1] == pytest.approx(ends[game], rel=1e-3, abs=0.06)
