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

LATENT = (64, 7, 7)
LATENT_SIZE = math.prod(LATENT)
DROPOUT_SHAPES = ((32, 20, 20), (64, 9, 9), LATENT)  # the encoder's activations, one mask each


class LayerNoise(NamedTuple):
    """Standard normal draws for one noisy layer, before the signed square root."""

    input: Tensor  # [in]
    output: Tensor  # [out]


class HeadNoise(NamedTuple):
    """One draw of the whole Q-head's noise."""

    value_hidden: LayerNoise | None
    value_out: LayerNoise | None
    advantage_hidden: LayerNoise | None
    advantage_out: LayerNoise | None


NO_NOISE = HeadNoise(None, None, None, None)


def head_sizes(config: NetworkConfig, actions: int) -> HeadNoise:
    """Return (inputs, outputs) of each noisy layer, as empty tensors in the form of its noise."""

    def layer(inputs: int, outputs: int) -> LayerNoise:
        return LayerNoise(torch.empty(inputs, device="meta"), torch.empty(outputs, device="meta"))

    hidden, atoms = config.hidden, config.atoms
    return HeadNoise(
        layer(LATENT_SIZE, hidden), layer(hidden, atoms), layer(LATENT_SIZE, hidden), layer(hidden, actions * atoms)
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


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve [B, C, H, W] to [B, out, H', W'] the way the device does it best.

    A CPU has fast convolutions. On a GPU a fleet's convolutions are grouped ones, which were slow in cuDNN (H200, fleet
    of 10), so there it is one matrix product followed by a sum of shifted slices.
    """
    if x.device.type == "cpu":
        return F.conv2d(x, weight, bias, stride, padding)
    return shift_and_add(x, weight, bias, stride, padding)


def shift_and_add(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Convolve by one matrix product: every tap's product at every place, then shifted so that taps meet, and summed.

    A stride is folded into the channels first (blocks of stride x stride pixels become one place), so that no product
    is computed that the convolution would not. Unlike patches, nothing overlaps: the gradient needs no atomic addition.
    Padding is added to the products, so that none is computed for it. The kernel must be a multiple of the stride.
    """
    out, channels, kernel, _ = weight.shape
    batch, _, height, width = x.shape
    taps, rows, columns = kernel // stride, height // stride, width // stride
    blocks = x.reshape(batch, channels, rows, stride, columns, stride).permute(0, 2, 4, 1, 3, 5)
    mixed = weight.reshape(out, channels, taps, stride, taps, stride).permute(1, 3, 5, 2, 4, 0)
    blocks = blocks.reshape(batch * rows * columns, -1).to(weight.dtype)
    products = blocks @ mixed.reshape(channels * stride**2, -1)
    products = F.pad(products.view(batch, rows, columns, taps, taps, out), (0,) * 6 + (padding,) * 4)
    high, wide = rows + 2 * padding - taps + 1, columns + 2 * padding - taps + 1
    shifted = [widened(products[:, i : i + high, j : j + wide, i, j]) for i in range(taps) for j in range(taps)]
    y = sum(shifted[1:], shifted[0])
    return (y if bias is None else y + bias).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """f: observations [B, 4, 84, 84] in [0, 1] (augmentation may exceed it) -> latents [B, 64, 7, 7] in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(STACK, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)

    def forward(self, x: Tensor, keep: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; with dropout on, `keep` holds a mask per layer: 0, or 1 / (1 - p)."""
        for i, conv in enumerate((self.conv1, self.conv2, self.conv3)):
            x = F.relu(convolve(x, conv.weight, conv.bias, conv.stride[0]))
            if keep:
                x = x * keep[i]
        return renormalise(x)


class TransitionModel(nn.Module):
    """h: (latents [B, 64, 7, 7], planes of actions [B, 64, 7, 7]) -> predicted next latents [B, 64, 7, 7]."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.conv1 = nn.Conv2d(LATENT[0] + actions, LATENT[0], 3, padding=1)
        self.bn = nn.BatchNorm2d(LATENT[0], track_running_stats=False)
        self.conv2 = nn.Conv2d(LATENT[0], LATENT[0], 3, padding=1)

    def planes(self, action: Tensor) -> Tensor:
        """Return what the first convolution makes of actions [B], [B, 64, 7, 7].

        An action counts as one constant plane per possible action, appended to the latent. The planes are not built:
        convolved, a plane of ones is the sum of the taps inside. With them the matrix product would be 64 + A channels
        wide, which is rarely a multiple of what a GPU aligns to.
        """
        weight = widened(self.conv1.weight[:, LATENT[0] :])  # [64, A, 3, 3]
        inside = F.unfold(weight.new_ones(1, 1, *LATENT[1:]), 3, padding=1)[0]  # [9, 49], 0 where a tap is outside
        table = weight.transpose(0, 1).reshape(-1, 9) @ inside  # [A * 64, 49]
        # Comparing with a range, not F.one_hot: that one reads the data on the host, which no graph can capture.
        one_hot = (action[:, None] == torch.arange(self.actions, device=action.device)).to(table.dtype)
        return (one_hot @ table.view(self.actions, -1)).view(-1, *LATENT)

    def forward(self, z: Tensor, planes: Tensor) -> Tensor:
        """Predict one step, given what `planes` makes of the actions."""
        latent = self.conv1.weight[:, : LATENT[0]]
        x = F.relu(convolve(z, latent, self.conv1.bias, padding=1) + planes)
        # Written out because the library's batch norm refuses, under vmap on a GPU, the layout that `convolve` returns.
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        x = (x - mean) * (variance + self.bn.eps).rsqrt() * self.bn.weight[:, None, None] + self.bn.bias[:, None, None]
        return renormalise(F.relu(convolve(x, self.conv2.weight, self.conv2.bias, padding=1)))


class NoisyLinear(nn.Module):
    """Linear layer with factorised Gaussian noise (Fortunato et al. 2018); without noise, its mean alone."""

    def __init__(self, inputs: int, outputs: int, sigma: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma / math.sqrt(inputs)))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(outputs)))

    def forward(self, x: Tensor, noise: LayerNoise | None = None) -> Tensor:
        """Map [B, in] to [B, out].

        The noisy weight mean + sigma * outer(e_out, e_in) is never formed: its product with x is the mean's plus
        e_out * (sigma @ (e_in * x)), which spares a pass over the largest matrices of the agent.
        """
        mean = linear(x, self.weight, self.bias)
        if noise is None:
            return mean
        e_in, e_out = (e.sign() * e.abs().sqrt() for e in noise)
        return mean + e_out * linear(x * e_in, self.weight_sigma, self.bias_sigma)


class QHead(nn.Module):
    """Dueling categorical head: flat latents [B, 3136] -> logits [B, A, Z]; its hidden layers are the projection g."""

    def __init__(self, config: NetworkConfig, actions: int) -> None:
        super().__init__()
        self.actions, self.atoms = actions, config.atoms
        self.value_hidden = NoisyLinear(LATENT_SIZE, config.hidden, config.noise)
        self.value_out = NoisyLinear(config.hidden, config.atoms, config.noise)
        self.advantage_hidden = NoisyLinear(LATENT_SIZE, config.hidden, config.noise)
        self.advantage_out = NoisyLinear(config.hidden, actions * config.atoms, config.noise)

    def forward(self, z: Tensor, noise: HeadNoise = NO_NOISE) -> Tensor:
        """Return logits of the return distribution of every action."""
        value: Tensor = self.value_out(F.relu(self.value_hidden(z, noise.value_hidden)), noise.value_out)
        hidden = F.relu(self.advantage_hidden(z, noise.advantage_hidden))
        advantage: Tensor = self.advantage_out(hidden, noise.advantage_out).view(-1, self.actions, self.atoms)
        return value[:, None, :] + advantage - advantage.mean(1, keepdim=True)

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, 3136] -> projections [B, 2 * hidden], by the mean weights, without ReLU."""
        return torch.cat([self.value_hidden(z), self.advantage_hidden(z)], 1)


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

    def forward(self, obs: Tensor, noise: HeadNoise = NO_NOISE) -> Tensor:
        """Return Q-values [B, A] of observations [B, 4, 84, 84]."""
        logits = self.head(self.encoder(obs).flatten(1), noise)
        return expected_value(logits.softmax(-1), self.support)


def expected_value(probabilities: Tensor, support: Tensor) -> Tensor:
    """Return the mean of distributions [..., Z] over the atoms [Z]."""
    mean: Tensor = (probabilities * support).sum(-1)
    return mean
