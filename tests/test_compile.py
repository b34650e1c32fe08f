"""What a GPU compiles can be traced whole, without a GPU: each piece is one graph and computes the same numbers."""

import pytest
import torch

from spr import augment, networks
from spr.envs import make
from spr.fleet import Turn, assemble
from spr.learner import Updates
from spr.presets import preset_config
from spr.train import train

CPU = torch.device("cpu")


def whole(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.parametrize(
    "preset", ["spr", "spr_authors", "spr_noaug", "curl", "otrainbow", "spr_nostopgrad", "contrastive_1step"]
)
def test_an_update_and_a_turn_are_whole_graphs(preset, monkeypatch):
    def as_on_a_gpu(x, weight, stride=1, padding=0):
        return networks.shift_and_add(x, weight, stride, padding)

    monkeypatch.setattr(networks, "convolve", as_on_a_gpu)
    monkeypatch.setattr(augment, "shifted_rows", lambda *args: augment.shifted_pixels(*args[:-1]))
    torch._dynamo.reset()
    small = {"replay.batch": 4, "network.hidden": 16, "schedule.random_steps": 100, "schedule.steps": 3_000}
    config = preset_config(preset).override(small)

    def world():
        fleet = assemble(config, make("catch", 2), [0, 1], CPU)
        next(tick for tick in train(fleet) if tick.step == 100)
        return fleet, Updates(fleet.learner, fleet.state, fleet.replay, fleet.dice), Turn(fleet)

    eager, eager_updates, eager_turn = world()
    fleet, updates, turn = world()
    fleet.learner._fused = False
    updates._cut, updates._prepare = whole(updates._cut), whole(updates._prepare)
    updates._step = whole(updates._step)
    turn._seen = whole(turn._seen)
    for _ in range(2):
        for one in (eager_updates, updates):
            one.beta.fill_(0.4)
            one()
        for one in (eager_turn, turn):
            one.choose(greedy=True)
        assert (eager_turn.chosen()[0] == turn.chosen()[0]).all()
    torch.testing.assert_close(fleet.state.weights, eager.state.weights)
    torch.testing.assert_close(fleet.replay.priority, eager.replay.priority)
    compiled_means = updates.means()
    for name, values in eager_updates.means().items():
        assert compiled_means[name] == pytest.approx(values, rel=1e-4)
