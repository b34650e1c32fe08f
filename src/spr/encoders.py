"""Owns the encoders by name: classes that map observations to latents, and know the shapes on the way.

Everything random (dropout masks) is an argument. Shapes: B batch, H height, W width, C channels.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from spr import fused, ops
from spr.errors import UserError

Shape = tuple[int, int, int]  # height, width, channels


class Convolution(nn.Module):
    """The weights of a convolution, initialised as the library does."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs * kernel**2)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))


class Encoder(nn.Module):
    """f: observations [B, C, H, W] in [0, 1] (augmentation may exceed it) -> latents [B, H', W', C'] in [0, 1]."""

    shapes: list[Shape]  # after each layer that dropout masks; the last is the latent's

    def forward(self, x: Tensor, dropout: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; `dropout` holds a mask per layer, 0 or 1 / (1 - p), or nothing."""
        raise NotImplementedError


class ConvEncoder(Encoder):
    """Convolutions, each followed by a ReLU."""

    def __init__(self, inputs: Shape, layers: Sequence[tuple[int, int, int]]) -> None:
        """Take the shape of an observation, and (channels out, kernel, stride) of each layer."""
        super().__init__()
        self.shapes = []
        self._layers: list[tuple[Convolution, int]] = []
        height, width, channels = inputs
        for i, (outputs, kernel, stride) in enumerate(layers, start=1):
            if kernel % stride:
                raise UserError(f"a kernel of {kernel} is not a multiple of its stride of {stride}")
            conv = Convolution(channels, outputs, kernel)
            self.add_module(f"conv{i}", conv)
            self._layers.append((conv, stride))
            height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
            if min(height, width) < 1:
                least = 1
                for _, size, step in reversed(layers):
                    least = (least - 1) * step + size
                raise UserError(
                    f"observations of {inputs[0]}x{inputs[1]} pixels are too small for this encoder: "
                    f"{least} is the least"
                )
            self.shapes.append((height, width, channels))

    def forward(self, x: Tensor, dropout: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; `dropout` holds a mask per layer, 0 or 1 / (1 - p), or nothing."""
        assert x.dim() == 4
        x = x.permute(0, 2, 3, 1)
        for i, (conv, stride) in enumerate(self._layers):
            last = i == len(self._layers) - 1  # what is not multiplied next stays in float32
            x = fused.convolve_relu(x, conv.weight, conv.bias, stride, torch.float32 if last else conv.weight.dtype)
            if dropout:
                x = x * dropout[i]
        return ops.renormalise(x)


_ENCODERS: dict[str, Callable[[Shape], Encoder]] = {
    # DQN's (Mnih et al. 2015)
    "standard": partial(ConvEncoder, layers=((32, 8, 4), (64, 4, 2), (64, 3, 1))),
    # Data-Efficient Rainbow's (van Hasselt et al. 2019)
    "data_efficient": partial(ConvEncoder, layers=((32, 5, 5), (64, 5, 5))),
    # MinAtar's (Young and Tian 2019), for frames of ten pixels
    "minatar": partial(ConvEncoder, layers=((16, 3, 1),)),
}


def register(name: str) -> Callable[[Callable[[Shape], Encoder]], Callable[[Shape], Encoder]]:
    """Make an encoder of your own available as `network.encoder=NAME`: a class or function of an image's shape."""

    def remember(factory: Callable[[Shape], Encoder]) -> Callable[[Shape], Encoder]:
        if name in _ENCODERS:
            raise UserError(f"an encoder named '{name}' is there already: choose another name")
        _ENCODERS[name] = factory
        return factory

    return remember


def encoder_names() -> list[str]:
    """Return the names of all encoders."""
    return list(_ENCODERS)


def make_encoder(name: str, inputs: Shape) -> Encoder:
    """Make an encoder for observations of a shape."""
    return _ENCODERS[name](inputs)


@cache
def encoder_shapes(name: str, inputs: Shape) -> tuple[Shape, ...]:
    """Return the shapes after each layer, without making any weights."""
    with torch.device("meta"):
        return tuple(make_encoder(name, inputs).shapes)
