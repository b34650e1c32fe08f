"""Games that begin alike are played once where they are one game, and each scores as if it were played by itself."""

from collections import Counter

import numpy as np
import pytest

from spr.envs.base import Step
from spr.evaluation.episodes import EpisodeBatch, EpisodeSpec, Exploration, Rules
from spr.evaluation.shared_prefix import SharedPrefixEpisodes

ACTIONS = 3


class Console:
    """A game of whole numbers: what it shows and scores, and when it ends, depends on all actions so far."""

    num_actions = ACTIONS
    game_num_actions = None

    def __init__(self):
        self.steps = 0
        self.shown = np.zeros((1, 1, 1, 2), np.uint8)  # good until the next step, as an emulator's screen is

    def reset(self, seeds):
        (seed,) = seeds
        self.state = seed % 2  # so many no-ops
        return self._frame()

    def send(self, action):
        self.steps += 1
        self.shown[:] = 255
        self.state = (self.state * 31 + 7 * int(action[0]) + 13) % 4_093

    def recv(self):
        life, over = self.state % 13 == 0, self.state % 61 == 0
        return Step(self._frame(), *(np.array([x]) for x in (float(self.state % 5), life or over, False, over)))

    def _frame(self):
        self.shown[:] = self.state // 256, self.state % 256
        return self.shown

    def save(self):
        return self.state

    def restore(self, saved):
        self.state = saved
        self.shown[:] = 255


class Agent:
    """Acts by the last frames of an episode, as `Actor` stacks them."""

    def __init__(self, stack, seed):
        self.seen, self.stack, self.seed = [], stack, seed

    def act(self, games):
        self.seen = ([] if games.is_first[0] else self.seen)[-self.stack + 1 :] if self.stack > 1 else []
        self.seen.append(tuple(games.frame.ravel().tolist()))
        return np.array([hash((self.seed, *self.seen)) % ACTIONS])


def played(games, agent):
    ended = []
    while not games.idle:
        games.send(agent.act(games))
        ended += games.recv()
    return ended


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize(("epsilon", "limit"), [(0.0, 90), (0.01, 400), (0.05, 400), (0.5, 400), (1.0, 30), (0.05, 20)])
def test_games_in_a_group_are_those_played_by_themselves(epsilon, limit, stack):
    for seed in range(12):
        rules = Rules(seed, epsilon, limit)
        group, console = [EpisodeSpec(number, 4 * number) for number in range(7)], Console()
        apart, steps = [], 0
        for game in group:
            alone = Console()
            (ended,) = played(SharedPrefixEpisodes(alone, rules, [[game]], stack), Agent(stack, seed))
            apart.append(ended)
            steps += alone.steps
        assert steps == sum(ended.length for ended in apart)
        together = played(SharedPrefixEpisodes(console, rules, [group], stack), Agent(stack, seed))
        assert sorted(together) == apart
        assert console.steps <= steps
        if epsilon == 0.0:
            assert console.steps == apart[0].length
        if epsilon == 1.0:
            assert console.steps == steps  # they part at once


def test_games_played_by_themselves_are_those_of_emulators_that_step_together():
    rules, seed, stack = Rules(3, 0.1, 200), 3, 4
    for number in range(20):
        group = [EpisodeSpec(number, number)]
        mine = played(SharedPrefixEpisodes(Console(), rules, [group], stack), Agent(stack, seed))
        assert mine == played(EpisodeBatch(Console(), rules, [group]), Agent(stack, seed))


def test_what_games_have_in_common_is_played_once():
    """Of a group the common beginning counts once, and each game's own rest: by hand, from when each explores."""
    rules = Rules(1, 0.02, 100)
    group = [EpisodeSpec(number, 0) for number in range(6)]
    console = Console()
    console.recv = lambda: Step(console._frame(), np.ones(1), *np.zeros((3, 1), bool))  # games never end
    ended = played(SharedPrefixEpisodes(console, rules, [group], 4), Agent(4, 0))
    assert Counter(game.length for game in ended) == {100: 6}

    def first(number):
        explores = Exploration(rules, number, ACTIONS)
        return next((step for step in range(100) if explores.at(step) is not None), 100)

    firsts = sorted(first(game.number) for game in group)
    assert console.steps == firsts[-1] + sum(100 - own for own in firsts)
    assert len(set(firsts)) > 3


def test_an_emulator_goes_on_with_another_group():
    rules, console = Rules(2, 0.05, 300), Console()
    games, agent, ended = (
        SharedPrefixEpisodes(console, rules, [[EpisodeSpec(0, 0), EpisodeSpec(1, 2)]], 4),
        Agent(4, 2),
        [],
    )
    ended += played(games, agent)
    games.go_on({0: [EpisodeSpec(2, 1), EpisodeSpec(3, 3)]})
    assert not games.idle
    assert games.is_first.all()
    ended += played(games, agent)
    alone = [
        played(SharedPrefixEpisodes(Console(), rules, [[EpisodeSpec(n, s)]], 4), Agent(4, 2))
        for n, s in enumerate((0, 2, 1, 3))
    ]
    assert sorted(ended) == [game for games in alone for game in games]
