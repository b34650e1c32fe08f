"""The n-step target of the authors' first code, to compare: `python docs/first_target.py crazy_climber --seeds 0 1 2`.

There only an end at the first of the n steps cuts the bootstrap. If the end is within six steps, the value is that of
the last state before it; if it is later, that of whatever is seen after n steps. Runs go to `runs/first_target`: their
files say that they are `spr`, because nothing else differs.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from spr.cli import main
from spr.config import SIDE, STACK, Config
from spr.replay import Batch, Replay

N, GAMMA = Config().replay.n_step, Config().replay.gamma
SEEN = Config().learner.depth  # ends after at most so many steps are noticed there
Sample = Callable[[Replay, Tensor, Tensor], Batch]


def with_first_target(sample: Sample) -> Sample:
    """Return a way of drawing batches whose bootstrap is the first code's."""

    def drawn(replay: Replay, uniform: Tensor, beta: Tensor) -> Batch:
        batch = sample(replay, uniform, beta)
        device = uniform.device
        slots = batch.start[..., None] + torch.arange(1 - STACK, N + 1, device=device)  # [S, B, L]
        first = replay.first.gather(1, (slots % replay.capacity).flatten(1)).view(slots.shape)
        lived = (~first[..., STACK:]).long().cumprod(-1).sum(-1)  # [S, B] steps before the first end, at most n
        state = torch.where(lived <= SEEN, lived, N)  # whose value is taken
        stack = state[..., None] + torch.arange(STACK, device=device)  # [S, B, 4]
        pixels = batch.frames.flatten(3)
        seen = pixels.gather(2, stack[..., None].expand(-1, -1, -1, pixels.shape[-1])).unflatten(-1, (SIDE, SIDE))
        older = (~first.gather(2, stack))[..., 1:].float().flip(-1).cumprod(-1).flip(-1)
        visible = torch.cat([older, torch.ones_like(older[..., :1])], -1)
        return batch._replace(
            frames=torch.cat([batch.frames[:, :, :N], seen], 2),
            visible=torch.cat([batch.visible[:, :, :-1], visible[:, :, None]], 2),
            discount=(lived > 0).float() * GAMMA**N,
        )

    return drawn


if __name__ == "__main__":
    Replay.sample = with_first_target(Replay.sample)  # type: ignore[method-assign]
    sys.exit(main(["train", *sys.argv[1:], "--out", "runs/first_target"]))
