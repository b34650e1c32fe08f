"""What a CPU computes by operators of its own: each against the library's plain layers, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from spr.ops import conv_cpu, functional, linear_cpu
from spr.ops.cpu_trace import Traced


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    made = function(*leaves)
    pull = numbers(*made.shape, seed=9)
    return [made.detach(), *torch.autograd.grad((made * pull).sum(), leaves)]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_a_product_is_the_linear_layers(monkeypatch, with_bias, library):
    if not library:  # of a build of PyTorch that lacks oneDNN's
        monkeypatch.setattr(linear_cpu, "_linear", None)
    given = [numbers(5, 7), numbers(3, 7, seed=1), *([numbers(3, seed=2)] if with_bias else [])]
    found = gradients(lambda x, w, *b: linear_cpu.linear(x, w, b[0] if b else None), *given)
    for mine, plain in zip(found, gradients(F.linear, *given), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(8, 4, 0), (3, 1, 1)])
def test_a_convolution_is_the_librarys(monkeypatch, library, relu, with_bias, channels_last, kernel, stride, padding):
    if not library:
        monkeypatch.setattr(conv_cpu, "_convolution", None)
    x = numbers(2, 4, 12, 16)
    given = [x, numbers(6, 4, kernel, kernel, seed=1), *([numbers(6, seed=2)] if with_bias else [])]

    def mine(x, weight, *bias):
        shown = x.permute(0, 2, 3, 1)  # [B, H, W, C], as images lie or as latents do
        shown = shown.contiguous() if channels_last else shown
        return conv_cpu.convolve(shown, weight, bias[0] if bias else None, stride, padding, relu).permute(0, 3, 1, 2)

    def plain(x, weight, *bias):
        made = F.conv2d(x, weight, bias[0] if bias else None, stride, padding)
        return F.relu(made) if relu else made

    for ours, theirs in zip(gradients(mine, *given), gradients(plain, *given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bf16_products_differ_by_its_rounding_only():
    x, weight = numbers(8, 64), numbers(16, 64, seed=1)
    narrow = linear_cpu.linear(x, weight.bfloat16(), None)
    assert narrow.dtype == torch.float32
    assert (narrow - F.linear(x, weight)).norm() < 0.01 * F.linear(x, weight).norm()
    image, kernels = numbers(2, 8, 8, 4), numbers(6, 4, 3, 3, seed=1)
    exact = functional.convolve(image, kernels)
    assert (conv_cpu.convolve(image, kernels.bfloat16()).float() - exact).norm() < 0.01 * exact.norm()


def test_operators_for_a_cpu_leave_fleets_and_doubles_to_the_plain_ones():
    seen = []
    torch.vmap(lambda x: seen.append(functional.on_cpu(x)) or x)(numbers(2, 3))
    assert [functional.on_cpu(numbers(3)), functional.on_cpu(numbers(3).double()), *seen] == [True, False, False]


def test_a_traced_function_computes_the_same_bits_with_other_numbers():
    def gradient(x, weight):
        leaf = weight.detach().requires_grad_()
        made = {"y": linear_cpu.linear(x, leaf, None)}
        return torch.autograd.grad(made["y"].square().sum(), leaf)[0], made["y"].detach()

    traced = Traced(gradient, (numbers(4, 6), numbers(3, 6, seed=1)))
    others = numbers(4, 6, seed=2), numbers(3, 6, seed=3)
    assert all(map(torch.equal, traced(*others), gradient(*others)))
