"""The networks' parts against hand-computed numbers and the formulas of their papers."""

import math

import pytest
import torch
from torch.utils._pytree import tree_map

from spr.agent.encoders import make_encoder
from spr.agent.networks import GROUPS, Group, Networks
from spr.agent.parameter_layout import Layout
from spr.agent.q_head import HeadNoise, LayerNoise, NoisyLinear, QHead, noise_shapes
from spr.agent.transition_model import TransitionModel
from spr.common.errors import UserError
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.ops.functional import linear, renormalise, scale_gradient, shift_and_add


def small(preset="spr", **network):
    return preset_config(preset).override({f"network.{name}": value for name, value in network.items()})


def test_renormalise_by_hand():
    x = torch.tensor([[2.0, 4.0, 3.0], [7.0, 7.0, 7.0], [0.0, 5e-6, 0.0]])
    expected = torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.5, 0.0]])  # the last: below the floor of 1e-5
    torch.testing.assert_close(renormalise(x), expected)


def test_renormalise_works_in_float32_for_half_precision_inputs():
    assert renormalise(torch.rand(2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_scale_gradient_changes_only_the_gradient():
    x = torch.tensor([3.0, -1.0], requires_grad=True)
    y = scale_gradient(x, 0.25)
    torch.testing.assert_close(y, x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 0.25))


def explicit(layer, x, f_in, f_out):
    weight, bias = layer.weight + layer.weight_sigma * torch.outer(f_out, f_in), layer.bias + layer.bias_sigma * f_out
    return torch.nn.functional.linear(x, weight, bias)


def test_noisy_linear_equals_the_explicit_noisy_weight():
    layer = NoisyLinear(5, 3, sigma=0.5)
    noise = LayerNoise(torch.randn(2, 1, 5), torch.randn(2, 3))  # two draws
    x = torch.randn(2, 4, 5)
    out = layer(x, noise)
    for draw in range(2):
        f_in, f_out = (e[draw].sign() * e[draw].abs().sqrt() for e in noise)
        torch.testing.assert_close(out[draw], explicit(layer, x[draw], f_in[0], f_out))
    torch.testing.assert_close(layer.mean(x[0]), torch.nn.functional.linear(x[0], layer.weight, layer.bias))


def test_streams_without_a_noisy_weight_equal_explicit_layers_side_by_side():
    layer = NoisyLinear(5, 6, sigma=0.5, streams=2)
    noise = LayerNoise(torch.randn(3, 2, 5), torch.randn(3, 6))  # three draws
    x = torch.randn(4, 5)
    out = layer.factorised(x, noise)
    for draw in range(3):
        f_in, f_out = (e[draw].sign() * e[draw].abs().sqrt() for e in noise)
        value, advantage = explicit(layer, x, f_in[0], f_out), explicit(layer, x, f_in[1], f_out)
        torch.testing.assert_close(out[draw], torch.cat([value[:, :3], advantage[:, 3:]], 1))


def test_noisy_linear_initialisation():
    layer = NoisyLinear(100, 25, sigma=0.5)
    assert layer.weight.abs().max() <= 0.1
    assert layer.weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.05)
    assert layer.weight_sigma.unique().tolist() == pytest.approx([0.05])
    assert layer.bias_sigma.unique().tolist() == pytest.approx([0.1])
    two = NoisyLinear(100, 50, sigma=0.5, streams=2)  # two layers of 25 side by side
    assert two.bias_sigma.unique().tolist() == pytest.approx([0.1])


def test_linear_is_linear():
    x, w, b = torch.randn(4, 7), torch.randn(3, 7), torch.randn(3)
    torch.testing.assert_close(linear(x, w, b), torch.nn.functional.linear(x, w, b))


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride", "padding", "side"),
    [
        (4, 32, 8, 4, 0, 84),
        (32, 64, 4, 2, 0, 20),
        (64, 64, 3, 1, 0, 9),
        (70, 64, 3, 1, 1, 7),
        (4, 32, 5, 5, 0, 84),
        (32, 64, 5, 5, 0, 16),
    ],
)
def test_a_convolution_by_shifting_and_adding_equals_the_librarys(inputs, outputs, kernel, stride, padding, side):
    layer = torch.nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False, dtype=torch.float64)
    x = torch.randn(3, inputs, side, side, dtype=torch.float64, requires_grad=True)
    expected = layer(x).permute(0, 2, 3, 1)
    actual = shift_and_add(x.permute(0, 2, 3, 1), layer.weight, stride, padding)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    wanted = [x, layer.weight]
    for ours, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_dueling_head_adds_value_to_centred_advantages():
    head = QHead(small(hidden=8, atoms=5), num_actions=3)
    z = torch.rand(2, 3136)
    value = head.value.mean(torch.relu(head.project(z)[:, :8]))
    torch.testing.assert_close(head(z, ())[0].mean(1), value)


def test_projection_has_no_noise_no_relu_and_shares_the_heads_weights():
    head = QHead(small(hidden=8), num_actions=3)
    z = torch.rand(4, 3136)
    y = head.project(z)
    assert y.shape == (4, 16)
    assert (y < 0).any()
    torch.testing.assert_close(y, torch.nn.functional.linear(z, head.hidden.weight, head.hidden.bias))


def test_the_head_without_noise_is_the_head_under_zero_noise():
    head = QHead(small(hidden=8, atoms=5), num_actions=3)
    z = torch.rand(4, 3136)
    zero = HeadNoise(*(LayerNoise(torch.zeros(1, s, i), torch.zeros(1, o)) for s, i, o in sizes(8, 5, 3)))
    torch.testing.assert_close(head(z, zero), head(z, ()))


def sizes(hidden, atoms, actions):
    return [(2, 3136, 2 * hidden), (1, hidden, atoms), (1, hidden, actions * atoms)]


def test_noise_changes_q_values_and_absence_of_noise_does_not():
    networks = Networks(small(hidden=8), num_actions=3)
    noise = HeadNoise(*(LayerNoise(torch.randn(s, i), torch.randn(o)) for s, i, o in sizes(8, 51, 3)))
    obs = torch.rand(2, 4, 84, 84)
    assert torch.equal(networks(obs), networks(obs))
    assert not torch.allclose(networks(obs), networks(obs, noise))


def test_latents_lie_between_zero_and_one():
    z = make_encoder("standard", (84, 84, 4))(torch.rand(3, 4, 84, 84))
    assert z.shape == (3, 7, 7, 64)
    assert torch.equal(z.flatten(1).amin(1), torch.zeros(3))
    torch.testing.assert_close(z.flatten(1).amax(1), torch.ones(3))


def test_dropout_masks_silence_activations():
    encoder = make_encoder("standard", (84, 84, 4))
    keep = tuple(torch.zeros(2, *shape) for shape in ((20, 20, 32), (9, 9, 64), (7, 7, 64)))
    assert encoder(torch.rand(2, 4, 84, 84), keep).abs().sum() == 0


def test_transition_model_sees_the_action_and_normalises_by_the_batch():
    model = TransitionModel((7, 7, 64), 4)
    z = torch.rand(6, 7, 7, 64)
    actions = torch.tensor([0, 1, 2, 3, 0, 1])
    out = model(z, model.action_bias(actions)[None])
    assert out.shape == (1, *z.shape)
    assert not torch.allclose(out, model(z, model.action_bias(actions.roll(1))[None]))
    # Batch statistics: a sample's prediction depends on its companions.
    assert not torch.allclose(out[:, :3], model(z[:3], model.action_bias(actions[:3])[None]))
    # Steps follow each other.
    both = model(z, torch.stack([model.action_bias(actions), model.action_bias(actions.roll(1))]))
    torch.testing.assert_close(both[1:], model(both[0], model.action_bias(actions.roll(1))[None]))


def test_the_models_batch_norm_is_the_librarys_even_far_from_zero():
    """A variance as a difference of means loses digits where the mean is large: here 25 times the spread."""
    torch.manual_seed(0)
    model = TransitionModel((7, 7, 64), 4)
    with torch.no_grad():
        model.conv1.bias += 5
        model.bn.weight.uniform_(0.5, 2)
        model.bn.bias.normal_()
    z, actions = torch.rand(32, 7, 7, 64), torch.randint(4, (32,))
    seen = {}
    for name in ("ours", "library"):
        start = z.clone().requires_grad_()
        if name == "ours":
            out = model(start, model.action_bias(actions)[None])[0]
        else:
            planes = torch.nn.functional.one_hot(actions, 4).float()[:, :, None, None].expand(-1, -1, 7, 7)
            stacked = torch.cat([start.permute(0, 3, 1, 2), planes], 1)
            x = torch.relu(torch.nn.functional.conv2d(stacked, model.conv1.weight, model.conv1.bias, padding=1))
            assert x.mean() > 25 * x.std((0, 2, 3)).mean()
            x = torch.nn.functional.batch_norm(x, None, None, model.bn.weight, model.bn.bias, training=True)
            x = torch.relu(torch.nn.functional.conv2d(x, model.conv2.weight, model.conv2.bias, padding=1))
            out = renormalise(x.permute(0, 2, 3, 1))
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        seen[name] = out.detach(), torch.autograd.grad((out * weights).sum(), [start, model.conv1.weight])
    torch.testing.assert_close(seen["ours"][0], seen["library"][0], rtol=1e-3, atol=1e-4)
    for ours, librarys in zip(seen["ours"][1], seen["library"][1], strict=True):
        assert (ours - librarys).norm() < 1e-3 * librarys.norm()


def test_action_planes_are_convolved_as_if_they_were_there():
    model = TransitionModel((7, 7, 64), 5).double()
    action = torch.tensor([0, 4, 2])
    planes = torch.zeros(3, 5, 7, 7, dtype=torch.float64)
    for row, a in enumerate(action.tolist()):
        planes[row, a] = 1
    weight = model.conv1.weight[:, 64:]
    expected = torch.nn.functional.conv2d(planes, weight, padding=1)
    torch.testing.assert_close(model.action_bias(action), expected.permute(0, 2, 3, 1) + model.conv1.bias)


def test_parameter_count_at_six_actions():
    count = sum(p.numel() for p in Networks(Config(), 6).parameters())
    assert count == pytest.approx(3.8e6, rel=0.02)


def test_the_data_efficient_encoder_has_two_convolutions():
    encoder = make_encoder("data_efficient", (84, 84, 4))
    assert {name: tuple(p.shape) for name, p in encoder.named_parameters() if "weight" in name} == {
        "conv1.weight": (32, 4, 5, 5),
        "conv2.weight": (64, 32, 5, 5),
    }
    assert encoder(torch.rand(2, 4, 84, 84)).shape == (2, 3, 3, 64)


def test_a_head_without_dueling_or_noise_or_atoms_is_a_plain_one():
    head = QHead(small("drq", dueling=False, hidden=8), num_actions=3)
    assert {name for name, _ in head.named_parameters()} == {
        *("hidden.weight", "hidden.bias", "advantage.weight", "advantage.bias")
    }
    z = torch.rand(2, 3136)
    hidden = torch.relu(torch.nn.functional.linear(z, head.hidden.weight, head.hidden.bias))
    expected = torch.nn.functional.linear(hidden, head.advantage.weight, head.advantage.bias)
    torch.testing.assert_close(head(z, ()), expected[None, :, :, None])


def test_noise_without_dueling():
    config = small(dueling=False, hidden=8)
    head, sizes = QHead(config, 3), noise_shapes(config, 3)
    noise = tree_map(lambda size: torch.randn(2, *size.shape), sizes)
    out = head(torch.rand(4, 3136), noise)
    assert out.shape == (2, 4, 3, 51)
    assert not torch.allclose(out[0], out[1])


def test_curls_projection_is_normalised_and_its_predictor_a_bilinear_form():
    networks = Networks(preset_config("curl"), 4)
    y = networks.project(torch.rand(5, 576))
    assert y.shape == (5, 128)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(5), atol=1e-3, rtol=0)
    torch.testing.assert_close(networks.predict(y), y @ networks.predictor.weight.T)


def test_every_parameter_says_how_it_is_treated():
    networks = Networks(preset_config("spr"), 4)
    groups = networks.groups()
    assert list(groups) == [name for name, _ in networks.named_parameters()]
    assert set(groups.values()) == set(GROUPS)
    assert all(groups[name].acts == name.startswith(("encoder.", "head.")) for name in groups)
    mean = {"head.hidden.weight", "head.hidden.bias", *(name for name in groups if name.startswith("encoder."))}
    assert {name for name, group in groups.items() if group.in_ema} == mean
    assert {name for name, group in groups.items() if group.clip is None} == {"predictor.weight", "predictor.bias"}


def test_a_part_without_a_group_is_refused_by_name():
    networks = Networks(preset_config("spr"), 4)
    networks.reward = torch.nn.Linear(3, 1)
    with pytest.raises(UserError, match=r"'reward.weight' is in no group"):
        networks.groups()


def test_layouts_refuse_what_they_can_not_place():
    shapes = {"a": torch.Size([3]), "b": torch.Size([2])}
    with pytest.raises(UserError, match="'b' is in the group 'mine'"):
        Layout(shapes, {"a": GROUPS[0], "b": Group("mine")})
    layout = Layout(shapes, {"a": GROUPS[0], "b": GROUPS[-1]})
    assert layout.columns(lambda _: False) == slice(0, 0)
    with pytest.raises(AssertionError, match="the groups out, predictor lie apart"):
        Layout(shapes | {"c": torch.Size([5])}, {"a": GROUPS[0], "b": GROUPS[-1], "c": GROUPS[2]}).columns(
            lambda group: group.name in ("out", "predictor")
        )


def test_an_encoder_knows_its_shapes_and_refuses_what_is_too_small():
    encoder = make_encoder("standard", (64, 80, 9))
    assert encoder.shapes == [(15, 19, 32), (6, 8, 64), (4, 6, 64)]
    assert encoder(torch.rand(2, 9, 64, 80)).shape == (2, 4, 6, 64)
    with pytest.raises(UserError, match="30x84 pixels are too small for this encoder: 36 is the least"):
        make_encoder("standard", (30, 84, 4))
