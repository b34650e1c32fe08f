"""Owns resets: parts of the networks are re-initialised during training (Nikishin et al. 2022; D'Oro et al. 2023).

A reset writes into the state in place, between two environment steps. New weights depend on the agent's seed and on the
number of the reset only: they are the same alone, in any fleet, and when a run resumes.
Shapes: S agents, P the numbers of an agent.
"""

import torch
from torch import Size, Tensor

from spr.agent.parameter_layout import Layout
from spr.config.config import Config
from spr.envs.base import seeds_for
from spr.training.fleet import Fleet

_SHRUNK = ("encoder.", "transition.")  # parts that keep a share of their weights, by the beginning of their names


def kept(config: Config, layout: Layout) -> Tensor:
    """Return the share of itself that every weight keeps at a reset, [P]."""
    reset = config.reset

    def share(name: str, _: Size) -> float:
        if name.startswith(_SHRUNK):
            return reset.keep
        redrawn = reset.redraw == "head" or layout.groups[name].name == "out"
        return 0.0 if redrawn else 1.0

    return layout.one_number_each(share)


@torch.no_grad()
def reset(fleet: Fleet, number: int) -> None:
    """Carry out a run's first, second, ... reset of a whole fleet, in place.

    Target networks follow the same rule, with a draw of their own. Adam begins again, for all weights. An agent that
    has diverged stays as it is.
    """
    state, learner = fleet.state, fleet.learner
    share = kept(fleet.config, learner.layout).to(state.weights)
    healthy = ~state.diverged[:, None]
    pairs = [seeds_for(seed, f"reset {number}", 2) for seed in fleet.seeds]
    everything = slice(None)
    targets = [(state.ema, learner.ema_columns), (state.target, learner.target_columns)]
    for which, networks in enumerate(([(state.weights, everything)], targets)):
        present = [(rows, columns) for rows, columns in networks if rows.numel()]
        if not present:
            continue
        fresh = learner.init_weights([pair[which] for pair in pairs], fleet.envs.game_num_actions)
        for rows, columns in present:
            mixed = share[columns] * rows + (1 - share[columns]) * fresh[:, columns]
            rows.copy_(torch.where(healthy, mixed, rows))
    for moment in (state.first_moment, state.second_moment):
        moment.masked_fill_(healthy, 0)
    state.count.zero_()
