"""Evaluation plays games that are fixed up front, to their ends, without noise."""

import numpy as np
import pytest
import torch

from spr import evaluate
from spr.actor import Actor
from spr.config import Config
from spr.envs import Step
from spr.evaluate import play
from spr.learner import Learner

CPU = torch.device("cpu")


class Lengths:
    """Games whose score is their length: table t's k-th game lasts a length that depends on its seed."""

    actions = 2

    def __init__(self, count):
        self.count = count

    def reset(self, seeds):
        self.random = [np.random.default_rng(seed) for seed in seeds]
        self.left = np.array([random.integers(1, 30) for random in self.random])
        self.lives = 0
        return np.zeros((self.count, 84, 84), np.uint8)

    def send(self, action):
        assert action.shape == (self.count,)

    def receive(self):
        self.left -= 1
        over = self.left == 0
        for i in np.flatnonzero(over):
            self.left[i] = self.random[i].integers(1, 30)
        life = np.arange(self.count) % 2 == self.lives  # lives end all the time, and must not end games
        self.lives = 1 - self.lives
        frames = np.zeros((self.count, 84, 84), np.uint8)
        return Step(frames, np.ones(self.count, np.float32), over | life, np.zeros_like(over), over)

    def close(self):
        pass


def agents(seeds, config):
    return {name: p.detach() for name, p in Learner(config, 2, CPU).init(seeds).params.items()}


def test_every_game_fixed_up_front_is_finished_whatever_its_length(monkeypatch):
    monkeypatch.setattr(evaluate, "make", lambda _, count, threads: Lengths(count))  # noqa: ARG005
    monkeypatch.setattr(evaluate, "_TABLES", 4)
    config = Config().override({"evaluation.episodes": 10, "network.hidden": 4})
    *_, last = play(config, "any", agents([0, 5], config), [0, 5])
    assert last.finished == 20
    for seed, scores in zip([0, 5], last.scores, strict=True):
        tables = [np.random.default_rng(s) for s in evaluate.seeds_for(seed, "evaluate", 4)]
        expected = [None] * 10
        for j, random in enumerate(tables):
            for game in range(j, 10, 4):
                expected[game] = float(random.integers(1, 30))
        assert scores == expected


def test_an_agent_scores_the_same_alone_and_beside_others():
    config = Config().override({"evaluation.episodes": 4, "network.hidden": 4, "evaluation.epsilon": 0.2})
    params = {name: p.detach() for name, p in Learner(config, 3, CPU).init([1, 2, 3]).params.items()}
    *_, fleet = play(config, "catch", params, [1, 2, 3])
    *_, alone = play(config, "catch", {name: p[1:2] for name, p in params.items()}, [2])
    assert fleet.scores[1] == alone.scores[0]


def test_epsilon_one_is_the_random_agent():
    config = Config().override({"evaluation.episodes": 100, "network.hidden": 4})
    params = {name: p.detach() for name, p in Learner(config, 3, CPU).init([0]).params.items()}
    *_, last = play(config, "catch", params, [0], epsilon=1.0)
    assert np.mean(last.scores[0]) == pytest.approx(2.6, abs=0.6)


def test_stacks_forget_what_came_before_an_episode():
    actor = Actor(Config().override({"network.hidden": 4}), 2, (1, 2), CPU)
    first = torch.tensor([[True, True]])
    for value in (10, 20, 30):
        actor.observe(torch.full((1, 2, 84, 84), value, dtype=torch.uint8), first)
        first = torch.tensor([[False, value == 20]])
    assert actor.stack[0, :, :, 5, 5].tolist() == [[0, 10, 20, 30], [0, 0, 0, 30]]
