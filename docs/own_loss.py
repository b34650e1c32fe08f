"""An auxiliary loss of your own, in twenty lines: the angle to the target instead of its cosine."""

import sys

import torch

from spr.aux_losses import cosine, register
from spr.cli import main


@register("angle")
def angle(predicted: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of angles between predictions and targets [T, B, D] that count, by mask [B, T]; one per sample."""
    inside = cosine(predicted, target).clamp(-0.999, 0.999)  # where an angle has a finite slope
    return (torch.arccos(inside).T * mask).sum(-1)


if __name__ == "__main__":
    small = ["--set", "network.hidden=16", "--set", "replay.batch_size=4", "--set", "evaluation.episodes=2"]
    short = ["--set", "schedule.learning_starts=60", "--steps", "70"]
    sys.exit(main(["train", "catch", "--set", "learner.aux_loss=angle", *small, *short, *sys.argv[1:]]))
