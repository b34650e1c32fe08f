"""What a GPU compiles can be traced whole, without a GPU: each piece is one graph and computes the same numbers."""

import pytest
import torch

from spr import networks
from spr.augment import observations
from spr.draws import Dice
from spr.learner import Learner
from spr.presets import preset_config
from spr.replay import Replay

CPU = torch.device("cpu")
WHOLE = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}


@pytest.mark.parametrize("preset", ["spr", "spr_noaug"])
def test_sampling_augmentation_and_losses_are_whole_graphs(preset, monkeypatch):
    def as_on_a_gpu(x, weight, bias, stride=1, padding=0):
        return networks.shift_and_add(x, weight, bias, stride, padding)

    monkeypatch.setattr(networks, "convolve", as_on_a_gpu)
    torch._dynamo.reset()
    config = preset_config(preset).override({"replay.batch": 4, "network.hidden": 16, "schedule.steps": 3_000})
    learner, replay, dice = Learner(config, 4, CPU), Replay(config, 2, CPU), Dice(config, 4, [0, 1], CPU)
    state = learner.init([0, 1])
    random = torch.Generator().manual_seed(0)
    for _ in range(100):
        frame = torch.randint(0, 256, (2, 84, 84), dtype=torch.uint8, generator=random)
        roll = torch.rand(2, 3, generator=random)
        replay.append(frame, roll[:, 0] < 0.1, (roll[:, 1] * 4).long())
        replay.settle(roll[:, 2], torch.zeros(2, dtype=torch.bool))

    draws, beta = dice.update(), torch.tensor(0.4)
    batch = replay.sample(draws.sample, beta)
    for compiled, eager in zip(torch.compile(Replay.sample, **WHOLE)(replay, draws.sample, beta), batch, strict=True):
        torch.testing.assert_close(compiled, eager)

    seen = (batch.frames, replay.offsets, batch.visible, draws.shift, draws.factor, config.augment.shift)
    obs = observations(*seen)
    torch.testing.assert_close(torch.compile(observations, **WHOLE)(*seen), obs)

    loss, _, grads = learner.gradients(state, batch, obs, draws)
    learner._losses = torch.compile(learner._losses, **WHOLE)
    compiled_loss, _, compiled_grads = learner.gradients(state, batch, obs, draws)
    torch.testing.assert_close(compiled_loss, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(compiled_grads[name], grad)
