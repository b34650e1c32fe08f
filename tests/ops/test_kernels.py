"""Kernels of our own against their plain twins: on a GPU as they are, elsewhere by Triton's interpreter."""

import os

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import vjp
from torch.utils._pytree import tree_leaves

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton, which comes with a GPU's PyTorch or with the dev extra")

from conftest import LITTLE_FRAMES, World, in_rows  # noqa: E402

from spr.config.presets import preset_config  # noqa: E402
from spr.ops import (  # noqa: E402
    conv_triton,
    each_agent,
    functional,
    impala_ops,
    impala_triton,
    kernels,
    observation_triton,
    random_triton,
    rollout_ops,
    rollout_triton,
)
from spr.ops.kernels import KERNELS  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def test_random_words_are_those_of_the_published_generator():
    """The first answers that its authors give for Philox 4x32-10: nothing but zeros in; and after 2^32 draws more."""
    _, uniform = random_triton.random(torch.tensor([[0, 0], [0, 2**32]], device=DEVICE), 0, 4)
    words = (uniform * 2**24).long().tolist()
    assert words[0] == [0x6627E8, 0xE169C5, 0xBC57AC, 0x9B00DB]
    assert words[1] != words[0]


def test_random_numbers_have_their_distributions_and_depend_on_seed_and_turn_only():
    streams = torch.tensor([[7, 0], [8, 0], [7, 1]], device=DEVICE)
    normal, uniform = random_triton.random(streams, 20_001, 10_002)
    assert streams.tolist() == [[7, 1], [8, 1], [7, 2]]
    for row in normal.double():
        moments = [row.mean(), row.square().mean() - 1, row.pow(3).mean(), row.pow(4).mean() - 3]
        errors = [(scale / len(row)) ** 0.5 for scale in (1, 2, 15, 96)]
        assert all(abs(moment) < 5 * error for moment, error in zip(moments, errors, strict=True))
    for row in uniform.double():
        assert 0 <= row.min() < 0.001
        assert 0.999 < row.max() < 1
        assert abs(row.mean() - 0.5) < 5 * (1 / 12 / len(row)) ** 0.5
        counts = (row * 16).long().bincount(minlength=16)
        assert ((counts - len(row) / 16).square() / (len(row) / 16)).sum() < 45  # chi-square, 15 degrees: p = 1e-4
    assert (normal.corrcoef() - torch.eye(3, device=DEVICE)).abs().max() < 0.04
    assert abs((normal[:, :-1] * normal[:, 1:]).mean()) < 0.02  # neighbours
    again, _ = random_triton.random(streams[:1], 20_001, 10_002)
    assert torch.equal(again[0], normal[2])  # alone, at its second turn
    assert [part.shape for part in random_triton.random(streams, 0, 0)] == [(3, 0), (3, 0)]
    assert streams[0, 1] == 2  # nothing was drawn


@pytest.mark.parametrize("planes", [4, 3])
def test_observations_are_drawn_as_pixel_by_pixel(planes):
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (20, 24, 26), dtype=torch.uint8, generator=generator).to(DEVICE)
    frame = torch.randint(0, 20, (7, planes), dtype=torch.int32, generator=generator).to(DEVICE)
    shift = torch.randint(-4, 5, (7, 2), dtype=torch.int32, generator=generator).to(DEVICE)
    brightness = torch.rand(7, planes, generator=generator).to(DEVICE)
    drawn = observation_triton.draw(frames, frame, shift, brightness, torch.float32)
    plain = functional.shifted_pixels(frames, frame, shift) * brightness[..., None, None]
    assert torch.equal(drawn.movedim(-1, -3), plain)


@pytest.mark.parametrize(
    ("side", "channels", "kernel", "stride", "out"), [(20, 4, 8, 4, 32), (9, 32, 4, 2, 64), (7, 64, 3, 1, 64)]
)
def test_convolutions_are_the_librarys(side, channels, kernel, stride, out):
    """Of each agent by its own weights, and of a part of what each agent has."""
    x = numbers(2, 4, side, side, channels)[:, 1:]
    weight, bias = numbers(2, out, channels, kernel, kernel) / 10, numbers(2, out)
    made = conv_triton.convolve(x, weight.permute(0, 3, 4, 2, 1).contiguous(), bias, stride, torch.float32)
    for agent in range(2):
        exact = [tensor[agent].double() for tensor in (x, weight, bias)]  # in float32 the library may round more
        plain = torch.conv2d(exact[0].permute(0, 3, 1, 2), *exact[1:], stride).relu().permute(0, 2, 3, 1)
        torch.testing.assert_close(made[agent], plain.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("side", "channels", "kernel", "stride", "out"),
    [(21, 4, 8, 4, 32), (9, 32, 4, 2, 64), (7, 64, 3, 1, 64), (11, 16, 5, 5, 24)],
)
def test_gradients_of_convolutions_are_the_librarys(side, channels, kernel, stride, out):
    """With pixels at the edge that no kernel reaches, and channels that fill no block."""
    x = numbers(2, 4, side, side, channels)[:, 1:]
    weight, bias = numbers(2, kernel, kernel, channels, out) / 10, numbers(2, out)
    y = conv_triton.convolve(x, weight, bias, stride, torch.float32)
    g = numbers(*y.shape, seed=1)
    d_x, d_kernel = (
        conv_triton.convolve_back(g, y, x, weight, stride),
        conv_triton.kernel_back(g, y, x, weight, stride),
    )
    for agent in range(2):
        exact = [tensor[agent].double() for tensor in (x, weight, bias)]
        _, pull = vjp(
            lambda x, w, b: (
                torch.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b, stride).relu().permute(0, 2, 3, 1)
            ),
            *exact,
        )
        found = (d_x[agent], d_kernel[agent, :-1].view(weight.shape[1:]), d_kernel[agent, -1])
        for mine, plain in zip(found, pull(g[agent].double()), strict=True):
            assert (mine - plain).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize(("height", "width", "channels"), [(8, 7, 16), (5, 6, 24), (1, 2, 3)])
def test_pools_and_their_gradients_are_the_librarys(height, width, channels):
    """Of whole numbers below 0, many of them equal: a border of zeros would be seen, and which of two is taken."""
    x = numbers(2, 3, height, width, channels).mul(2).round() - 9
    up, left = (functional.same_padding(side, 3, 2)[0] for side in (height, width))
    pooled, which = impala_triton.max_pool(x, up, left, True)
    g = numbers(*pooled.shape, seed=1)
    d_x = impala_triton.max_pool_back(g, which, height, width, up, left)
    for agent in range(2):
        plain, pull = vjp(functional.max_pool_same, x[agent].double())
        assert torch.equal(pooled[agent].double(), plain)
        torch.testing.assert_close(d_x[agent].double(), pull(g[agent].double())[0])
    twin, place = impala_ops._max_pool._init_fn(x, True)
    assert torch.equal(twin, pooled)
    assert torch.equal(place, which)
    torch.testing.assert_close(impala_ops._max_pool_back._init_fn(g, which, height, width), d_x)
    x[0, 1, 0, 1] = torch.nan
    for wanted in (True, False):
        pooled = impala_triton.max_pool(x, up, left, wanted)[0]
        assert channels <= pooled[0, 1].isnan().sum() == pooled.isnan().sum()
    assert torch.equal(pooled[1], impala_triton.max_pool(x, up, left, True)[0][1])


@pytest.mark.parametrize(
    ("height", "width", "channels", "out"), [(8, 7, 4, 16), (5, 6, 3, 24), (1, 2, 1, 16), (6, 5, 5, 72)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_a_convolution_and_its_pool_in_one_are_the_librarys(height, width, channels, out, dtype):
    """With kernels that fill no block, and those of two; the bias moves all, so that zeros outside would be seen.

    In bf16, whose products Triton's interpreter can't form, on a GPU only.
    """
    x, weight, bias = numbers(2, 3, height, width, channels), numbers(2, out, channels, 3, 3), numbers(2, out) - 9
    x, taps = x.to(dtype), weight.permute(0, 3, 4, 2, 1).flatten(2, 3).contiguous().to(dtype)
    up, left = (functional.same_padding(side, 3, 2)[0] for side in (height, width))
    made, which = impala_triton.convolve_pool(x, taps, bias, up, left, True)
    alone, none = impala_triton.convolve_pool(x, taps, bias, up, left, False)
    assert torch.equal(alone, made)
    assert none.numel() == 0
    g = numbers(*made.shape, seed=1).to(dtype)
    d_taps = impala_triton.convolve_pool_back(g, which, x, up, left)
    within = 1e-4 if dtype == torch.float32 else 2**-8  # of its own size, by which what is stored is rounded
    for agent in range(2):
        one, mine, move = (part[agent].double() for part in (x, taps, bias))

        def plain(mine, one=one, move=move):
            return functional.max_pool_same(functional.convolve(one, impala_ops._unfolded(mine), padding=1)) + move

        expected, pull = vjp(plain, mine)
        torch.testing.assert_close(made[agent].float(), expected.float(), rtol=within, atol=1e-4)
        assert (d_taps[agent] - pull(g[agent].double())[0]).norm() < 1e-5 * d_taps[agent].norm()
    if dtype == torch.bfloat16:
        return  # the twin rounds before it pools
    twin, place = impala_ops._convolve_pool._init_fn(x, taps, bias, True)
    torch.testing.assert_close(twin, made, rtol=1e-4, atol=1e-4)
    assert torch.equal(place, which)
    torch.testing.assert_close(impala_ops._convolve_pool_back._init_fn(g, which, x), d_taps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [7, 1_000, 20_000])  # and more than one program holds at once
def test_latents_are_scaled_as_by_plain_steps(size):
    """Those whose least value is there many times, as after a ReLU, or whose largest is; and flat ones."""
    x = numbers(2, 5, size)
    x[0] = x[0].relu()
    x[1, 0], x[1, 1] = 0.25, 0.25 + 1e-7 * x[1, 1]
    x[1, 2] = x[1, 2].clamp(max=0.5)
    g = numbers(2, 5, size, seed=1)
    made, ends = impala_triton.renormalise(x, functional.LEAST_SPAN)
    d_x = impala_triton.renormalise_back(g, x, ends, functional.LEAST_SPAN)
    assert (made[0] == 1).any(-1).all()
    for agent in range(2):
        plain, pull = vjp(functional.renormalise, x[agent].double())
        torch.testing.assert_close(made[agent], plain.float(), rtol=1e-5, atol=1e-6)
        expected = pull(g[agent].double())[0]
        assert ((d_x[agent] - expected).norm(dim=-1) < 1e-5 * expected.norm(dim=-1)).all()
    assert all(map(torch.equal, impala_ops._renormalise._init_fn(x), (made, ends)))
    broken = x.clone()
    broken[0, 3, size // 2] = torch.nan
    assert impala_triton.renormalise(broken, functional.LEAST_SPAN)[0][0, 3].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("bias_at", [0.0, 3.0])
def test_the_rollout_and_its_gradient_are_those_of_plain_steps(bias_at):
    """Where the least value of a sample is 0 after the ReLU, and where all are above it."""
    agents, steps, batch, height, width, channels = (3, 5, 32, 7, 7, 64) if ON_GPU else (2, 3, 3, 3, 4, 16)
    latent = (batch, height, width, channels)
    z, added, g = (
        numbers(agents, *latent).abs(),
        numbers(agents, steps, *latent),
        numbers(agents, steps, *latent, seed=1),
    )
    first, second = (numbers(agents, 9, channels, channels, seed=seed) / channels**0.5 / 3 for seed in (2, 3))
    bn_weight, bn_bias = numbers(agents, channels).abs() + 0.5, numbers(agents, channels, seed=4)
    bias = numbers(agents, channels, seed=5) + bias_at
    given = (z, added, first, bn_weight, bn_bias, second, bias)
    made = rollout_triton.rollout(*given, 1e-5)
    d_z, d_added, d_first, d_second, norm, biases = rollout_triton.rollout_back(
        g, *made, first, bn_weight, bn_bias, second, 1e-5
    )
    d_move, d_scale = norm.sum((1, 2)).unbind(1)
    found = (d_z, d_added, d_first, d_scale, d_move, d_second, biases.sum((1, 2)))
    for agent in range(agents):
        exact = [tensor[agent].double() for tensor in given]
        latents, pull = vjp(lambda *tensors: rollout_ops._plain_rollout(*tensors, 1e-5), *exact)
        torch.testing.assert_close(made[0][agent], latents.float(), rtol=1e-4, atol=1e-5)
        assert ((made[0][agent] == 1).flatten(2).sum(-1) == 1).all()  # each sample's largest, found by its gradient
        for mine, plain in zip(found, pull(g[agent].double()), strict=True):
            assert (mine[agent] - plain).norm() < (1e-3 if ON_GPU else 1e-5) * plain.norm()


def test_a_flat_sample_has_no_gradient_by_its_span():
    """All its values are alike, so that scaling divides by the least span instead."""
    channels = 16
    given = [torch.zeros(1, *shape, device=DEVICE) for shape in ((2, 3, 3, channels), (1, 2, 3, 3, channels))]
    weights = [torch.zeros(1, 9, channels, channels, device=DEVICE)] * 2
    ones = torch.ones(1, channels, device=DEVICE)
    made = rollout_triton.rollout(*given, weights[0], ones, ones, weights[1], ones, 1e-5)
    assert (made[0] == 0).all()
    g = numbers(1, 1, 2, 3, 3, channels)
    found = rollout_triton.rollout_back(g, *made, weights[0], ones, ones, weights[1], 1e-5)
    exact = [t[0].double() for t in (*given, weights[0], ones, ones, weights[1], ones)]
    _, pull = vjp(lambda *tensors: rollout_ops._plain_rollout(*tensors, 1e-5), *exact)
    torch.testing.assert_close(found[5].sum((1, 2))[0], pull(g[0].double())[6].float(), rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="there tests/training/test_gpu.py compares whole updates")
@pytest.mark.parametrize("changes", [("spr", {}), ("bbf", {"network.width": 1, "replay.n_step_end": 0})])
def test_a_whole_update_by_kernels_is_the_plain_one(monkeypatch, changes):
    """Two agents, whose weights lie apart in memory: the kernels see each one's own."""
    config = preset_config(changes[0]).override(
        LITTLE_FRAMES | {"replay.batch_size": 3, "network.hidden": 16, "learner.depth": 2, "replay.n_step": 2}
    )
    config = config.override(changes[1])

    def gradients():
        world = World(config, [0, 1])
        found = world.learner.gradients_and_priorities(world.state, world.replay, world.draws(), world.rates)
        return in_rows(world.learner, found.grads)

    plain = gradients()
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(each_agent, "takes_turns", lambda _: False)
    for op, kernel in KERNELS.items():
        op.register_kernel("cpu", as_announced(op, kernel))
    found = gradients()
    for op in KERNELS:
        op.register_kernel("cpu", op._init_fn)
    assert ((found - plain).norm(dim=1) < 1e-4 * plain.norm(dim=1)).all()


def as_announced(op, kernel):
    """A kernel whose results must lie in memory as the compiler is told that they will: it refuses others on a GPU."""

    def checked(*given):
        made = kernel(*given)
        with FakeTensorMode() as mode:
            expected = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
        for mine, told in zip(tree_leaves(made), tree_leaves(expected), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (told.shape, told.stride(), told.dtype), op
        return made

    return checked
