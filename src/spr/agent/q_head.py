"""Owns the Q-head: noisy layers, dueling streams, and the outputs for every action.

Shapes: B batch, A actions, Z atoms, G draws of noise, L numbers of a flat latent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spr.agent.action_padding import ActionMask
from spr.agent.encoders import encoder_shapes
from spr.config.config import Config, Shape
from spr.ops import functional


class LayerNoise(NamedTuple):
    """Standard normal draws for one noisy layer, before the signed square root."""

    input: Tensor  # [streams, in]
    output: Tensor  # [out]


class HeadNoise(NamedTuple):
    """One draw of the whole Q-head's noise."""

    hidden: LayerNoise
    value: LayerNoise | tuple[()]  # nothing without dueling streams
    advantage: LayerNoise


Noise = HeadNoise | tuple[()]  # nothing where the Q-head is not noisy, or acts without noise


def latent_shape(config: Config) -> Shape:
    """Return (height, width, channels) of a latent."""
    return encoder_shapes(*config.encoder_arguments)[-1]


def hidden_layers(config: Config) -> int:
    """Return how many hidden layers of the Q-head lie side by side: those of value and advantage, or one for both."""
    return 2 if config.network.dueling and not config.network.shared_hidden else 1


def outputs_per_action(config: Config) -> int:
    """Z: the atoms of a return distribution, or 1 where Q-values are learnt directly."""
    return config.network.atoms if config.learner.rl_loss == "categorical" else 1


def num_actions_of(config: Config, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many actions an agent chooses between, from the shapes of its parameters by name."""
    return shapes["head.advantage.bias"][-1] // outputs_per_action(config)


def noise_shapes(config: Config, num_actions: int) -> Noise:
    """Return the shapes of the Q-head's noise, as empty tensors."""
    network = config.network
    if not network.noisy:
        return ()

    def layer(inputs: int, outputs: int, streams: int = 1) -> LayerNoise:
        return LayerNoise(torch.empty(streams, inputs, device="meta"), torch.empty(outputs, device="meta"))

    atoms, streams = outputs_per_action(config), hidden_layers(config)
    return HeadNoise(
        layer(math.prod(latent_shape(config)), streams * network.hidden, streams),
        layer(network.hidden, atoms) if network.dueling else (),
        layer(network.hidden, num_actions * atoms),
    )


class NoisyLinear(nn.Module):
    """Linear layer with factorised Gaussian noise (Fortunato et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, sigma: float | None, streams: int = 1) -> None:
        """Initialise as in that paper; the outputs may be those of several equal layers side by side.

        Without a sigma it is a plain linear layer, which has the same initialisation.
        """
        super().__init__()
        self.streams = streams
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.noisy = sigma is not None
        if sigma is None:
            return
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma / math.sqrt(inputs)))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(outputs // streams)))

    def mean_parameters(self) -> list[nn.Parameter]:
        """Return what the layer is without noise."""
        return [self.weight, self.bias]

    def sigma_parameters(self) -> list[nn.Parameter]:
        """Return the scales of the noise; none in a plain linear layer."""
        return [self.weight_sigma, self.bias_sigma] if self.noisy else []

    def mean(self, x: Tensor) -> Tensor:
        """Map [B, in] to [B, out] by the mean weights."""
        return functional.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor, noise: LayerNoise) -> Tensor:
        """Map [G, B, in] to [G, B, out], each group under its own draw of noise (of one stream)."""
        assert x.dim() == 3
        e_in, e_out = _signed_root(noise.input), _signed_root(noise.output)  # [G, 1, in], [G, out]
        weight = self.weight + self.weight_sigma * (e_out[:, :, None] * e_in)  # [G, out, in]
        return functional.linear(x, weight, (self.bias + self.bias_sigma * e_out)[:, None])

    def factorised(self, x: Tensor, noise: LayerNoise) -> Tensor:
        """Map [B, in] to [G, B, out] under G draws of noise, without forming a noisy weight.

        Its product with x is the mean's plus e_out * (sigma @ (e_in * x)), which spares passes over a large matrix. The
        outputs are those of several streams side by side, each with noise of its own on the inputs.
        """
        assert x.dim() == 2
        e_in, e_out = _signed_root(noise.input), _signed_root(noise.output)  # [G, streams, in], [G, out]
        groups, streams, _ = e_in.shape
        noisy = (x * e_in.transpose(0, 1)[:, :, None]).flatten(1, 2)  # [streams, G * B, in]
        sigma = self.weight_sigma.unflatten(0, (streams, -1))
        if functional.on_cpu(noisy):
            product = torch.cat([functional.linear(*stream, None) for stream in zip(noisy, sigma, strict=True)], -1)
            product = product.unflatten(0, (groups, -1))
        else:
            product = functional.at_least_fp32(sigma @ noisy.to(sigma.dtype).mT)  # [streams, out / streams, G * B]
            product = product.flatten(0, 1).mT.unflatten(0, (groups, -1))
        noised: Tensor = self.mean(x) + e_out[:, None] * (product + self.bias_sigma)
        return noised


def _signed_root(e: Tensor) -> Tensor:
    return e.sign() * e.abs().sqrt()


class QHead(nn.Module):
    """Q-head: flat latents [B, L] -> outputs [B, A, Z], in dueling streams or one; its hidden layer projects.

    Dueling streams have a hidden layer each, or share one.
    """

    def __init__(self, config: Config, num_actions: int) -> None:
        super().__init__()
        network = config.network
        self.num_actions, self.atoms = num_actions, outputs_per_action(config)
        self.dueling, self.streams = network.dueling, hidden_layers(config)  # of value and advantage, in this order
        self.width = self.streams * network.hidden  # of a projection
        # Dueling networks' convention: two streams flow back into the encoder, so each counts 1/sqrt(2).
        self.gradient_scale = 1 / math.sqrt(self.streams)
        sigma = network.noisy_sigma0 if network.noisy else None
        self.hidden = NoisyLinear(math.prod(latent_shape(config)), self.width, sigma, self.streams)
        if network.dueling:
            self.value = NoisyLinear(network.hidden, self.atoms, sigma)
        self.advantage = NoisyLinear(network.hidden, num_actions * self.atoms, sigma)

    def forward(self, z: Tensor, noise: Noise, action_mask: ActionMask = None) -> Tensor:
        """Return the outputs [G, B, A, Z] of every action under G draws of noise, or [1, B, A, Z] without any."""
        if not noise:
            hidden = F.relu(self.project(z)).chunk(self.streams, -1)
            value = self.value.mean(hidden[0]) if self.dueling else None
            return self._joined(value, self.advantage.mean(hidden[-1]), action_mask)[None]
        hidden = F.relu(self.hidden.factorised(z, noise.hidden)).chunk(self.streams, -1)
        value = self.value(hidden[0], noise.value) if self.dueling else None
        return self._joined(value, self.advantage(hidden[-1], noise.advantage), action_mask)

    def _joined(self, value: Tensor | None, advantage: Tensor, action_mask: ActionMask) -> Tensor:
        advantage = advantage.unflatten(-1, (self.num_actions, self.atoms))
        if value is None:
            return advantage
        if action_mask is None:
            return value[..., None, :] + advantage - advantage.mean(-2, keepdim=True)
        own = torch.where(action_mask[:, None], advantage, 0)
        return value[..., None, :] + advantage - own.sum(-2, keepdim=True) / action_mask.sum()

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, L] -> projections [B, width], by the mean weights, without ReLU."""
        return self.hidden.mean(z)


def expected_value(probabilities: Tensor, support: Tensor) -> Tensor:
    """Return the mean of distributions [..., Z] over the atoms [Z]."""
    mean: Tensor = (probabilities * support).sum(-1)
    return mean
