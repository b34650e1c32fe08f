"""Owns the multi-step return: which rewards count, how they are discounted, and whether the target bootstraps.

Shapes: S agents, B batch, n steps of the return, H steps that a sequence reaches ahead.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from spr.config.config import Config


class NStep(NamedTuple):
    """The multi-step return of a batch, before the rewards are known."""

    powers: Tensor  # [n] discounts of the rewards
    last: Tensor  # [] discount of the bootstrap
    bootstraps: Tensor  # [S, B] 1 where the bootstrap's state belongs to the episode of s_t, else 0

    def returns(self, rewards: Tensor, alive: Tensor) -> Tensor:
        """Return the discounted sums [S, B] of rewards [S, B, n], up to the episode's end."""
        return (rewards * alive[..., : rewards.shape[-1]] * self.powers).sum(-1)

    @property
    def discount(self) -> Tensor:
        """What the bootstrap's value is multiplied by, [S, B]."""
        return self.bootstraps * self.last


class NStepTargets:
    """The rule of a configuration for multi-step returns (see `replay.ends` and `replay.bootstrap_at`)."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Take the longest return: a sequence reaches that far at any time."""
        self.steps = config.longest_return
        self.only_first_end = config.replay.ends == "first"
        self.early = config.bootstrap_early
        self._ahead = torch.arange(self.steps, device=device)
        self._powers = config.replay.gamma ** torch.arange(self.steps + 1, device=device, dtype=torch.float32)
        self._ends_seen = min(max(config.target_offsets, default=0), self.steps - 1)

    def bootstraps(self, alive: Tensor) -> Tensor:
        """Return [S, B] where the configuration's n steps are not cut, from [S, B, H + 1] how far each episode goes."""
        return alive[..., 1 if self.only_first_end else self.steps - self.early]

    def of(self, bootstraps: Tensor, steps_alive: Tensor, n_step: Tensor | None, gamma: Tensor | None) -> NStep:
        """Return the multi-step return of the configuration, or of an n and gamma that change.

        `steps_alive` [S, B, 1] are the steps that each episode goes on.
        """
        powers, last = self._powers[: self.steps], self._powers[self.steps]
        if n_step is not None and gamma is not None:
            bootstraps = (n_step - self.early <= steps_alive).float().squeeze(-1)
            powers = torch.where(self._ahead < n_step, gamma**self._ahead, 0).float()
            last = (gamma**n_step).float()
        return NStep(powers, last, bootstraps)

    def released_bootstrap(self, steps_alive: Tensor) -> Tensor:
        """Return how many steps ahead [S, B, 1] the state lies that the authors' released code bootstraps from.

        Its replay keeps only whether the first of the n steps was an end, so no later end cuts the target. An end among
        the steps that are predicted is noticed elsewhere: what follows it is replaced by the last state before it. An
        end after those is not noticed: the value is that of the next episode.
        """
        return torch.where(steps_alive <= self._ends_seen, steps_alive, self.steps)
