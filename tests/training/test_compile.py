"""What a GPU compiles can be traced whole, without a GPU: each piece is one graph and computes the same numbers."""

import pytest
import torch
from conftest import CPU, LITTLE_FRAMES

from spr.agent.schedules import fill
from spr.config.presets import preset_config
from spr.envs.registry import make
from spr.training.actor import ActStep
from spr.training.fleet import assemble
from spr.training.loop import train
from spr.training.update_runner import UpdateRunner

ADAMW = {"learner.weight_decay": 0.1, "learner.learning_rate_end": 1e-5}


def whole(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        *((name, {}) for name in ("spr", "spr_noaug", "curl", "otrainbow", "spr_nostopgrad", "contrastive_1step")),
        ("sr_spr", {"replay.n_step_end": 3, "replay.gamma_end": 0.997, "schedule.anneal_updates": 4} | ADAMW),
    ],
)
@pytest.mark.usefixtures("gpu_ops")
def test_an_update_and_an_acting_step_are_whole_graphs(preset, changes):
    torch._dynamo.reset()
    small = {"replay.batch_size": 4, "network.hidden": 16, "schedule.learning_starts": 100, "schedule.steps": 3_000}
    small["learner.depth"] = min(2, preset_config(preset).learner.depth)  # a step more is the same graph once more
    config = preset_config(preset).override(small | LITTLE_FRAMES | changes)

    game = "breakout" if preset == "spr" else "catch"  # one of them lacks actions that there is room for

    def world():
        fleet = assemble(config, make(game, 2, obs=config.observation), [0, 1], CPU)
        next(info for info in train(fleet) if info.step == 100)
        return fleet, UpdateRunner(fleet.learner, fleet.state, fleet.replay, fleet.rng), ActStep(fleet)

    eager, eager_updates, eager_step = world()
    fleet, updates, act_step = world()
    fleet.learner._fused = False
    learner = fleet.learner
    learner._cut_randomness, learner._apply_gradients = whole(learner._cut_randomness), whole(learner._apply_gradients)
    for piece in ("_sample_views", "_losses", "_update_priorities"):
        setattr(learner, piece, whole(getattr(learner, piece)))
    act_step._select, updates._note_raw = whole(act_step._select), whole(updates._note_raw)
    for step in range(2):
        for one in (eager_updates, updates):
            fill(one.rates, config, 100 + step, 0)
            one()
        for one in (eager_step, act_step):
            one.act_async(greedy=True)
        assert (eager_step.act_wait()[0] == act_step.act_wait()[0]).all()
    torch.testing.assert_close(fleet.state.weights, eager.state.weights)
    torch.testing.assert_close(fleet.replay.priority, eager.replay.priority)
    compiled_means = updates.means()
    for name, values in eager_updates.means().items():
        assert compiled_means[name] == pytest.approx(values, rel=1e-4)
