"""Owns the networks of one agent: encoder, transition model, noisy dueling Q-head with its projection, predictor.

Written for a single agent, as in the paper (Schwarzer et al. 2021, section 2); nothing here knows that fleets exist.
Everything random (network noise, dropout masks) is an argument. Shapes: B batch, A actions, Z atoms.
Precision has one rule: matrix products are taken in the dtype of their weight, and everything between them (biases,
normalisation, activations) in float32 or wider.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spr.config import STACK, NetworkConfig

LATENT = (7, 7, 64)
LATENT_SIZE = math.prod(LATENT)
CHANNELS = LATENT[-1]
DROPOUT_SHAPES = ((20, 20, 32), (9, 9, 64), LATENT)  # the encoder's activations, one mask each
STREAMS = 2  # of the Q-head: value and advantage, in this order


class LayerNoise(NamedTuple):
    """Standard normal draws for one noisy layer, before the signed square root."""

    input: Tensor  # [streams, in]
    output: Tensor  # [out]


class HeadNoise(NamedTuple):
    """One draw of the whole Q-head's noise."""

    hidden: LayerNoise
    value: LayerNoise
    advantage: LayerNoise


def head_sizes(config: NetworkConfig, actions: int) -> HeadNoise:
    """Return the shapes of the Q-head's noise, as empty tensors."""

    def layer(inputs: int, outputs: int, streams: int = 1) -> LayerNoise:
        return LayerNoise(torch.empty(streams, inputs, device="meta"), torch.empty(outputs, device="meta"))

    hidden, atoms = config.hidden, config.atoms
    return HeadNoise(
        layer(LATENT_SIZE, STREAMS * hidden, STREAMS), layer(hidden, atoms), layer(hidden, actions * atoms)
    )


def widened(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def renormalise(x: Tensor) -> Tensor:
    """Scale each sample of [B, ...] to [0, 1] over all its values, in float32 or wider."""
    flat = widened(x).flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=1e-5)).view(x.shape)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged, with its gradient multiplied by factor."""
    return x * factor + x.detach() * (1 - factor)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x @ weight.T + bias, as F.linear does, but such that the gradient of the weight needs no transposing.

    Under vmap F.linear gives that gradient transposed, and laying it out again costs more than computing it.
    """
    return widened((weight @ x.to(weight.dtype).mT).mT) + bias


def convolve(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve [B, H, W, C] to [B, H', W', out], without a bias, the way the device does it best.

    A CPU has fast convolutions. On a GPU a fleet's convolutions are grouped ones, which were slow in cuDNN (H200, fleet
    of 10), so there it is a matrix product between two shifts.
    """
    if x.device.type == "cpu":
        return F.conv2d(x.permute(0, 3, 1, 2), weight, None, stride, padding).permute(0, 2, 3, 1)
    return shift_and_add(x, weight, stride, padding)


def shift_and_add(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve by one matrix product: every tap's product at every place, then shifted so that taps meet, and added.

    Unlike patches this lays nothing out several times, and no gradient needs atomic addition. With three taps the nine
    products would be most of the traffic, so there neighbours in a row are joined before the product and only rows of
    products added after it. A stride is folded into the channels first (blocks of stride x stride pixels become one
    place). The kernel must be a multiple of the stride.
    """
    out, channels, kernel, _ = weight.shape
    batch, height, width, _ = x.shape
    taps, rows, columns = kernel // stride, height // stride, width // stride
    high, wide = rows + 2 * padding - taps + 1, columns + 2 * padding - taps + 1
    blocks = x.reshape(batch, rows, stride, columns, stride, channels)
    mixed = weight.reshape(out, channels, taps, stride, taps, stride).permute(2, 4, 0, 1, 3, 5)
    if x.stride(3) == 1:  # a block's channels are laid out in the order in which memory has them
        blocks, mixed = blocks.permute(0, 1, 3, 2, 4, 5), mixed.permute(0, 1, 2, 4, 5, 3)
    else:
        blocks = blocks.permute(0, 1, 3, 5, 2, 4)
    blocks = F.pad(blocks.flatten(3), (0, 0, padding, padding)).to(weight.dtype)  # [B, rows, columns, channels]
    mixed = mixed.flatten(3)  # [taps down, taps right, out, channels]
    right = taps
    if taps > 2:
        blocks = torch.cat([blocks[:, :, j : j + wide] for j in range(taps)], -1)
        mixed, right = mixed.permute(0, 2, 1, 3).flatten(2)[:, None], 1
    products = (blocks.flatten(0, 2) @ mixed.flatten(0, 2).T).view(batch, rows, -1, taps, right, out)
    added = []
    for i in range(taps):
        # Rows of padding need no product: where a tap would meet them it adds nothing.
        above, below = max(padding - i, 0), max(i + high - padding - rows, 0)
        met = products[:, max(i - padding, 0) : i - padding + high, :, i]
        added += [F.pad(widened(met[:, :, j : j + wide, j]), (0, 0, 0, 0, above, below)) for j in range(right)]
    return sum(added[1:], added[0])


class Convolution(nn.Module):
    """The weights of a convolution, initialised as the library does."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs * kernel**2)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))


class Encoder(nn.Module):
    """f: observations [B, 4, 84, 84] in [0, 1] (augmentation may exceed it) -> latents [B, 7, 7, 64] in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = Convolution(STACK, 32, 8)
        self.conv2 = Convolution(32, 64, 4)
        self.conv3 = Convolution(64, CHANNELS, 3)

    def forward(self, x: Tensor, keep: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; with dropout on, `keep` holds a mask per layer: 0, or 1 / (1 - p)."""
        x = x.permute(0, 2, 3, 1)
        for i, (conv, stride) in enumerate(((self.conv1, 4), (self.conv2, 2), (self.conv3, 1))):
            x = F.relu(convolve(x, conv.weight, stride) + conv.bias)
            if keep:
                x = x * keep[i]
        return renormalise(x)


class TransitionModel(nn.Module):
    """h: (latents [B, 7, 7, 64], planes of actions [B, 7, 7, 64]) -> predicted next latents [B, 7, 7, 64]."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.conv1 = Convolution(CHANNELS + actions, CHANNELS, 3)
        self.bn = nn.BatchNorm2d(CHANNELS, track_running_stats=False)
        self.conv2 = Convolution(CHANNELS, CHANNELS, 3)

    def planes(self, action: Tensor) -> Tensor:
        """Return what the first convolution makes of actions [B], with its bias: [B, 7, 7, 64].

        An action counts as one constant plane per possible action, appended to the latent. The planes are not built:
        convolved, a plane of ones is the sum of the taps inside. With them the matrix product would be 64 + A channels
        wide, which is rarely a multiple of what a GPU aligns to.
        """
        weight = widened(self.conv1.weight[:, CHANNELS:])  # [64, A, 3, 3]
        inside = F.unfold(weight.new_ones(1, 1, *LATENT[:2]), 3, padding=1)[0]  # [9, 49], 0 where a tap is outside
        table = inside.T @ weight.permute(2, 3, 1, 0).reshape(9, -1)  # [49, A * 64]
        table = table.view(-1, self.actions, CHANNELS).transpose(0, 1).flatten(1)  # [A, 49 * 64]
        # Comparing with a range, not F.one_hot: that one reads the data on the host, which no graph can capture.
        one_hot = (action[:, None] == torch.arange(self.actions, device=action.device)).to(table.dtype)
        return (one_hot @ table).view(-1, *LATENT) + self.conv1.bias

    def forward(self, z: Tensor, planes: Tensor) -> Tensor:
        """Predict one step, given what `planes` makes of the actions."""
        x = F.relu(convolve(z, self.conv1.weight[:, :CHANNELS], padding=1) + planes)
        # Written out because the library's batch norm wants channels first, and so that its gradient takes two sums.
        variance, mean = torch.var_mean(x, (0, 1, 2), correction=0)
        scale = self.bn.weight * (variance + self.bn.eps).rsqrt()
        x = x * scale + (self.bn.bias - mean * scale)
        return renormalise(F.relu(convolve(x, self.conv2.weight, padding=1) + self.conv2.bias))


class NoisyLinear(nn.Module):
    """Linear layer with factorised Gaussian noise (Fortunato et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, sigma: float, streams: int = 1) -> None:
        """Initialise as in that paper; the outputs may be those of several equal layers side by side."""
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma / math.sqrt(inputs)))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(outputs // streams)))

    def mean(self, x: Tensor) -> Tensor:
        """Map [B, in] to [B, out] by the mean weights."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor, noise: LayerNoise) -> Tensor:
        """Map [G, B, in] to [G, B, out], each group under its own draw of noise (of one stream)."""
        e_in, e_out = _signed_root(noise.input), _signed_root(noise.output)  # [G, 1, in], [G, out]
        weight = self.weight + self.weight_sigma * (e_out[:, :, None] * e_in)  # [G, out, in]
        return linear(x, weight, (self.bias + self.bias_sigma * e_out)[:, None])

    def unformed(self, x: Tensor, noise: LayerNoise) -> Tensor:
        """Map [B, in] to [G, B, out] under G draws of noise, without forming a noisy weight.

        Its product with x is the mean's plus e_out * (sigma @ (e_in * x)), which spares passes over a large matrix. The
        outputs are those of several streams side by side, each with noise of its own on the inputs.
        """
        e_in, e_out = _signed_root(noise.input), _signed_root(noise.output)  # [G, streams, in], [G, out]
        groups, streams, _ = e_in.shape
        noisy = (x * e_in.transpose(0, 1)[:, :, None]).flatten(1, 2)  # [streams, G * B, in]
        sigma = self.weight_sigma.unflatten(0, (streams, -1))
        product = widened(sigma @ noisy.to(sigma.dtype).mT)  # [streams, out / streams, G * B]
        product = product.flatten(0, 1).mT.unflatten(0, (groups, -1))
        noised: Tensor = self.mean(x) + e_out[:, None] * (product + self.bias_sigma)
        return noised


def _signed_root(e: Tensor) -> Tensor:
    return e.sign() * e.abs().sqrt()


class QHead(nn.Module):
    """Dueling categorical head: flat latents [B, 3136] -> logits [B, A, Z]; its hidden layer is the projection g."""

    def __init__(self, config: NetworkConfig, actions: int) -> None:
        super().__init__()
        self.actions, self.atoms = actions, config.atoms
        self.hidden = NoisyLinear(LATENT_SIZE, STREAMS * config.hidden, config.noise, STREAMS)
        self.value = NoisyLinear(config.hidden, config.atoms, config.noise)
        self.advantage = NoisyLinear(config.hidden, actions * config.atoms, config.noise)

    def forward(self, z: Tensor, noise: HeadNoise) -> Tensor:
        """Return the logits [G, B, A, Z] of the return of every action, under G draws of noise."""
        value, advantage = F.relu(self.hidden.unformed(z, noise.hidden)).chunk(STREAMS, -1)
        return self._dueling(self.value(value, noise.value), self.advantage(advantage, noise.advantage))

    def mean(self, z: Tensor) -> Tensor:
        """Return the logits [B, A, Z] without noise."""
        value, advantage = F.relu(self.project(z)).chunk(STREAMS, -1)
        return self._dueling(self.value.mean(value), self.advantage.mean(advantage))

    def _dueling(self, value: Tensor, advantage: Tensor) -> Tensor:
        advantage = advantage.unflatten(-1, (self.actions, self.atoms))
        return value[..., None, :] + advantage - advantage.mean(-2, keepdim=True)

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, 3136] -> projections [B, 2 * hidden], by the mean weights, without ReLU."""
        return self.hidden.mean(z)


class Networks(nn.Module):
    """All networks of one agent; its forward is what acting needs: observations -> Q-values."""

    support: Tensor

    def __init__(self, config: NetworkConfig, actions: int, with_model: bool) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = QHead(config, actions)
        if with_model:
            self.transition = TransitionModel(actions)
            self.predictor = nn.Linear(2 * config.hidden, 2 * config.hidden)
        # A constant, kept out of the state: every agent of a fleet shares it.
        self.register_buffer(
            "support", torch.linspace(config.v_min, config.v_max, config.atoms, device="cpu"), persistent=False
        )

    def predict(self, y: Tensor) -> Tensor:
        """q: projections [B, 2 * hidden] -> predicted target projections, [B, 2 * hidden]."""
        return linear(y, self.predictor.weight, self.predictor.bias)

    def forward(self, obs: Tensor, noise: HeadNoise | None = None) -> Tensor:
        """Return Q-values [B, A] of observations [B, 4, 84, 84], under one draw of noise or none."""
        z = self.encoder(obs).flatten(1)
        if noise is None:
            logits = self.head.mean(z)
        else:
            group = HeadNoise(*(LayerNoise(layer.input[None], layer.output[None]) for layer in noise))
            logits = self.head(z, group)[0]
        return expected_value(logits.softmax(-1), self.support)


def expected_value(probabilities: Tensor, support: Tensor) -> Tensor:
    """Return the mean of distributions [..., Z] over the atoms [Z]."""
    mean: Tensor = (probabilities * support).sum(-1)
    return mean
