"""An average of all weights: it acts while training, it is judged, and it is the agent that is kept."""

import pytest
import torch
from conftest import CPU, TINY, small

import spr
from spr.config.presets import preset_config
from spr.envs.registry import make, make_shown
from spr.evaluation import film
from spr.experiments import agent_evaluation, job_runner
from spr.training import checkpoint, snapshot
from spr.training.actor import Actor
from spr.training.fleet import assemble
from spr.training.loop import Training, train

AVERAGE = TINY | {"learner.average": 0.9, "schedule.steps": 66, "evaluation.episodes": 2}


def test_it_acts_and_is_the_agent(monkeypatch):
    config = preset_config("spr").override(AVERAGE)
    fleet = assemble(config, make("catch", 2, obs=config.observation), [0, 1], CPU)
    average, acting, greedy = fleet.learner.layout.views(fleet.state.target), [], Actor.greedy

    def spy(self, params, *rest):
        acting.append(all(params[name].data_ptr() == p.data_ptr() for name, p in average.items()))
        return greedy(self, params, *rest)

    monkeypatch.setattr(Actor, "greedy", spy)
    list(train(fleet))
    assert acting == [True] * 6
    assert all(torch.equal(p, average[name][1]) for name, p in fleet.agent(1).items())
    assert not torch.equal(fleet.state.weights, fleet.state.target)


def test_it_is_what_a_checkpoint_shows(tmp_path):
    config = preset_config("spr").override(AVERAGE)
    envs = make_shown("catch", config.observation)
    training = Training(assemble(config, make("catch", 1, obs=config.observation), [0], CPU))
    list(training.run())
    checkpoint.write(tmp_path, snapshot.snapshot(training, 0))
    shown = film._weights_at(tmp_path, 66, config, envs)
    agent = training.fleet.agent(0)
    assert shown.keys() == agent.keys()
    assert all(torch.equal(p, agent[name]) for name, p in shown.items())


@pytest.mark.slow
def test_it_is_judged_saved_and_loaded(tmp_path, monkeypatch):
    judged, fleets = [], []
    play, make_fleet = agent_evaluation.play, job_runner.assemble
    monkeypatch.setattr(
        agent_evaluation, "play", lambda config, who, epsilon: (judged.append(who), play(config, who, epsilon))[1]
    )
    monkeypatch.setattr(job_runner, "assemble", lambda *args: (fleets.append(make_fleet(*args)), fleets[-1])[1])
    (run,) = spr.train("catch", seeds=[3], changes=AVERAGE, out=tmp_path, device="cpu")
    average = {name: p[0] for name, p in fleets[0].learner.layout.views(fleets[0].state.target).items()}
    loaded = spr.load(run.folder, "cpu").weights
    assert loaded.keys() == average.keys()
    for name, p in average.items():
        assert torch.equal(loaded[name], p)
        assert torch.equal(judged[0].params[name][0], p)
    assert spr.evaluate(run.folder).scores == run.scores


def test_the_online_network_is_the_agent_without_an_average():
    config = small()
    fleet = assemble(config, make("catch", 1), [0], CPU)
    assert all(torch.equal(p, fleet.state.params[name][0]) for name, p in fleet.agent(0).items())
