"""What changes over a run, against values computed by hand and those of BBF's released schedule."""

import pytest
import torch
from conftest import CPU, World, small

from spr.agent.schedules import fill, gamma_at, learning_rate_at, n_step_at, new_scalars
from spr.common.errors import UserError
from spr.config.config import Config

BBF = {
    "replay.n_step": 10,
    "replay.n_step_end": 3,
    "replay.gamma": 0.97,
    "replay.gamma_end": 0.997,
    "schedule.anneal_updates": 10_000,
}


def test_n_falls_where_bbfs_does():
    config = Config().override(BBF)
    lengths = [n_step_at(config, c) for c in range(12_000)]
    falls = {lengths[c]: c for c in range(1, 12_000) if lengths[c] < lengths[c - 1]}
    assert lengths[0] == 10
    # The first whole update at which 10 * 0.3^u is below k + 1/2: it crosses at 426.03, 1349.85, 2389.4, 3578.1 ...
    assert falls == {9: 427, 8: 1350, 7: 2390, 6: 3579, 5: 4966, 4: 6633, 3: 8720}
    assert lengths[-1] == 3


def test_gamma_rises_as_bbfs_does():
    config = Config().override(BBF)
    values = [gamma_at(config, c) for c in (0, 2_500, 5_000, 7_500, 10_000, 40_000)]
    assert values == pytest.approx([0.970, 0.983130, 0.990513, 0.994665, 0.997, 0.997], abs=1e-6)


def test_the_learning_rate_changes_in_equal_ratios():
    config = Config().override({"learner.learning_rate_end": 1e-6, "schedule.anneal_updates": 100})
    assert [learning_rate_at(config, c) for c in (0, 50, 100, 999)] == pytest.approx([1e-4, 1e-5, 1e-6, 1e-6])


def test_the_scalars_are_those_of_each_update():
    config = Config().override(BBF | {"learner.learning_rate_end": 1e-5})
    rates = new_scalars(config, CPU)
    start = tuple(rate.item() for rate in rates)
    assert start == pytest.approx((0.4, 10, 0.97, 1e-4))
    fill(rates, config, 2_000 + 213, 0)  # after 426 updates
    assert rates.n_step.item() == 10
    fill(rates, config, 2_000 + 213, 1)
    assert rates.n_step.item() == 9
    fill(rates, config, 2_000 + 2_500, 0)
    assert tuple(rate.item() for rate in rates) == pytest.approx((0.4 + 0.6 * 2_500 / 98_000, 5, 0.990513, 10**-4.5))


def test_what_stays_is_no_scalar():
    """Else the compiled update of methods without schedules would be another one."""
    rates = new_scalars(Config(), CPU)
    assert rates.n_step is rates.gamma is rates.learning_rate is None
    for end in ({"replay.n_step_end": 3}, {"replay.gamma_end": 0.997}):
        rates = new_scalars(Config().override(end | {"schedule.anneal_updates": 10}), CPU)
        assert (rates.n_step.item(), rates.gamma.item()) == (10, pytest.approx(0.99))


def test_a_learning_rate_on_the_device_is_obeyed():
    plain = World(small(**{"learner.learning_rate": 3e-4}), [0])
    changing = World(small(**{"learner.learning_rate_end": 1e-6, "schedule.anneal_updates": 10}), [0])
    changing.rates.learning_rate.fill_(3e-4)
    for world in (plain, changing):
        world.update(3)
    torch.testing.assert_close(changing.state.weights, plain.state.weights, rtol=1e-5, atol=1e-7)


def test_learning_goes_on_while_n_and_gamma_change():
    anneal = {"replay.n_step_end": 1, "replay.gamma_end": 0.997, "schedule.anneal_updates": 4}
    world = World(small(**anneal), [0, 1])
    config, seen = world.learner.config, []
    for i in range(4):
        fill(world.rates, config, 60 + i // 2, i % 2)
        world.update()
        seen.append(world.rates.n_step.item())
    assert seen == [4, 3, 2, 1]
    assert world.state.weights.isfinite().all()
    assert not world.state.diverged.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay.n_step_end": 3}, "replay.n_step_end needs updates to get there: set schedule.anneal_updates"),
        ({"replay.gamma_end": 0.997}, "replay.gamma_end needs updates to get there"),
        ({"learner.learning_rate_end": 1e-5}, "learner.learning_rate_end needs updates to get there"),
        (BBF | {"replay.ends": "first"}, "replay.ends=first is for one length of return"),
        ({"replay.bootstrap_at": "n-1", "replay.n_step": 1}, "bootstrap_at=n-1 needs returns of two steps or more"),
        ({"replay.bootstrap_at": "n-1", "replay.ends": "first"}, "and replay.ends=all"),
        ({"replay.bootstrap_at": "n-2"}, "replay.bootstrap_at"),
        (BBF | {"replay.gamma_end": 1.0}, "must stay below 1"),
        (BBF | {"replay.gamma": 1.0}, "must stay below 1"),
        (
            BBF | {"replay.n_step": 3, "replay.n_step_end": 10, "replay.capacity": 45},
            "schedule.learning_starts and replay.capacity must be at least 46 to fill a first batch",
        ),
    ],
)
def test_schedules_that_can_not_be_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        Config().override(changes)
    assert "\n" not in str(caught.value)
