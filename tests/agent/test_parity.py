"""The objective reproduces what an independent implementation computes (spr_parity.json), to 1e-5 relative."""

import json
from pathlib import Path

import pytest
import torch
from conftest import in_rows
from torch.func import functional_call

from spr.agent.augmentation import AugmentParams, Views
from spr.agent.auxiliary_losses import cosine
from spr.agent.q_head import HeadNoise, LayerNoise
from spr.agent.random_streams import UpdateRandomness
from spr.agent.replay import Batch
from spr.config.presets import preset_config
from spr.ops import functional
from spr.training.learner import Learner, LearnerState

GOLDEN = json.loads((Path(__file__).parent / "spr_parity.json").read_text())
ROWS, DEPTH, ACTIONS, N = 4, 5, 6, 10
WEIGHTS = torch.tensor([1, 0.5, 0.75, 0.25], dtype=torch.float64)

# salt of the first tensor, name, shape of the weight, fan-in
PLAIN = [
    (0, "encoder.conv1", (32, 4, 8, 8), 256),
    (2, "encoder.conv2", (64, 32, 4, 4), 512),
    (4, "encoder.conv3", (64, 64, 3, 3), 576),
    (6, "transition.conv1", (64, 70, 3, 3), 630),
    (8, "transition.conv2", (64, 64, 3, 3), 576),
    (26, "predictor", (512, 512), 512),
]
NOISY = [
    (10, "hidden", (256, 3136)),
    (14, "value", (51, 256)),
    (18, "hidden", (256, 3136)),
    (22, "advantage", (306, 256)),
]
# Where the numbers of one of its layers are here: parameters that begin so, and which half of them.
LAYERS = {
    "encoder.conv1": ("encoder.conv1.", slice(None)),
    "encoder.conv2": ("encoder.conv2.", slice(None)),
    "encoder.conv3": ("encoder.conv3.", slice(None)),
    "transition.conv1": ("transition.conv1.", slice(None)),
    "transition.bn": ("transition.bn.", slice(None)),
    "transition.conv2": ("transition.conv2.", slice(None)),
    "value.hidden": ("head.hidden.", slice(0, 256)),
    "value.out": ("head.value.", slice(None)),
    "advantage.hidden": ("head.hidden.", slice(256, 512)),
    "advantage.out": ("head.advantage.", slice(None)),
    "predictor": ("predictor.", slice(None)),
}


def channels_last(flat):
    """Reorder flat latents [..., 3136] from channels first, as the golden numbers have them, to channels last."""
    return flat.unflatten(-1, (64, 49)).transpose(-1, -2).flatten(-2)


def u(salt, *shape):
    count = torch.Size(shape).numel()
    element = torch.arange(count, dtype=torch.int64)
    return (((element * 2654435761 + salt * 40503) % 2**32).double() / 2**32 - 0.5).view(shape)


def formula_params():
    params = {}
    for salt, name, shape, fan_in in PLAIN:
        params[f"{name}.weight"] = 2 * u(salt, *shape) / fan_in**0.5
        params[f"{name}.bias"] = 2 * u(salt + 1, shape[0]) / fan_in**0.5
    for part in ("hidden", "value", "advantage"):
        layers = [(salt, shape) for salt, name, shape in NOISY if name == part]
        weights = [2 * u(salt, *shape) / shape[1] ** 0.5 for salt, shape in layers]
        params[f"head.{part}.weight"] = torch.cat([channels_last(w) if part == "hidden" else w for w in weights])
        params[f"head.{part}.bias"] = torch.cat([2 * u(salt + 1, shape[0]) / shape[1] ** 0.5 for salt, shape in layers])
    return params


def formula_noise():
    layers = {}
    for part in ("hidden", "value", "advantage"):
        drawn = [(4 * u(salt + 2, shape[1]), 4 * u(salt + 3, shape[0])) for salt, name, shape in NOISY if name == part]
        inputs = torch.stack([channels_last(e) if part == "hidden" else e for e, _ in drawn])
        layers[part] = LayerNoise(inputs, torch.cat([e for _, e in drawn]))
    return HeadNoise(**layers)


def observation(t):
    i, j = torch.arange(84)[:, None], torch.arange(84)[None, :]
    frames = [[((i * j) // 7 + 37 * f * (b + 1) + 5 * i + 11 * j) % 256 for f in range(t, t + 4)] for b in range(ROWS)]
    return torch.stack([torch.stack(row) for row in frames]).double() / 255


def as_on_a_gpu(x, weight, stride=1, padding=0):
    return functional.shift_and_add(x, weight, stride, padding)


@pytest.fixture(scope="module", params=["a CPU's convolutions", "a GPU's convolutions"])
def computed(request):
    """Everything once with the library's convolutions, and once with those that a GPU uses."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "a GPU's convolutions":
            patch.setattr(functional, "convolve", as_on_a_gpu)
        yield compute()


def compute():
    config = preset_config("spr").override({"replay.batch_size": ROWS})
    learner = Learner(config, ACTIONS, torch.device("cpu"), torch.float64)
    state: LearnerState = learner.init([0])
    with torch.no_grad():
        for name, value in formula_params().items():
            assert state.params[name].shape == (1, *value.shape)
            state.params[name][0] = value

    noise = formula_noise()
    obs = torch.stack([observation(t) for t in (*range(DEPTH + 1), N)])[None]
    mask = torch.ones(1, ROWS, DEPTH)
    mask[0, 1, 2:] = 0
    mask[0, 2, 1:] = 0
    batch = Batch(
        start=torch.zeros(1, ROWS, dtype=torch.int64),
        frames=torch.zeros(1, ROWS, 0, 1, 84, 84, dtype=torch.uint8),
        visible=torch.ones(1, ROWS, DEPTH + 2, 4),
        actions=torch.tensor([[[(3 * t + 2 * b + t * b) % 6 for t in range(DEPTH)] for b in range(ROWS)]]),
        returns=torch.tensor([[1.5, -0.25, 0, 3]], dtype=torch.float64),
        discount=torch.tensor([[1, 1, 0, 1]], dtype=torch.float64) * 0.99**N,
        mask=mask,
        weight=WEIGHTS[None],
    )
    unused = torch.zeros(1, ROWS, DEPTH + 2)
    both = HeadNoise(*(LayerNoise(*(torch.stack([e, e])[None] for e in layer)) for layer in noise))
    params = AugmentParams(unused[..., None], unused[..., None], unused, unused)
    draws = UpdateRandomness(unused, params, noise=both, dropout=())
    rows, loss, terms = learner.gradients(state, batch, Views(obs[:, :1], obs[:, 1:]), draws)
    grads = learner.layout.views(in_rows(learner, rows))
    return {"learner": learner, "state": state, "obs": obs, "noise": noise, "draws": draws, "batch": batch} | {
        "loss": loss,
        "terms": terms,
        "grads": grads,
        "mask": mask,
    }


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)


def test_q_values_before_and_after_n_steps(computed):
    networks = computed["learner"]._objective.online
    params = {name: value[0] for name, value in computed["state"].params.items()}
    noise = computed["noise"]
    assert_close(functional_call(networks, params, (computed["obs"][0, 0], noise)), GOLDEN["q_values"])
    assert_close(functional_call(networks, params, (computed["obs"][0, -1], noise)), GOLDEN["next_q_values"])


def test_rl_loss_and_kl(computed):
    assert_close(computed["terms"].losses["rl"][0], GOLDEN["rl_loss"])
    assert_close(computed["terms"].raw_priority[0], GOLDEN["kl"])


def test_total_loss(computed):
    # The golden total counts 1 - cosine for each unmasked step; the objective leaves the constant out.
    constant = (WEIGHTS * 2 * computed["mask"][0].sum(-1)).mean()
    assert_close(computed["loss"][0] + constant, GOLDEN["total"])
    assert_close((WEIGHTS * computed["terms"].losses["rl"][0]).mean(), GOLDEN["total_rl"])


def test_spr_loss_sums_the_unmasked_cosines(computed):
    golden = torch.tensor(GOLDEN["cosine"], dtype=torch.float64).T  # [B, K]
    expected = -(golden * computed["mask"][0]).sum(-1)
    torch.testing.assert_close(computed["terms"].losses["spr"][0], expected, rtol=1e-5, atol=1e-6)


def test_every_cosine_before_masking(computed):
    learner, state, batch = computed["learner"], computed["state"], computed["batch"]
    pair = Views(computed["obs"][:, :1], computed["obs"][:, 1:])
    for k in range(DEPTH):
        for b in range(ROWS):
            mask = torch.zeros(1, ROWS, DEPTH)
            mask[0, b, k] = 1
            _, _, terms = learner.gradients(state, batch._replace(mask=mask), pair, computed["draws"])
            # 2e-6: the independent implementation takes the cosine in float32
            assert -terms.losses["spr"][0, b].item() == pytest.approx(GOLDEN["cosine"][k][b], rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradient_norm_of_each_layer(computed, layer):
    begin, half = LAYERS[layer]
    mine = [grad[:, half] for name, grad in computed["grads"].items() if name.startswith(begin)]
    norm = torch.stack([grad.square().sum() for grad in mine]).sum().sqrt()
    assert_close(norm, GOLDEN["grad_norm"][layer])


def test_cosine_of_hand_computed_vectors():
    x, y = torch.tensor([[3.0, 4.0], [1e-9, 0.0]]), torch.tensor([[4.0, 3.0], [1.0, 0.0]])
    torch.testing.assert_close(cosine(x, y), torch.tensor([24 / 25, 1e-6]))
