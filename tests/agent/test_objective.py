"""The losses against naive loops and hand-computed numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spr.agent.auxiliary_losses import unit
from spr.agent.distributions import cross_entropy, kl_divergence, project_distribution
from spr.agent.objective import huber, importance_weighted, spread
from spr.ops.functional import take_action


def naive_projection(atoms, probabilities, low, high, count):
    """Algorithm 1 of Bellemare et al. 2017, one atom at a time."""
    spacing = (high - low) / (count - 1)
    out = [0.0] * count
    for z, p in zip(atoms, probabilities, strict=True):
        b = (min(max(z, low), high) - low) / spacing
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:
            out[lower] += p
        else:
            out[lower] += p * (upper - b)
            out[upper] += p * (b - lower)
    return out


@settings(max_examples=100, deadline=None)
@given(st.floats(-15, 15), st.floats(0, 1), st.integers(0, 10**6))
def test_projection_equals_the_loop_and_keeps_mass(reward, discount, seed):
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    p = torch.rand(1, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    atoms = reward + discount * support[None]
    out = project_distribution(atoms, p, support)
    expected = naive_projection(atoms[0].tolist(), p[0].tolist(), -10, 10, 51)
    torch.testing.assert_close(out[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    assert out.sum().item() == pytest.approx(1)


def test_projection_keeps_mass_in_single_precision_too():
    """The distance of two rounded atoms would be short of 0.4 by a millionth, and mass would be lost with it."""
    support = torch.linspace(-10, 10, 51)
    between = (support[:-1] + support[1:])[:, None] / 2  # [50, 1]
    mass = project_distribution(between, torch.ones(50, 1), support).double().sum(-1)
    assert abs(mass.mean().item() - 1) < 2e-7


def test_projection_of_a_finished_episode_is_its_return():
    support = torch.linspace(-1, 1, 5)
    p = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2]])
    out = project_distribution(torch.full((1, 5), 0.125), p, support)
    torch.testing.assert_close(out, torch.tensor([[0, 0, 0.75, 0.25, 0]]))


def test_cross_entropy_and_kl_by_hand():
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # probabilities 1/4 and 3/4; 1/2 and 1/2
    torch.testing.assert_close(
        cross_entropy(target, logits), torch.tensor([-0.5 * (math.log(1 / 4) + math.log(3 / 4)), math.log(2)])
    )
    first = 0.5 * (math.log(2) + math.log(2 / 3))
    second = math.log(2) + 1e-6 * (math.log(1e-6) + math.log(2))  # the empty atom counts 1e-6
    torch.testing.assert_close(kl_divergence(target, logits), torch.tensor([first, second]))


def test_take_picks_each_rows_action():
    logits = torch.arange(2 * 3 * 2.0).view(2, 3, 2)
    assert take_action(logits, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]


def test_spread_tells_collapse_from_variety():
    same = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert spread(same).item() == pytest.approx(0, abs=1e-6)
    assert spread(opposite).item() == pytest.approx(1)
    assert unit(torch.tensor([[3.0, 4.0]])).tolist() == [pytest.approx([0.6, 0.8])]


def test_importance_weights_scale_every_loss():
    losses = {"rl": torch.tensor([1.0, 2.0]), "spr": torch.tensor([-1.0, 3.0])}
    total = importance_weighted(losses, {"rl": 1.0, "spr": 2.0}, torch.tensor([1.0, 0.5]))
    assert total.item() == pytest.approx((1 * (1 - 2) + 0.5 * (2 + 6)) / 2)


def test_a_loss_without_a_weight_is_an_error():
    with pytest.raises(KeyError, match="spr"):
        importance_weighted({"rl": torch.ones(2), "spr": torch.ones(2)}, {"rl": 1.0}, torch.ones(2))


def test_huber_by_hand():
    error = torch.tensor([0.0, 0.5, -0.5, 1.0, -3.0])
    torch.testing.assert_close(huber(error), torch.tensor([0.0, 0.125, 0.125, 0.5, 2.5]))
    torch.testing.assert_close(huber(error), torch.nn.functional.huber_loss(error, 0 * error, reduction="none"))
