"""Owns the networks of one agent: encoder, transition model, noisy dueling Q-head with its projection, predictor.

Written for a single agent, as in the paper (Schwarzer et al. 2021, section 2); nothing here knows that fleets exist.
Everything random (network noise, dropout masks) is an argument. Shapes: B batch, A actions, Z atoms.
Precision has one rule: matrix products are taken in the dtype of their weight, and everything between them (biases,
normalisation, activations) in float32 or wider.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spr.agent.action_padding import ActionDim, ActionMask
from spr.agent.encoders import make_encoder
from spr.agent.q_head import Noise, NoisyLinear, QHead, expected_value, latent_shape
from spr.agent.transition_model import TransitionModel
from spr.common.errors import UserError
from spr.config.config import Config
from spr.ops import functional

_PROJECTED, _MLP_HIDDEN = 128, 256  # CURL's own head


class Group(NamedTuple):
    """How the parameters of one part of the networks are treated."""

    name: str
    acts: bool = False  # goes along when actions are chosen, and into the RL target network
    in_ema: bool = False  # part of the target encoder and projection
    clip: str | None = None  # gradients of parts with the same name are clipped together; None: not clipped
    fp32: bool = False  # multiplied in float32 whatever the precision: actions differ by little in value


# In this order they lie in memory (see `parameter_layout`): groups that are treated alike must be neighbours.
GROUPS = (
    Group("out", acts=True, clip="agent", fp32=True),
    Group("sigma", acts=True, clip="agent"),  # of the hidden layer; the projection is without noise
    Group("encoder", acts=True, in_ema=True, clip="agent"),  # and the projection, CURL's own too
    Group("model", clip="model"),
    Group("predictor"),
)
_OUT, _SIGMA, _ENCODER, _MODEL, _PREDICTOR = GROUPS
CLIPS = tuple(dict.fromkeys(group.clip for group in GROUPS if group.clip is not None))


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
        return functional.linear(y, self.predictor.weight, bias)

    def q_values(self, outputs: Tensor, action_mask: ActionMask = None) -> Tensor:
        """Return Q-values [..., A] of the head's outputs [..., A, Z]; those of actions that a game lacks are -inf."""
        q = expected_value(outputs.softmax(-1), self.support) if self.categorical else outputs.squeeze(-1)
        return q if action_mask is None else q.masked_fill(~action_mask, -torch.inf)

    def forward(self, obs: Tensor, noise: Noise = (), action_mask: ActionMask = None) -> Tensor:
        """Return Q-values [B, A] of observations [B, C, H, W], under one draw of noise or none."""
        group = tree_map(lambda e: e[None], noise)
        return self.q_values(self.head(self.encoder(obs).flatten(1), group, action_mask)[0], action_mask)

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


def networks_without_weights(
    config: Config, num_actions: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Networks:
    """Make networks whose parameters are given with every call; what all agents share lies on the device."""
    with torch.device("meta"):
        networks = Networks(config, num_actions)
    networks.support = networks.support.to(device, dtype)
    return networks
