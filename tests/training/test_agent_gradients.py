"""Agents of a fleet on a CPU: computed side by side or alone, plainly or traced, they are the same agents."""

import pytest
import torch
from conftest import CPU, World, small

from spr.agent import auxiliary_losses, encoders
from spr.training import agent_gradients
from spr.training.agent_gradients import AgentGradients

THREE = {"replay.batch_size": 4}


@pytest.mark.parametrize("preset", ["spr", "rainbow", "curl", "spr_noaug"])
def test_traced_updates_have_the_bits_of_plain_ones(monkeypatch, preset):
    def weights(untraced):
        monkeypatch.setattr(agent_gradients, "_UNTRACED", untraced)
        world = World(small(preset, **THREE), [0, 1])
        for _ in range(4):
            world.update()
        return world.state.weights

    assert torch.equal(weights(10**9), weights(2))


def test_a_fleet_does_not_depend_on_how_many_work_at_once(monkeypatch):
    def weights(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        world = World(small(**THREE), [0, 1, 2])
        world.update(3)
        return world.state.weights

    torch.testing.assert_close(weights(1), weights(3), rtol=1e-4, atol=1e-6)


def test_each_agent_gets_its_own_part():
    compute = AgentGradients(lambda x, pair: (x.sum() + pair[0], pair[1]))
    given = torch.arange(6.0).view(3, 2), (torch.tensor([10.0, 20, 30]), torch.tensor([1, 2, 3]))
    assert [[float(part) for part in one] for one in compute(*given)] == [[11, 1], [25, 2], [39, 3]]


def test_an_agent_by_itself_is_computed_in_the_callers_thread():
    compute = AgentGradients(lambda x: x)
    compute(torch.zeros(1, 2, device=CPU))
    assert compute._pool is None


@pytest.mark.parametrize("part", ["learner.aux_loss", "network.encoder"])
def test_what_a_plug_in_registers_is_not_traced(monkeypatch, part):
    monkeypatch.setattr(agent_gradients, "_UNTRACED", 0)
    monkeypatch.setitem(auxiliary_losses._KNOWN, "mine", auxiliary_losses.spr)
    monkeypatch.setitem(encoders._ENCODERS, "mine", encoders._ENCODERS["standard"])
    ours, theirs = (World(small(**THREE, **change), [0]) for change in ({}, {part: "mine"}))
    for world in (ours, theirs):
        world.update()
    assert [world.learner._fleet_gradients._traced is None for world in (ours, theirs)] == [False, True]
