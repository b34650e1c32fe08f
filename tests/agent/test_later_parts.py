"""The parts that SPR's successors changed, each by itself: against plain formulas, slow loops and published counts."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ACTIONS, World, as_options, in_rows, small
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

import spr
from spr.agent.auxiliary_losses import check_names
from spr.agent.encoders import encoder_activations, encoder_shapes, make_encoder
from spr.agent.networks import Networks, networks_without_weights
from spr.agent.q_head import QHead, noise_shapes
from spr.agent.transition_model import TransitionModel
from spr.cli import main
from spr.common.errors import UserError
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.envs.registry import make
from spr.ops import each_agent, functional, impala_ops, kernels
from spr.training import snapshot
from spr.training.fleet import assemble, fleet_memory
from spr.training.loop import Training

CPU = torch.device("cpu")
BBF = {
    "network.encoder": "impala",
    "network.width": 4,
    "network.hidden": 2048,
    "network.shared_hidden": True,
    "network.noisy": False,
    "network.initialisation": "xavier",
    "network.batch_norm": False,
}
# The same in small, for a CPU: an odd and an even side, so that both kinds of padding are there.
SMALL_BBF = BBF | {"network.width": 1, "network.hidden": 16, "observation.height": 20, "observation.width": 22}
SMALL_SR_SPR = BBF | {
    "network.encoder": "standard",
    "network.width": 1,
    "network.padding": "same",
    "network.hidden": 16,
    "observation.height": 20,
    "observation.width": 22,
}


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def windows(length, kernel, stride):
    """By TensorFlow's documentation: where each window of a side begins, with an odd pixel of padding at the end."""
    outputs = math.ceil(length / stride)
    added = max(kernel - (length % stride or stride), 0)
    return [i * stride - added // 2 for i in range(outputs)]


def slow_convolution(x, weight, stride):
    kernel = weight.shape[-1]
    rows, columns = (windows(side, kernel, stride) for side in x.shape[1:3])
    out = np.zeros((len(x), len(rows), len(columns), len(weight)))
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            for a in range(kernel):
                for b in range(kernel):
                    if 0 <= top + a < x.shape[1] and 0 <= left + b < x.shape[2]:
                        out[:, i, j] += x[:, top + a, left + b] @ weight[:, :, a, b].T
    return out


def slow_max_pool(x):
    rows, columns = (windows(side, 3, 2) for side in x.shape[1:3])
    out = np.zeros((len(x), len(rows), len(columns), x.shape[-1]))
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            seen = x[:, max(top, 0) : top + 3, max(left, 0) : left + 3]
            out[:, i, j] = seen.max((1, 2))
    return out


# ---- padding and pooling


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "expected"),
    [
        (84, 8, 4, (2, 2)),
        (21, 4, 2, (1, 2)),
        (11, 3, 1, (1, 1)),
        (84, 3, 2, (0, 1)),
        (42, 3, 2, (0, 1)),
        (21, 3, 2, (1, 1)),
    ],
)
def test_same_padding_is_that_of_the_released_networks(side, kernel, stride, expected):
    assert functional.same_padding(side, kernel, stride) == expected


@pytest.mark.parametrize(("height", "width"), [(84, 42), (21, 11), (7, 8), (1, 2), (2, 1), (3, 5)])
def test_the_pool_is_that_of_a_slow_loop(height, width):
    x = numbers(2, height, width, 3) - 5  # all below 0: a border of zeros would be seen
    np.testing.assert_array_equal(functional.max_pool_same(x).numpy(), slow_max_pool(x.numpy()))


@pytest.mark.parametrize(
    ("kernel", "stride", "height", "width"), [(8, 4, 84, 20), (4, 2, 21, 11), (3, 1, 11, 4), (5, 5, 16, 7)]
)
@pytest.mark.parametrize("way", ["a CPU's", "a GPU's"])
def test_a_padded_convolution_is_that_of_a_slow_loop(kernel, stride, height, width, way):
    x, weight = numbers(2, height, width, 3), numbers(5, 3, kernel, kernel, seed=1)
    convolve = functional.convolve if way == "a CPU's" else lambda *args: functional.shift_and_add(*args, 0)
    made = convolve(functional.pad_same(x, kernel, stride), weight, stride)
    np.testing.assert_allclose(made.numpy(), slow_convolution(x.numpy(), weight.numpy(), stride), atol=1e-12)


def test_the_padded_standard_encoder_has_the_shapes_of_the_released_one():
    assert encoder_shapes("standard", (84, 84, 4), padding="same") == ((21, 21, 32), (11, 11, 64), (11, 11, 64))
    encoder = make_encoder("standard", (20, 22, 4), padding="same").double()
    x = numbers(2, 4, 20, 22)
    expected = x.permute(0, 2, 3, 1).numpy()
    for i, stride in enumerate((4, 2, 1), start=1):
        conv = getattr(encoder, f"conv{i}")
        expected = slow_convolution(expected, conv.weight.detach().numpy(), stride) + conv.bias.detach().numpy()
        expected = np.maximum(expected, 0)
    torch.testing.assert_close(encoder(x), functional.renormalise(torch.from_numpy(expected)))


# ---- Impala


def test_impala_is_the_plain_formula():
    encoder = make_encoder("impala", (20, 22, 3)).double()
    x = numbers(2, 3, 20, 22)

    def convolved(x, conv):
        return slow_convolution(x, conv.weight.detach().numpy(), 1) + conv.bias.detach().numpy()

    expected = x.permute(0, 2, 3, 1).numpy()
    for stage in (encoder.stage1, encoder.stage2, encoder.stage3):
        expected = slow_max_pool(convolved(expected, stage.conv))
        for one, two in ((stage.block1_conv1, stage.block1_conv2), (stage.block2_conv1, stage.block2_conv2)):
            expected = expected + convolved(np.maximum(convolved(np.maximum(expected, 0), one), 0), two)
    torch.testing.assert_close(encoder(x), functional.renormalise(torch.from_numpy(np.maximum(expected, 0))))


def test_impala_halves_the_sides_three_times_and_keeps_as_many_numbers_as_published():
    assert encoder_shapes("impala", (84, 84, 4), width=4) == ((42, 42, 64), (21, 21, 128), (11, 11, 128))
    assert encoder_activations("impala", (84, 84, 4), width=4) == pytest.approx(1.66e6, rel=0.01)
    assert encoder_shapes("impala", (1, 5, 4)) == ((1, 3, 16), (1, 2, 32), (1, 1, 32))


def test_impala_in_half_precision_rounds_products_only(monkeypatch):
    """As a GPU does it: weights in bf16, biases and latents in float32; here a CPU's bf16 convolutions."""
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(each_agent, "takes_turns", lambda _: False)
    monkeypatch.setattr(impala_ops, "_FILLS_A_GPU", 0)
    torch.manual_seed(0)
    encoder, x = make_encoder("impala", (20, 22, 4)), numbers(3, 4, 20, 22).float()
    halves = {name: p.bfloat16() if p.dim() > 1 else p for name, p in encoder.named_parameters()}
    z, exact = functional_call(encoder, halves, (x.bfloat16(),)), encoder(x)
    assert z.dtype == torch.float32
    assert 0 < (z - exact).abs().max() < 0.05


def test_dropout_silences_impala():
    encoder = make_encoder("impala", (20, 22, 4))
    masks = tuple(torch.zeros(2, *shape) for shape in encoder.shapes)
    assert encoder(torch.rand(2, 4, 20, 22), masks).abs().sum() == 0


def test_bbf_has_as_many_parameters_as_published():
    networks = networks_without_weights(Config().override(BBF), 9, CPU)
    assert math.prod(networks.encoder.shapes[-1]) == 15_488
    head = networks.head
    parts = {
        "encoder": [networks.encoder],
        "transition": [networks.transition],
        "projection": [head.hidden],
        "predictor": [networks.predictor],
        "head": [head.value, head.advantage],
    }
    counts = {name: sum(p.numel() for part in some for p in part.parameters()) for name, some in parts.items()}
    published = {"encoder": 1.55e6, "transition": 0.31e6, "projection": 31.7e6, "predictor": 4.2e6, "head": 1.04e6}
    assert counts == pytest.approx(published, rel=0.02)
    total = sum(p.numel() for p in networks.parameters())
    assert total == sum(counts.values()) == pytest.approx(38.8e6, rel=0.002)


# ---- convolutions of wide networks


@pytest.mark.parametrize("agents", [1, 3])
def test_a_fleets_wide_convolutions_and_their_gradients_are_the_plain_ones(monkeypatch, agents):
    """By the library for one agent after the other, or by products; here on a CPU, as a GPU would."""
    x, weight = numbers(agents, 4, 5, 6, 7), numbers(agents, 3, 7, 3, 3, seed=1)
    g = numbers(agents, 4, 5, 6, 3, seed=2)

    def made():
        given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = vmap(impala_ops.convolve_same)(*given)
        return out.detach(), *torch.autograd.grad((out * g).sum(), given)

    plain = made()
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(each_agent, "takes_turns", lambda _: False)
    monkeypatch.setattr(impala_ops, "_FILLS_A_GPU", 0)
    library = made()
    monkeypatch.setattr(impala_ops, "_FILLS_A_GPU", math.inf)
    products = made()
    for mine, other, expected in zip(library, products, plain, strict=True):
        torch.testing.assert_close(mine, expected)
        torch.testing.assert_close(other, expected)


def test_only_what_fills_a_gpu_goes_to_the_library_agent_by_agent(monkeypatch):
    """Of batches of 32: BBF's convolutions but the first, which is one with its pool; not those of SPR's size."""
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    went = []
    monkeypatch.setattr(
        impala_ops,
        "_convolve_same",
        lambda x, w: went.append("library") or x[..., :1].expand(*x.shape[:-1], w.shape[1]),
    )
    monkeypatch.setattr(
        functional,
        "shift_and_add",
        lambda x, w, *_: went.append("products") or x[..., :1].expand(*x.shape[:-1], w.shape[0]),
    )
    with torch.device("meta"):
        make_encoder("impala", (84, 84, 4), width=4)(torch.empty(32, 4, 84, 84))
        assert went == 14 * ["library"]
        for channels, way in ((128, "library"), (64, "products")):
            model = TransitionModel((11, 11, channels), 4, batch_norm=False)
            model(torch.empty(32, 11, 11, channels), torch.empty(1, 32, 11, 11, channels))
            assert went[-2:] == [way] * 2


# ---- transition model


def test_a_transition_model_without_batch_norm_is_two_convolutions():
    model = TransitionModel((5, 6, 8), 3, batch_norm=False).double()
    assert {name for name, _ in model.named_parameters()} == {
        *("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias")
    }
    z, actions = numbers(4, 5, 6, 8).abs(), torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    made = model(z, torch.stack([model.action_bias(some) for some in actions]))
    for step, some in enumerate(actions):
        planes = F.one_hot(some, 3).double()[:, :, None, None].expand(-1, -1, 5, 6)
        x = torch.cat([z.permute(0, 3, 1, 2), planes], 1)
        for conv in (model.conv1, model.conv2):
            x = torch.relu(F.conv2d(x, conv.weight, conv.bias, padding=1))
        z = functional.renormalise(x.permute(0, 2, 3, 1))
        torch.testing.assert_close(made[step], z)


# ---- Q-head


@pytest.mark.parametrize("action_mask", [None, torch.tensor([True, True, False])])
def test_value_and_advantage_share_a_hidden_layer(action_mask):
    head = QHead(small(**SMALL_BBF), 3).double()
    z = numbers(4, math.prod(head.hidden.weight.shape[1:]))
    before = F.linear(z, head.hidden.weight, head.hidden.bias)
    assert before.shape == (4, 16)
    torch.testing.assert_close(head.project(z), before)
    value = F.linear(before.relu(), head.value.weight, head.value.bias)
    advantage = F.linear(before.relu(), head.advantage.weight, head.advantage.bias).view(4, 3, 51)
    own = advantage if action_mask is None else advantage[:, action_mask]
    expected = value[:, None] + advantage - own.mean(1, keepdim=True)
    torch.testing.assert_close(head(z, (), action_mask)[0], expected)


def test_a_noisy_shared_hidden_layer_is_one_draw_for_both():
    config = small(**SMALL_BBF | {"network.noisy": True})
    head, sizes = QHead(config, 3).double(), noise_shapes(config, 3)
    assert sizes.hidden.input.shape == (1, head.hidden.weight.shape[1])
    assert sizes.hidden.output.shape == (16,)
    noise = tree_map(lambda size: numbers(2, *size.shape), sizes)
    z = numbers(4, head.hidden.weight.shape[1], seed=1)
    for draw, out in enumerate(head(z, noise)):

        def noised(layer, x, e, draw=draw):
            f_in, f_out = (part[draw].sign() * part[draw].abs().sqrt() for part in e)
            weight = layer.weight + layer.weight_sigma * torch.outer(f_out, f_in[0])
            return F.linear(x, weight, layer.bias + layer.bias_sigma * f_out)

        hidden = noised(head.hidden, z, noise.hidden).relu()
        advantage = noised(head.advantage, hidden, noise.advantage).view(4, 3, 51)
        value = noised(head.value, hidden, noise.value)
        torch.testing.assert_close(out, value[:, None] + advantage - advantage.mean(1, keepdim=True))


def test_only_two_streams_scale_the_gradient_into_the_encoder():
    assert QHead(small(), 3).gradient_scale == 1 / math.sqrt(2)
    assert QHead(small(**{"network.shared_hidden": True}), 3).gradient_scale == 1
    assert QHead(small("otrainbow"), 3).gradient_scale == 1
    x = torch.rand(3)
    assert functional.scale_gradient(x, 1.0) is x


def test_a_shared_hidden_layer_is_predicted_at_its_own_width():
    networks = Networks(small(**{"network.shared_hidden": True}), 3)
    assert networks.predictor.weight.shape == (16, 16)
    assert networks.groups()["head.value.weight"] == networks.groups()["head.advantage.weight"]
    y = networks.project(torch.rand(2, networks.head.hidden.weight.shape[1]))
    assert networks.predict(y).shape == (2, 16)


# ---- initialisation


@pytest.mark.parametrize("changes", [BBF, {"network.initialisation": "xavier"}])
def test_xavier_kernels_reach_their_bounds_and_biases_are_zero(changes):
    torch.manual_seed(0)
    networks = Networks(preset_config("spr").override(changes | {"network.hidden": 64, "network.width": 1}), 6)
    seen = 0
    for name, parameter in networks.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif name.endswith(".weight") and parameter.dim() > 1:
            streams = 2 if name == "head.hidden.weight" and "network.shared_hidden" not in changes else 1
            for layer in parameter.detach().chunk(streams):
                area = math.prod(layer.shape[2:])
                bound = math.sqrt(6 / (area * layer.shape[0] + area * layer.shape[1]))
                assert 0.98 * bound < layer.abs().max() <= bound, name
                assert layer.mean().abs() < 5 * layer.std() / layer.numel() ** 0.5, name
                seen += 1
    assert seen == (15 + 2 + 1 + 1 + 2 if changes is BBF else 3 + 2 + 2 + 1 + 2)


def test_xavier_leaves_the_scales_of_noise():
    plain, xavier = (
        Networks(small(**{"network.initialisation": name}), 3).state_dict() for name in ("library", "xavier")
    )
    for name, value in plain.items():
        if "sigma" in name or "bn.weight" in name:
            assert torch.equal(xavier[name], value)


# ---- in a fleet


@pytest.mark.parametrize(
    "changes", [SMALL_BBF, SMALL_SR_SPR, SMALL_BBF | {"network.noisy": True, "network.dropout": 0.2}]
)
def test_an_agent_in_a_fleet_equals_the_same_agent_alone(changes):
    """With fewer actions than there is room for: the dueling mean is over its own."""
    config = small(**changes)
    fleet = World(config, [3, 5], torch.float64, game_num_actions=[4, 3])
    alone = World(config, [5], torch.float64, game_num_actions=[3])
    fleet.update(3)
    alone.update(3)
    assert fleet.state.weights.isfinite().all()
    torch.testing.assert_close(fleet.state.weights[1:], alone.state.weights, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [SMALL_BBF, SMALL_SR_SPR])
def test_they_learn_a_fixed_batch(changes):
    losses = World(small(**changes | {"learner.learning_rate": 1e-3}), [0]).fixed_batch_losses()
    assert losses[-1] < losses[0] - 0.05 * losses[0].abs()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SMALL_BBF, SMALL_SR_SPR])
def test_a_gpus_way_gives_the_same_gradients_and_is_one_graph(monkeypatch, changes):
    def gradients(fuse):
        world = World(small(**changes), [0, 1])
        world.learner._losses = fuse(world.learner._losses)
        found = world.learner.gradients_and_priorities(world.state, world.replay, world.draws(), world.rates)
        return in_rows(world.learner, found.grads)

    plain = gradients(lambda function: function)
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(each_agent, "takes_turns", lambda _: False)
    monkeypatch.setattr(impala_ops, "_FILLS_A_GPU", 1_000_000)  # so that there are convolutions of both kinds
    for fuse in (lambda function: function, whole):
        found = gradients(fuse)
        assert ((found - plain).norm(dim=1) < 1e-4 * plain.norm(dim=1)).all()


def whole(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


def test_every_new_part_says_how_it_is_treated_and_where_actions_lie():
    networks = networks_without_weights(small(**SMALL_BBF), ACTIONS, CPU)
    groups = networks.groups()
    assert all(groups[name].acts == name.startswith(("encoder.", "head.")) for name in groups)
    assert {name for name, group in groups.items() if group.name == "out"} == {
        *("head.value.weight", "head.value.bias", "head.advantage.weight", "head.advantage.bias")
    }
    assert set(networks.action_dims()) == {"head.advantage.weight", "head.advantage.bias", "transition.conv1.weight"}


# ---- in files

RUN = {"observation.width": 24, "replay.batch_size": 4, "schedule.learning_starts": 60, "learner.depth": 2}


def test_a_restored_fleet_goes_on_to_the_same_bits():
    config = Config().override(SMALL_BBF | RUN | {"schedule.steps": 75})

    def training():
        return Training(assemble(config, make("catch", 2, obs=config.observation), [3, 1], CPU))

    unbroken, resumed = training(), training()
    for info in unbroken.run():
        if info.step == 68:
            saved = snapshot.snapshots(unbroken)
    list(snapshot.restore(resumed, saved))
    assert len(list(resumed.run())) == 75 - 68
    assert torch.equal(resumed.fleet.state.weights, unbroken.fleet.state.weights)


def test_an_exported_agent_answers_as_the_run_it_was_made_from(tmp_path):
    options = as_options(SMALL_BBF | RUN | {"evaluation.episodes": 1})
    assert main(["train", "catch", "--steps", "63", *options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    folder, file = tmp_path / "spr" / "catch" / "seed-0", tmp_path / "agent.safetensors"
    assert main(["export", str(folder), str(file)]) == 0
    observation = np.random.default_rng(0).integers(0, 256, (4, 20, 24), np.uint8)
    answers = [
        (agent.q_values(observation), agent.encode(observation), agent.predict(observation, [0, 2]))
        for agent in (spr.load(folder), spr.load(file))
    ]
    assert [part.shape for part in answers[0]] == [(3,), (3, 3, 32), (2, 3, 3, 32)]
    for one, two in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, two)


# ---- memory


def test_memory_follows_the_networks():
    """A BBF agent has 0.8 GB of weights and moments alone; what was measured for SPR stays as it was."""
    gpu = torch.device("cuda")
    usual, bbf = (Config().override(changes) for changes in ({}, BBF))
    one = {
        name: fleet_memory(config, 2, gpu) - fleet_memory(config, 1, gpu)
        for name, config in (("spr", usual), ("bbf", bbf))
    }
    assert one["bbf"] - one["spr"] > 38e6 * 4 * 4 + 32 * 1.66e6 * 2
    assert fleet_memory(bbf, 1, gpu) < 6 * 2**30
    for preset in ("der", "drq", "curl", "rainbow"):
        assert fleet_memory(preset_config(preset), 3, CPU) == fleet_memory(usual, 3, CPU)


# ---- what can't be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network.width": 4}, "network.width is not for the encoder 'standard', but for impala: leave it at 1"),
        (
            {"observation.height": 20},
            "20x84 pixels are too small for this encoder: 36 is the least, or set network.padding=same",
        ),
        ({"network.shared_hidden": True, "network.dueling": False}, "network.shared_hidden is for dueling streams"),
        ({"network.padding": "reflect"}, "network.padding must be one of valid, same, not 'reflect'"),
        ({"network.initialisation": "orthogonal"}, "must be one of library, xavier"),
        ({"network.encoder": "impala", "network.width": 0}, "network.width must be between 1 and 64, not 0"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError) as error:
        check_names(Config().override(changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
