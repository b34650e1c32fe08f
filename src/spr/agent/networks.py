"""Owns the networks of one agent: encoder, transition model, noisy dueling Q-head with its projection, predictor.

Written for a single agent, as in the paper (Schwarzer et al. 2021, section 2); nothing here knows that fleets exist.
Everything random (network noise, dropout masks) is an argument. Shapes: B batch, A actions, Z atoms.
Precision has one rule: matrix products are taken in the dtype of their weight, and everything between them (biases,
normalisation, activations) in float32 or wider.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spr.agent.encoders import Convolution, encoder_shapes, make_encoder
from spr.common.errors import UserError
from spr.config.config import Config, Shape
from spr.ops import functional, rollout_ops

_PROJECTED, _MLP_HIDDEN = 128, 256  # CURL's own head


class Group(NamedTuple):
    """How the parameters of one part of the networks are treated."""

    name: str
    acts: bool = False  # goes along when actions are chosen, and into the RL target network
    in_ema: bool = False  # part of the target encoder and projection
    clip: str | None = None  # gradients of parts with the same name are clipped together; None: not clipped
    fp32: bool = False  # multiplied in float32 whatever the precision: actions differ by little in value


# In this order they lie in memory (see `flat_params`): what is treated alike must be one range.
GROUPS = (
    Group("out", acts=True, clip="agent", fp32=True),
    Group("sigma", acts=True, clip="agent"),  # of the hidden layer; the projection is without noise
    Group("encoder", acts=True, in_ema=True, clip="agent"),  # and the projection, CURL's own too
    Group("model", clip="model"),
    Group("predictor"),
)
_OUT, _SIGMA, _ENCODER, _MODEL, _PREDICTOR = GROUPS
CLIPS = tuple(dict.fromkeys(group.clip for group in GROUPS if group.clip is not None))


class ActionDim(NamedTuple):
    """Where the entries of actions lie in a parameter: at the end of a dimension, so many for each."""

    dim: int
    each: int


def pad_actions(named: Mapping[str, Tensor], dims: Mapping[str, ActionDim], own: int, room: int) -> dict[str, Tensor]:
    """Make room for actions that an agent's game lacks: entries of zero, which no gradient ever reaches."""
    padded = dict(named)
    for name, (dim, each) in dims.items():
        shape = list(named[name].shape)
        shape[dim] = (room - own) * each
        padded[name] = torch.cat([named[name], named[name].new_zeros(shape)], dim)
    return padded


def crop_actions(named: Mapping[str, Tensor], dims: Mapping[str, ActionDim], own: int, room: int) -> dict[str, Tensor]:
    """Take that room away again: the parameters of an agent as if it were alone with its own actions."""
    cropped = dict(named)
    for name, (dim, each) in dims.items():
        cropped[name] = named[name].narrow(dim, 0, named[name].shape[dim] - (room - own) * each)
    return cropped


def valid_actions(own: Sequence[int], room: int, device: torch.device) -> Tensor:
    """Return which of the actions that there is room for each agent has, [S, A]."""
    return torch.arange(room, device=device) < torch.tensor(own, device=device)[:, None]


class LayerNoise(NamedTuple):
    """Standard normal draws for one noisy layer, before the signed square root."""

    input: Tensor  # [streams, in]
    output: Tensor  # [out]


class HeadNoise(NamedTuple):
    """One draw of the whole Q-head's noise."""

    hidden: LayerNoise
    value: LayerNoise | tuple[()]  # nothing without dueling streams
    advantage: LayerNoise


# [A] which of the actions that there is room for an agent's game has; None: all. Agents of several games share shapes.
Valid = Tensor | None

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


class TransitionModel(nn.Module):
    """h: (latents [B, H, W, C], actions as a bias [K, B, H, W, C]) -> predicted latents [K, B, H, W, C]."""

    def __init__(self, latent: Shape, num_actions: int, batch_norm: bool = True) -> None:
        super().__init__()
        self.latent = latent
        channels = latent[-1]
        self.conv1 = Convolution(channels + num_actions, channels, 3)
        self.bn = nn.BatchNorm2d(channels, track_running_stats=False) if batch_norm else None
        self.conv2 = Convolution(channels, channels, 3)

    def action_bias(self, action: Tensor) -> Tensor:
        """Return what actions [B] add to the first convolution, with its bias: [B, H, W, C].

        An action is one constant plane per possible action, appended to the latent (section 2.2 of the paper).
        """
        height, width, channels = self.latent
        planes = functional.convolved_one_hot(self.conv1.weight[:, channels:], action, height, width)
        return planes + self.conv1.bias

    def forward(self, z: Tensor, action_bias: Tensor) -> Tensor:
        """Predict K steps, each from the last, given what `action_bias` makes of the actions, [K, B, H, W, C]."""
        first, bn, second = self.conv1.weight[:, : self.latent[-1]], self.bn, self.conv2
        if bn is None:
            return rollout_ops.rollout_without_norm(z, action_bias, first, second.weight, second.bias)
        return rollout_ops.rollout(z, action_bias, first, bn.weight, bn.bias, second.weight, second.bias, bn.eps)


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

    def forward(self, z: Tensor, noise: Noise, valid: Valid = None) -> Tensor:
        """Return the outputs [G, B, A, Z] of every action under G draws of noise, or [1, B, A, Z] without any."""
        if not noise:
            hidden = F.relu(self.project(z)).chunk(self.streams, -1)
            value = self.value.mean(hidden[0]) if self.dueling else None
            return self._joined(value, self.advantage.mean(hidden[-1]), valid)[None]
        hidden = F.relu(self.hidden.factorised(z, noise.hidden)).chunk(self.streams, -1)
        value = self.value(hidden[0], noise.value) if self.dueling else None
        return self._joined(value, self.advantage(hidden[-1], noise.advantage), valid)

    def _joined(self, value: Tensor | None, advantage: Tensor, valid: Valid) -> Tensor:
        advantage = advantage.unflatten(-1, (self.num_actions, self.atoms))
        if value is None:
            return advantage
        if valid is None:
            return value[..., None, :] + advantage - advantage.mean(-2, keepdim=True)
        own = torch.where(valid[:, None], advantage, 0)
        return value[..., None, :] + advantage - own.sum(-2, keepdim=True) / valid.sum()

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, L] -> projections [B, width], by the mean weights, without ReLU."""
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
        y = F.relu(self.norm1(functional.linear(z, self.linear1.weight, self.linear1.bias)))
        projected: Tensor = self.norm2(functional.linear(y, self.linear2.weight, self.linear2.bias))
        return projected


class Networks(nn.Module):
    """All networks of one agent; its forward is what acting needs: observations -> Q-values."""

    support: Tensor

    def __init__(self, config: Config, num_actions: int) -> None:
        super().__init__()
        network = config.network
        latent = latent_shape(config)
        self.categorical = config.learner.rl_loss == "categorical"
        self.projection = network.projection
        self.encoder = make_encoder(*config.encoder_arguments)
        self.head = QHead(config, num_actions)
        if config.has_model:
            self.transition = TransitionModel(latent, num_actions, network.batch_norm)
        if config.target_offsets and network.projection == "mlp":
            self.mlp = MLP(math.prod(latent))
            self.predictor = nn.Linear(_PROJECTED, _PROJECTED, bias=False)  # CURL's bilinear form
        if config.target_offsets and network.projection == "head":
            self.predictor = nn.Linear(self.head.width, self.head.width)
        if network.initialisation == "xavier":
            draw_xavier(self)
        # A constant, kept out of the state: every agent of a fleet shares it. Not on the meta device, where networks
        # without weights are made.
        self.register_buffer(
            "support", torch.linspace(network.v_min, network.v_max, network.atoms, device="cpu"), persistent=False
        )

    def groups(self) -> dict[str, Group]:
        """Say of every parameter, by name, to which group it belongs; a part without one is an error."""
        group_of: dict[int, Group] = {}

        def declare(group: Group, parameters: Iterable[nn.Parameter]) -> None:
            group_of.update((id(parameter), group) for parameter in parameters)

        head = self.head
        declare(_OUT, head.advantage.parameters())
        if head.dueling:
            declare(_OUT, head.value.parameters())
        declare(_SIGMA, head.hidden.sigma_parameters())
        declare(_ENCODER, head.hidden.mean_parameters())
        for group, part in (
            (_ENCODER, "encoder"),
            (_ENCODER, "mlp"),
            (_MODEL, "transition"),
            (_PREDICTOR, "predictor"),
        ):
            module = getattr(self, part, None)
            if module is not None:
                declare(group, module.parameters())
        named = dict(self.named_parameters())
        unknown = [name for name, parameter in named.items() if id(parameter) not in group_of]
        if unknown:
            raise UserError(f"the network part '{unknown[0]}' is in no group: declare it in Networks.groups")
        return {name: group_of[id(parameter)] for name, parameter in named.items()}

    def project(self, z: Tensor) -> Tensor:
        """g: flat latents [B, L] -> what the auxiliary loss compares, [B, D]."""
        if self.projection == "none":
            return z
        projected: Tensor = self.mlp(z) if self.projection == "mlp" else self.head.project(z)
        return projected

    def predict(self, y: Tensor) -> Tensor:
        """q: projections [B, D] -> predicted target projections, [B, D]."""
        if self.projection == "none":
            return y
        bias = self.predictor.bias
        return functional.linear(y, self.predictor.weight, 0 if bias is None else bias)

    def q_values(self, outputs: Tensor, valid: Valid = None) -> Tensor:
        """Return Q-values [..., A] of the head's outputs [..., A, Z]; those of actions that a game lacks are -inf."""
        q = expected_value(outputs.softmax(-1), self.support) if self.categorical else outputs.squeeze(-1)
        return q if valid is None else q.masked_fill(~valid, -torch.inf)

    def forward(self, obs: Tensor, noise: Noise = (), valid: Valid = None) -> Tensor:
        """Return Q-values [B, A] of observations [B, C, H, W], under one draw of noise or none."""
        group = tree_map(lambda e: e[None], noise)
        return self.q_values(self.head(self.encoder(obs).flatten(1), group, valid)[0], valid)

    def action_dims(self) -> dict[str, ActionDim]:
        """Say which parameters have entries of their own for each action, and where."""
        found = {id(parameter): ActionDim(0, self.head.atoms) for parameter in self.head.advantage.parameters()}
        if hasattr(self, "transition"):
            found[id(self.transition.conv1.weight)] = ActionDim(1, 1)
        return {name: found[id(parameter)] for name, parameter in self.named_parameters() if id(parameter) in found}


@torch.no_grad()
def draw_xavier(networks: nn.Module) -> None:
    """Draw all kernels anew, uniform in +-sqrt(6 / (fan in + fan out)) (Glorot and Bengio 2010); their biases are 0.

    What is no kernel stays: the scales of noise, and normalisation. Layers that lie side by side are drawn each by its
    own fans.
    """
    for module in networks.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is None or weight.dim() < 2:
            continue
        for layer in weight.chunk(module.streams if isinstance(module, NoisyLinear) else 1):
            nn.init.xavier_uniform_(layer)
        if bias is not None:
            bias.zero_()


def expected_value(probabilities: Tensor, support: Tensor) -> Tensor:
    """Return the mean of distributions [..., Z] over the atoms [Z]."""
    mean: Tensor = (probabilities * support).sum(-1)
    return mean


def networks_without_weights(
    config: Config, num_actions: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Networks:
    """Make networks whose parameters are given with every call; what all agents share lies on the device."""
    with torch.device("meta"):
        networks = Networks(config, num_actions)
    networks.support = networks.support.to(device, dtype)
    return networks
