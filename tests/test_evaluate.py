"""Evaluation plays a number of games fixed up front, each to its end, without noise."""

import numpy as np
import pytest
import torch
from conftest import CPU

from spr import evaluation as evaluate
from spr.actor import Actor
from spr.config import Config
from spr.environment import Step
from spr.evaluation import Agents, play
from spr.learner import Learner


class Lengths:
    """Games whose score is their length, which depends on their seed."""

    num_actions = 2
    own_actions = None

    def __init__(self, count):
        self.count = count

    def reset(self, seeds):
        self.lives = 0
        self.random = [None] * self.count
        self.left = np.zeros(self.count, int)
        return self.restart(range(self.count), seeds)

    def restart(self, places, seeds):
        for place, seed in zip(places, seeds, strict=True):
            self.random[place] = np.random.default_rng(seed)
            self.left[place] = self.length(self.random[place])
        return np.zeros((len(places), 1, 84, 84), np.uint8)

    def length(self, random):
        return random.integers(1, 30)

    def send(self, action):
        assert action.shape == (self.count,)

    def recv(self):
        self.left -= 1
        over = self.left == 0
        for i in np.flatnonzero(over):
            self.left[i] = self.length(self.random[i])
        life = np.arange(self.count) % 2 == self.lives  # lives end all the time, and must not end games
        self.lives = 1 - self.lives
        frames = np.zeros((self.count, 1, 84, 84), np.uint8)
        return Step(frames, np.ones(self.count, np.float32), over | life, np.zeros_like(over), over)

    def close(self):
        pass


def agents(seeds, config):
    return {name: p.detach() for name, p in Learner(config, 2, CPU).init(seeds).params.items()}


@pytest.mark.parametrize(("games", "row", "worth"), [(10, 4, 0), (3, 4, 0), (1, 4, 0), (30, 5, 0), (30, 2, 10**9)])
def test_every_game_begun_is_finished_and_counts_whatever_its_length(monkeypatch, games, row, worth):
    """Rows that are free go to other agents or to none; either way each game is the one of its number."""
    monkeypatch.setattr(evaluate, "make", lambda _, count, *more: Lengths(count))  # noqa: ARG005
    monkeypatch.setattr(evaluate, "_EMULATORS", row)
    monkeypatch.setattr(evaluate, "_WORTH_STARTING", worth)
    config = Config().override({"evaluation.episodes": games, "network.hidden": 4})
    *_, last = play(config, Agents(["any"] * 2, agents([0, 5], config), [0, 5]))
    assert last.finished == 2 * games
    for seed, scores in zip([0, 5], last.scores, strict=True):
        starts = evaluate.seeds_for(seed, "evaluate", games)[::2]  # games come in pairs, the second after the first
        pairs = [np.random.default_rng(start).integers(1, 30, size=2) for start in starts]
        assert scores == np.concatenate(pairs)[:games].tolist()


@pytest.mark.slow
def test_long_games_count_as_often_as_they_begin(monkeypatch):
    """One game in four is ten times as long: the first games to finish would be short ones far more often."""

    class Uneven(Lengths):
        def length(self, random):
            return 40 if random.random() < 0.25 else 4

    monkeypatch.setattr(evaluate, "make", lambda _, count, *more: Uneven(count))  # noqa: ARG005
    config = Config().override({"evaluation.episodes": 20, "network.hidden": 4})
    seeds = list(range(30))
    params = {name: p.expand(len(seeds), *p.shape[1:]) for name, p in agents([0], config).items()}
    *_, last = play(config, Agents(["any"] * len(seeds), params, seeds))
    long = np.mean([[score == 40 for score in scores] for scores in last.scores])
    assert long == pytest.approx(0.25, abs=0.055)  # 600 games: three standard deviations


def test_an_evaluation_left_early_closes_every_emulator(monkeypatch):
    made = []

    class Closing(Lengths):
        def __init__(self, count):
            super().__init__(count)
            self.closed = 0
            made.append(self)

        def close(self):
            self.closed += 1

    monkeypatch.setattr(evaluate, "make", lambda _, count, *more: Closing(count))  # noqa: ARG005
    config = Config().override({"evaluation.episodes": 12, "network.hidden": 4})
    games = play(config, Agents(["any"] * 2, agents([0, 5], config), [0, 5]))
    for _ in range(5):
        next(games)
    games.close()
    assert [envs.closed for envs in made] == [1] * 4  # two agents, two halves
    made.clear()
    *_, last = play(config, Agents(["any"] * 2, agents([0, 5], config), [0, 5]))
    assert last.finished == 24
    assert [envs.closed for envs in made] == [1] * 4


@pytest.mark.slow
def test_an_agent_scores_the_same_alone_and_beside_others():
    config = Config().override({"evaluation.episodes": 14, "network.hidden": 4, "evaluation.epsilon": 0.2})
    params = {name: p.detach() for name, p in Learner(config, 3, CPU).init(range(7)).params.items()}
    *_, fleet = play(config, Agents(["catch"] * 7, params, range(7)))
    for seed in (2, 6):
        *_, alone = play(config, Agents(["catch"], {name: p[seed : seed + 1] for name, p in params.items()}, [seed]))
        assert fleet.scores[seed] == alone.scores[0]


@pytest.mark.slow
def test_rows_that_are_free_go_to_the_agent_with_the_most_left(monkeypatch):
    """One agent's games are twenty times as long as the others': it gets their emulators, and none runs in vain."""
    steps = []

    class Slow(Lengths):
        def length(self, random):  # noqa: ARG002
            return 100 if self.slow else 5

        def reset(self, seeds):
            self.slow = set(seeds) <= set(evaluate.seeds_for(3, "evaluate", 32))
            return super().reset(seeds)

        def recv(self):
            steps.append(self.count)
            return super().recv()

    monkeypatch.setattr(evaluate, "make", lambda _, count, *more: Slow(count))  # noqa: ARG005
    config = Config().override({"evaluation.episodes": 32, "network.hidden": 4})
    monkeypatch.setattr(evaluate, "_WORTH_STARTING", 100)
    monkeypatch.setattr(evaluate, "_EMULATORS", 4)
    monkeypatch.setattr(evaluate, "cores", lambda: 2)
    *rounds, last = play(config, Agents(["any"] * 3, agents([1, 2, 3], config), [1, 2, 3]))
    assert last.scores == [[5.0] * 32, [5.0] * 32, [100.0] * 32]
    # On its own two rows of four it would take 400 rounds; with the six rows of all three, 24 games at a time.
    assert len(rounds) < 260
    assert sum(steps) < 1.3 * 32 * (5 + 5 + 100)


@pytest.mark.slow
def test_epsilon_one_is_the_random_agent():
    config = Config().override({"evaluation.episodes": 100, "network.hidden": 4})
    params = {name: p.detach() for name, p in Learner(config, 3, CPU).init([0]).params.items()}
    *_, last = play(config, Agents(["catch"], params, [0]), epsilon=1.0)
    assert np.mean(last.scores[0]) == pytest.approx(2.6, abs=0.6)


def test_stacks_forget_what_came_before_an_episode():
    actor = Actor(Config().override({"network.hidden": 4}), 2, (1, 2), CPU)
    first = torch.tensor([[True, True]])
    for value in (10, 20, 30):
        actor.observe(torch.full((1, 2, 1, 84, 84), value, dtype=torch.uint8), first)
        first = torch.tensor([[False, value == 20]])
    assert actor.stack[0, :, :, 5, 5].tolist() == [[0, 10, 20, 30], [0, 0, 0, 30]]
