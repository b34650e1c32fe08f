"""A custom auxiliary loss, as a plug-in: the angle to the target instead of its cosine.

spr train pong --plugin own_loss --set learner.aux_loss=angle --name angle
"""

import torch

from spr.agent.auxiliary_losses import cosine, register


@register("angle")
def angle(predicted: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of angles between predictions and targets [T, B, D] that count, by mask [B, T]; one per sample."""
    inside = cosine(predicted, target).clamp(-0.999, 0.999)  # where an angle has a finite slope
    return (torch.arccos(inside).T * mask).sum(-1)
