"""Owns the encoders by name: classes that map observations to latents, and know the shapes on the way.

Everything random (dropout masks) is an argument. Shapes: B batch, H height, W width, C channels.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spr.common.errors import UserError, did_you_mean
from spr.config.config import Shape
from spr.ops import conv_ops, functional, impala_ops

_USUAL = {"width": 1, "padding": "valid"}  # what encoders may be asked for, and what each is otherwise
_STAGES, _BLOCKS = (16, 32, 32), 2  # Impala's channels at a width of 1, and residual blocks in each stage


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

    @property
    def activations(self) -> int:
        """How many numbers are computed on the way from one observation to its latent, for an estimate of memory."""
        return sum(map(math.prod, self.shapes))

    def forward(self, x: Tensor, dropout: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; `dropout` holds a mask per layer, 0 or 1 / (1 - p), or nothing."""
        raise NotImplementedError


class ConvEncoder(Encoder):
    """Convolutions, each followed by a ReLU."""

    def __init__(self, inputs: Shape, layers: Sequence[tuple[int, int, int]], padding: str = "valid") -> None:
        """Take the shape of an observation, (channels out, kernel, stride) of each layer, and how they pad."""
        super().__init__()
        self._same = padding == "same"
        self.shapes = []
        self._layers: list[tuple[Convolution, int]] = []
        height, width, channels = inputs
        for i, (outputs, kernel, stride) in enumerate(layers, start=1):
            if kernel % stride:
                raise UserError(f"a kernel of {kernel} is not a multiple of its stride of {stride}")
            conv = Convolution(channels, outputs, kernel)
            self.add_module(f"conv{i}", conv)
            self._layers.append((conv, stride))
            height, width = (
                -(-side // stride) if self._same else (side - kernel) // stride + 1 for side in (height, width)
            )
            channels = outputs
            if min(height, width) < 1:
                least = 1
                for _, size, step in reversed(layers):
                    least = (least - 1) * step + size
                raise UserError(
                    f"observations of {inputs[0]}x{inputs[1]} pixels are too small for this encoder: "
                    f"{least} is the least, or set network.padding=same"
                )
            self.shapes.append((height, width, channels))

    def forward(self, x: Tensor, dropout: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; `dropout` holds a mask per layer, 0 or 1 / (1 - p), or nothing."""
        assert x.dim() == 4
        x = x.permute(0, 2, 3, 1)
        for i, (conv, stride) in enumerate(self._layers):
            x = functional.pad_same(x, conv.weight.shape[-1], stride) if self._same else x
            last = i == len(self._layers) - 1  # what is not multiplied next stays in float32
            x = conv_ops.convolve_relu(x, conv.weight, conv.bias, stride, torch.float32 if last else conv.weight.dtype)
            if dropout:
                x = x * dropout[i]
        return functional.renormalise(x)


class _Stage(nn.Module):
    """Impala's: a convolution, a pool that halves the sides, residual blocks of two convolutions each."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Convolution(inputs, outputs, 3)
        self._blocks: list[tuple[Convolution, Convolution]] = []
        for i in range(1, _BLOCKS + 1):
            pair = Convolution(outputs, outputs, 3), Convolution(outputs, outputs, 3)
            for j, conv in enumerate(pair, start=1):
                self.add_module(f"block{i}_conv{j}", conv)
            self._blocks.append(pair)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, H, W, C] to [B, ceil(H / 2), ceil(W / 2), out], in float32 or wider.

        What lies between is rounded to the dtype of products: its traffic is most of what these layers cost.
        """
        product = self.conv.weight.dtype
        x = impala_ops.convolve_pool(x, self.conv.weight, self.conv.bias)
        for first, second in self._blocks:
            x = x.to(product)
            inner = F.relu(_convolved(F.relu(x), first))
            x = x + _convolved(inner, second)
        return x


def _convolved(x: Tensor, conv: Convolution) -> Tensor:
    return impala_ops.convolve_same(x, conv.weight) + conv.bias


class Impala(Encoder):
    """Impala's deep residual encoder (Espeholt et al. 2018), of any width; BBF has width 4."""

    def __init__(self, inputs: Shape, width: int = 1, padding: str = "same") -> None:  # noqa: ARG002
        """Take the shape of an observation, and a factor for all channels. It pads by SAME, whatever is asked for."""
        super().__init__()
        self.shapes = []
        self._stages: list[_Stage] = []
        self._activations = 0
        *sides, channels = inputs
        for i, outputs in enumerate((width * count for count in _STAGES), start=1):
            stage = _Stage(channels, outputs)
            self.add_module(f"stage{i}", stage)
            self._stages.append(stage)
            self._activations += math.prod(sides) * outputs
            sides, channels = [-(-side // 2) for side in sides], outputs
            self._activations += (1 + 2 * _BLOCKS) * math.prod(sides) * outputs
            self.shapes.append((sides[0], sides[1], outputs))

    @property
    def activations(self) -> int:
        """How many numbers are computed on the way from one observation to its latent, for an estimate of memory."""
        return self._activations

    def forward(self, x: Tensor, dropout: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; `dropout` holds a mask per stage, 0 or 1 / (1 - p), or nothing."""
        assert x.dim() == 4
        x = x.permute(0, 2, 3, 1)
        for i, stage in enumerate(self._stages):
            x = stage(x)
            x = F.relu(x) if i == len(self._stages) - 1 else x
            if dropout:
                x = x * dropout[i]
        return impala_ops.renormalise(x)


_ENCODERS: dict[str, Callable[..., Encoder]] = {
    # DQN's (Mnih et al. 2015)
    "standard": partial(ConvEncoder, layers=((32, 8, 4), (64, 4, 2), (64, 3, 1))),
    # Data-Efficient Rainbow's (van Hasselt et al. 2019)
    "data_efficient": partial(ConvEncoder, layers=((32, 5, 5), (64, 5, 5))),
    # MinAtar's (Young and Tian 2019), for frames of ten pixels
    "minatar": partial(ConvEncoder, layers=((16, 3, 1),)),
    "impala": Impala,
}


_BUILT_IN = frozenset(_ENCODERS)


def is_built_in(name: str) -> bool:
    """Say whether an encoder is one of this package's, which look at no values of their tensors."""
    return name in _BUILT_IN


def register(name: str) -> Callable[[Callable[..., Encoder]], Callable[..., Encoder]]:
    """Register a custom encoder as `network.encoder=NAME`: a class or function of an image's shape.

    If it has parameters named `width` or `padding`, the fields of these names are for it too.
    """

    def remember(factory: Callable[..., Encoder]) -> Callable[..., Encoder]:
        if name in _ENCODERS:
            raise UserError(f"an encoder named '{name}' is there already: choose another name")
        _ENCODERS[name] = factory
        return factory

    return remember


def encoder_names() -> list[str]:
    """Return the names of all encoders."""
    return list(_ENCODERS)


def make_encoder(name: str, inputs: Shape, width: int = 1, padding: str = "valid") -> Encoder:
    """Make an encoder for observations of a shape; a width or padding that it does not have is refused."""
    if name not in _ENCODERS:
        hint = did_you_mean(name, _ENCODERS) or "; if a plug-in registers it: --plugin MODULE"
        raise UserError(f"network.encoder must be one of {', '.join(_ENCODERS)}, not '{name}'{hint}")
    factory = _ENCODERS[name]
    known = inspect.signature(factory).parameters
    wanted: dict[str, Any] = {"width": width, "padding": padding}
    asked = {option: value for option, value in wanted.items() if value != _USUAL[option]}
    for option in asked:
        if option not in known:
            usable = [other for other, made in _ENCODERS.items() if option in inspect.signature(made).parameters]
            raise UserError(
                f"network.{option} is not for the encoder '{name}', but for {', '.join(usable)}: "
                f"leave it at {_USUAL[option]}"
            )
    return factory(inputs, **asked)


@cache
def _planned(name: str, inputs: Shape, width: int, padding: str) -> Encoder:
    with torch.device("meta"):
        return make_encoder(name, inputs, width, padding)


def encoder_shapes(name: str, inputs: Shape, width: int = 1, padding: str = "valid") -> tuple[Shape, ...]:
    """Return the shapes after each layer, without making any weights."""
    return tuple(_planned(name, inputs, width, padding).shapes)


def encoder_activations(name: str, inputs: Shape, width: int = 1, padding: str = "valid") -> int:
    """Return how many numbers are computed for one observation, without making any weights."""
    return _planned(name, inputs, width, padding).activations
