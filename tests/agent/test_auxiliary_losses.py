"""Representation losses against loops written from their papers, values and gradients, and tiny cases by hand."""

import math

import pytest
import torch

from spr.agent.auxiliary_losses import aux_loss, bilinear, contrastive, known, quadratic, register, spr, uniformity
from spr.common.errors import UserError

T, B, D = 3, 4, 5


def random(seed=0):
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randn(T, B, D, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randn(T, B, D, dtype=torch.float64, generator=generator)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=torch.float64)
    return predicted, target, mask


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def naive_cosine(x, y):
    return dot(x, y) / (dot(x, x).sqrt() * dot(y, y).sqrt())


def naive_spr(predicted, target, mask):
    return [-sum(mask[b, k] * naive_cosine(predicted[k, b], target[k, b]) for k in range(T)) for b in range(B)]


def naive_quadratic(predicted, target, mask):
    return [sum(mask[b, k] * dot(*(predicted[k, b] - target[k, b],) * 2) for k in range(T)) for b in range(B)]


def naive_info_nce(similarity):
    """Every state of the batch but the right one, of whatever time, is a negative."""

    def loss(predicted, target, mask):
        out = []
        for b in range(B):
            total = predicted.new_zeros(())
            for k in range(T):
                scores = [similarity(predicted[k, b], target[i, j]) for i in range(T) for j in range(B)]
                own = scores[k * B + b]
                total = total + mask[b, k] * (torch.stack([score.exp() for score in scores]).sum().log() - own)
            out.append(total)
        return out

    return loss


@pytest.mark.parametrize(
    ("loss", "naive"),
    [
        (spr, naive_spr),
        (quadratic, naive_quadratic),
        (contrastive, naive_info_nce(lambda x, y: naive_cosine(x, y) / 0.1)),
        (bilinear, naive_info_nce(dot)),
    ],
)
def test_values_and_gradients_equal_a_loop(loss, naive):
    predicted, target, mask = random()
    ours, theirs = loss(predicted, target, mask), torch.stack(naive(predicted, target, mask))
    torch.testing.assert_close(ours, theirs)
    weights = torch.tensor([0.3, 1.0, 0.7, 0.5], dtype=torch.float64)
    ours_grad, theirs_grad = (torch.autograd.grad((weights * x).sum(), predicted)[0] for x in (ours, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad)


def test_info_nce_by_hand():
    """Two samples: one guessed right, one exactly between; cosines 1 and 0, and 0.6 and 0.8."""
    predicted = torch.tensor([[[2.0, 0.0], [0.6, 0.8]]])
    target = torch.tensor([[[5.0, 0.0], [0.0, 0.1]]])
    loss = contrastive(predicted, target, torch.ones(2, 1))
    expected = [math.log(1 + math.exp(-10)), math.log(1 + math.exp(6 - 8))]
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_uniformity_equals_a_loop_with_its_gradient():
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    per_step = []
    for step in x:
        unit = [row / dot(row, row).sqrt() for row in step]
        pairs = [(-2 * dot(*(a - b,) * 2)).exp() for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
        per_step.append(torch.stack(pairs).mean().log())
    naive = torch.stack(per_step).mean()
    torch.testing.assert_close(uniformity(x), naive)
    ours, theirs = torch.autograd.grad(uniformity(x), x)[0], torch.autograd.grad(naive, x)[0]
    torch.testing.assert_close(ours, theirs)


def test_uniformity_by_hand():
    same, opposite = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]), torch.tensor([[[1.0, 0.0], [-2.0, 0.0]]])
    assert uniformity(same).item() == pytest.approx(0, abs=1e-6)
    assert uniformity(opposite).item() == pytest.approx(-8)  # at distance 2: -2 * 2^2


def test_names_are_given_once():
    assert aux_loss("spr") is spr
    with pytest.raises(UserError, match="named 'spr' is there already"):
        register("spr")(quadratic)
    assert "quadratic" in known()


def test_the_quadratic_loss_gains_by_making_everything_smaller_and_the_cosine_does_not():
    """Why one can collapse and the other can't: along the representation itself the cosine has no gradient."""
    predicted, target, mask = random()
    mask = torch.ones_like(mask)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    for loss, shrinks in ((quadratic, True), (spr, False)):
        (slope,) = torch.autograd.grad(loss(scale * predicted, scale * target, mask).sum(), scale)
        # The squared distance of what is scaled by s is s^2 times as large: its slope at 1 is twice its value.
        expected = 2 * quadratic(predicted, target, mask).sum() if shrinks else torch.zeros(())
        assert slope.item() == pytest.approx(expected.item(), abs=1e-12)
