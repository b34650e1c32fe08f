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
from torch.utils._pytree import tree_map

from spr.config import ENCODERS, SIDE, STACK, Config

_PROJECTED, _MLP_HIDDEN = 128, 256  # CURL's own head


class LayerNoise(NamedTuple):
    """Standard normal draws for one noisy layer, before the signed square root."""

    input: Tensor  # [streams, in]
    output: Tensor  # [out]


class HeadNoise(NamedTuple):
    """One draw of the whole Q-head's noise."""

    hidden: LayerNoise
    value: LayerNoise | tuple[()]  # nothing without dueling streams
    advantage: LayerNoise


def activation_shapes(encoder: str) -> list[tuple[int, int, int]]:
    """Return (height, width, channels) after each convolution of an encoder; the last is the latent."""
    shapes, side = [], SIDE
    for channels, kernel, stride in ENCODERS[encoder]:
        side = (side - kernel) // stride + 1
        shapes.append((side, side, channels))
    return shapes


def outputs_per_action(config: Config) -> int:
    """Z: the atoms of a return distribution, or 1 where Q-values are learnt directly."""
    return config.network.atoms if config.learner.value == "categorical" else 1


Noise = HeadNoise | tuple[()]  # nothing where the Q-head is not noisy, or acts without noise


def head_sizes(config: Config, actions: int) -> Noise:
    """Return the shapes of the Q-head's noise, as empty tensors."""
    network = config.network
    if not network.noisy:
        return ()

    def layer(inputs: int, outputs: int, streams: int = 1) -> LayerNoise:
        return LayerNoise(torch.empty(streams, inputs, device="meta"), torch.empty(outputs, device="meta"))

    atoms, streams = outputs_per_action(config), 2 if network.dueling else 1
    latent = math.prod(activation_shapes(network.encoder)[-1])
    return HeadNoise(
        layer(latent, streams * network.hidden, streams),
        layer(network.hidden, atoms) if network.dueling else (),
        layer(network.hidden, actions * atoms),
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | int) -> Tensor:
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
    blocks = x[:, : rows * stride, : columns * stride].reshape(batch, rows, stride, columns, stride, channels)
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
    """f: observations [B, 4, 84, 84] in [0, 1] (augmentation may exceed it) -> latents [B, H, W, C] in [0, 1]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers: list[tuple[Convolution, int]] = []
        inputs = STACK
        for i, (outputs, kernel, stride) in enumerate(ENCODERS[kind], start=1):
            conv = Convolution(inputs, outputs, kernel)
            self.add_module(f"conv{i}", conv)
            self.layers.append((conv, stride))
            inputs = outputs

    def forward(self, x: Tensor, keep: tuple[Tensor, ...] = ()) -> Tensor:
        """Encode; with dropout on, `keep` holds a mask per layer: 0, or 1 / (1 - p)."""
        x = x.permute(0, 2, 3, 1)
        for i, (conv, stride) in enumerate(self.layers):
            x = F.relu(convolve(x, conv.weight, stride) + conv.bias)
            if keep:
                x = x * keep[i]
        return renormalise(x)


class TransitionModel(nn.Module):
    """h: (latents [B, H, W, C], planes of actions [B, H, W, C]) -> predicted next latents [B, H, W, C]."""

    def __init__(self, latent: tuple[int, int, int], actions: int) -> None:
        super().__init__()
        self.latent, self.actions = latent, actions
        channels = latent[-1]
        self.conv1 = Convolution(channels + actions, channels, 3)
        self.bn = nn.BatchNorm2d(channels, track_running_stats=False)
        self.conv2 = Convolution(channels, channels, 3)

    def planes(self, action: Tensor) -> Tensor:
        """Return what the first convolution makes of actions [B], with its bias: [B, H, W, C].

        An action counts as one constant plane per possible action, appended to the latent. The planes are not built:
        convolved, a plane of ones is the sum of the taps inside. With them the matrix product would be C + A channels
        wide, which is rarely a multiple of what a GPU aligns to.
        """
        *sides, channels = self.latent
        weight = widened(self.conv1.weight[:, channels:])  # [C, A, 3, 3]
        inside = F.unfold(weight.new_ones(1, 1, *sides), 3, padding=1)[0]  # [9, H * W], 0 where a tap is outside
        table = inside.T @ weight.permute(2, 3, 1, 0).reshape(9, -1)  # [H * W, A * C]
        table = table.view(-1, self.actions, channels).transpose(0, 1).flatten(1)  # [A, H * W * C]
        # Comparing with a range, not F.one_hot: that one reads the data on the host, which no graph can capture.
        one_hot = (action[:, None] == torch.arange(self.actions, device=action.device)).to(table.dtype)
        return (one_hot @ table).view(-1, *self.latent) + self.conv1.bias

    def forward(self, z: Tensor, planes: Tensor) -> Tensor:
        """Predict one step, given what `planes` makes of the actions."""
        x = F.relu(convolve(z, self.conv1.weight[:, : self.latent[-1]], padding=1) + planes)
        # Written out because the library's batch norm wants channels first, and so that its gradient takes two sums:
        # that of the library's variance sums x once more. What this form of it loses in digits is far below eps.
        mean, square = x.mean((0, 1, 2)), x.square().mean((0, 1, 2))
        variance = (square - mean.square()).clamp(min=0)
        scale = self.bn.weight * (variance + self.bn.eps).rsqrt()
        x = x * scale + (self.bn.bias - mean * scale)
        return renormalise(F.relu(convolve(x, self.conv2.weight, padding=1) + self.conv2.bias))


class NoisyLinear(nn.Module):
    """Linear layer with factorised Gaussian noise (Fortunato et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, sigma: float | None, streams: int = 1) -> None:
        """Initialise as in that paper; the outputs may be those of several equal layers side by side.

        Without a sigma it is a plain linear layer, which has the same initialisation.
        """
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        if sigma is None:
            return
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
    """Q-head: flat latents [B, L] -> outputs [B, A, Z], in dueling streams or one; its hidden layer projects."""

    def __init__(self, config: Config, actions: int) -> None:
        super().__init__()
        network = config.network
        self.actions, self.atoms = actions, outputs_per_action(config)
        self.streams = 2 if network.dueling else 1  # value and advantage, in this order
        sigma = network.noise if network.noisy else None
        latent = math.prod(activation_shapes(network.encoder)[-1])
        self.hidden = NoisyLinear(latent, self.streams * network.hidden, sigma, self.streams)
        if network.dueling:
            self.value = NoisyLinear(network.hidden, self.atoms, sigma)
        self.advantage = NoisyLinear(network.hidden, actions * self.atoms, sigma)

    def forward(self, z: Tensor, noise: Noise) -> Tensor:
        """Return the outputs [G, B, A, Z] of every action under G draws of noise, or [1, B, A, Z] without any."""
        if not noise:
            *value, advantage = F.relu(self.project(z)).chunk(self.streams, -1)
            return self._joined([self.value.mean(v) for v in value], self.advantage.mean(advantage))[None]
        *value, advantage = F.relu(self.hidden.unformed(z, noise.hidden)).chunk(self.streams, -1)
        return self._joined([self.value(v, noise.value) for v in value], self.advantage(advantage, noise.advantage))

    def _joined(self, value: list[Tensor], advantage: Tensor) -> Tensor:
        advantage = advantage.unflatten(-1, (self.actions, self.atoms))
        if not value:
            return advantage
        return value[0][..., None, :] + advantage - advantage.mean(-2, keepdim=True)

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, L] -> projections [B, streams * hidden], by the mean weights, without ReLU."""
        return self.hidden.mean(z)


class MLP(nn.Module):
    """CURL's projection: two linear layers, each followed by layer normalisation, with a ReLU between them."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(inputs, _MLP_HIDDEN)
        self.norm1 = nn.LayerNorm(_MLP_HIDDEN)
        self.linear2 = nn.Linear(_MLP_HIDDEN, _PROJECTED)
        self.norm2 = nn.LayerNorm(_PROJECTED)

    def forward(self, z: Tensor) -> Tensor:
        """Map flat latents [B, L] to projections [B, 128]."""
        y = F.relu(self.norm1(linear(z, self.linear1.weight, self.linear1.bias)))
        projected: Tensor = self.norm2(linear(y, self.linear2.weight, self.linear2.bias))
        return projected


class Networks(nn.Module):
    """All networks of one agent; its forward is what acting needs: observations -> Q-values."""

    support: Tensor

    def __init__(self, config: Config, actions: int) -> None:
        super().__init__()
        network = config.network
        latent = activation_shapes(network.encoder)[-1]
        self.categorical = config.learner.value == "categorical"
        self.projection = network.projection
        self.encoder = Encoder(network.encoder)
        self.head = QHead(config, actions)
        if config.transition:
            self.transition = TransitionModel(latent, actions)
        if config.targets and network.projection == "mlp":
            self.mlp = MLP(math.prod(latent))
            self.predictor = nn.Linear(_PROJECTED, _PROJECTED, bias=False)  # CURL's bilinear form
        if config.targets and network.projection == "head":
            size = self.head.streams * network.hidden
            self.predictor = nn.Linear(size, size)
        # A constant, kept out of the state: every agent of a fleet shares it.
        self.register_buffer(
            "support", torch.linspace(network.v_min, network.v_max, network.atoms, device="cpu"), persistent=False
        )

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, L] -> what the representation loss compares, [B, D]."""
        if self.projection == "none":
            return z
        projected: Tensor = self.mlp(z) if self.projection == "mlp" else self.head.project(z)
        return projected

    def predict(self, y: Tensor) -> Tensor:
        """q: projections [B, D] -> predicted target projections, [B, D]."""
        if self.projection == "none":
            return y
        bias = self.predictor.bias
        return linear(y, self.predictor.weight, 0 if bias is None else bias)

    def q_values(self, outputs: Tensor) -> Tensor:
        """Return Q-values [...] of the head's outputs [..., Z]."""
        if not self.categorical:
            return outputs.squeeze(-1)
        return expected_value(outputs.softmax(-1), self.support.to(outputs.dtype))

    def forward(self, obs: Tensor, noise: Noise = ()) -> Tensor:
        """Return Q-values [B, A] of observations [B, 4, 84, 84], under one draw of noise or none."""
        group = tree_map(lambda e: e[None], noise)
        return self.q_values(self.head(self.encoder(obs).flatten(1), group)[0])


def expected_value(probabilities: Tensor, support: Tensor) -> Tensor:
    """Return the mean of distributions [..., Z] over the atoms [Z]."""
    mean: Tensor = (probabilities * support).sum(-1)
    return mean
