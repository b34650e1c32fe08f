"""Owns the transition model h, which predicts the next latents from these and an action.

Shapes: B batch, K steps, latents [B, H, W, C].
"""

from torch import Tensor, nn

from spr.agent.encoders import Convolution
from spr.config.config import Shape
from spr.ops import functional, rollout_ops


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
