"""Evaluation plays a number of games fixed up front, each to its end, without noise."""

import numpy as np
import pytest
import torch
from conftest import CPU, LITTLE_FRAMES, as_options

from spr.agent.action_padding import crop_actions, pad_actions
from spr.agent.networks import Networks
from spr.cli import main
from spr.common.errors import EnvironmentFault, UserError
from spr.config.config import Config
from spr.envs.base import ObservationConfig, Step
from spr.envs.registry import make
from spr.evaluation import inprocess_backend as nearby
from spr.evaluation import row_pool
from spr.evaluation import scheduler as evaluate
from spr.evaluation.batched_policy import Agents
from spr.evaluation.episodes import EpisodeSpec, Rules
from spr.evaluation.inprocess_backend import InProcessBackend
from spr.evaluation.scheduler import play
from spr.evaluation.subprocess_backend import SubprocessBackend
from spr.training.actor import Actor
from spr.training.learner import Learner


class Lengths:
    """Games whose score is their length, which depends on their seed."""

    num_actions = 2
    game_num_actions = None

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
    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Lengths(count))  # noqa: ARG005
    monkeypatch.setattr(evaluate, "_EMULATORS", row)
    monkeypatch.setattr(row_pool, "_WORTH_STARTING", worth)
    config = Config().override({"evaluation.episodes": games, "network.hidden": 4})
    *_, last = play(config, Agents(["any"] * 2, agents([0, 5], config), [0, 5]))
    assert last.finished == 2 * games
    for seed, scores in zip([0, 5], last.scores, strict=True):
        starts = evaluate.seeds_for(seed, "evaluate", games)
        assert scores == [np.random.default_rng(start).integers(1, 30) for start in starts]


@pytest.mark.slow
def test_long_games_count_as_often_as_they_begin(monkeypatch):
    """One game in four is ten times as long: the first games to finish would be short ones far more often."""

    class Uneven(Lengths):
        def length(self, random):
            return 40 if random.random() < 0.25 else 4

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Uneven(count))  # noqa: ARG005
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

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Closing(count))  # noqa: ARG005
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


def atari(games, config, room=18):
    """Agents of several games, with room for all actions and nothing where their game has none."""
    params = []
    for game in games:
        networks = Networks(config, room)
        dims, own = networks.action_dims(), (make(game, 1).game_num_actions or [room])[0]
        mine = {name: p.detach() for name, p in networks.named_parameters()}
        params.append(pad_actions(crop_actions(mine, dims, own, room), dims, own, room))
    return {name: torch.stack([agent[name] for agent in params]) for name in params[0]}


def looking(params):
    """Networks that look: as they are drawn, they choose one action whatever they see."""
    return {name: 0 * p if "bias" in name else 3 * p for name, p in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "games", "heights"),
    [(1, ["air_raid", "carnival", "alien"], {210, 214, 250}), (3, ["breakout"], {None})],
)
def test_emulators_in_processes_of_their_own_play_the_same_games(monkeypatch, channels, games, heights):
    """Games of other heights and numbers of actions; processes of agents with few games go on with those of another."""
    changes = {"evaluation.episodes": 9, "evaluation.epsilon": 0.05, "evaluation.max_steps": 90, "network.hidden": 8}
    config = Config().override(changes | LITTLE_FRAMES | {"observation.channels": channels})
    monkeypatch.setattr(evaluate, "cores", lambda: 2)
    monkeypatch.setattr(row_pool, "_WORTH_STARTING", 0)
    torch.manual_seed(0)
    seeds, count = [0, 5, 7][: len(games)], {0: 4, 5: 9, 7: 2}
    seeds_for = evaluate.seeds_for
    monkeypatch.setattr(evaluate, "seeds_for", lambda seed, what, _: seeds_for(seed, what, count[seed]))
    agents = Agents(games, looking(atari(games, config)), seeds)
    *_, here = play(config, agents)
    monkeypatch.setattr(
        evaluate, "_backend", lambda config, _, rows: SubprocessBackend((2, rows, 1), config.observation)
    )
    lend, lent = evaluate.BatchedPolicy._lend, {}

    def noted(self, place, agent):
        lent.setdefault((self, place), []).append(self._heights[agent])
        lend(self, place, agent)

    monkeypatch.setattr(evaluate.BatchedPolicy, "_lend", noted)
    *_, apart = play(config, agents)
    assert apart.scores == here.scores
    assert apart.lengths == here.lengths
    assert apart.finished == here.finished == sum(count[seed] for seed in seeds)
    assert {height for row in lent.values() for height in row} == heights
    if len(games) > 1:
        assert any(len(set(row)) > 1 for row in lent.values())
        assert len({score for scores in here.scores for score in scores}) > 5


@pytest.mark.slow
def test_games_that_begin_alike_are_played_in_groups_and_score_the_same(monkeypatch):
    changes = {"evaluation.episodes": 60, "evaluation.epsilon": 0.005, "evaluation.max_steps": 90, "network.hidden": 4}
    config = Config().override(changes | LITTLE_FRAMES)
    monkeypatch.setattr(evaluate, "cores", lambda: 2)
    torch.manual_seed(0)
    agents = Agents(["alien"], looking(atari(["alien"], config)), [3])
    *_, here = play(config, agents)
    monkeypatch.setattr(
        evaluate, "_backend", lambda config, _, rows: SubprocessBackend((2, rows, 2), config.observation)
    )
    *_, apart = play(config, agents)
    assert apart.scores == here.scores
    assert apart.lengths == here.lengths
    assert len(set(here.scores[0])) > 4
    assert here.steps >= sum(here.lengths[0])
    assert apart.steps < 0.85 * sum(here.lengths[0])


def test_an_emulator_without_games_rests_while_others_play_on():
    backend = SubprocessBackend((1, 1, 2), ObservationConfig())
    try:
        row = backend.open((0, 0), "freeway", Rules(0, 0.0, 10), [[EpisodeSpec(0, 1)], [EpisodeSpec(1, 2)]])
        ended, shown = row.take(), []
        for step in range(20):
            if step == 10:
                row.go_on({1: [EpisodeSpec(2, 3)]})
                row.take()
            row.send()
            ended += row.take()
            shown.append(backend.arrays.frame[0, 0].copy())
        assert [(game.number, game.length) for game in ended] == [(0, 10), (1, 10), (2, 10)]
        assert row.over
    finally:
        backend.close()
    assert all((later[0] == shown[9][0]).all() for later in shown[9:])
    assert any((later[1] != shown[9][1]).any() for later in shown[9:])


@pytest.mark.parametrize(("agents", "episodes", "size"), [(26, 100, 3), (10, 100, 3), (1, 100, 1), (1, 2, 1)])
def test_every_process_has_games_before_one_has_several_at_a_time(monkeypatch, agents, episodes, size):
    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(evaluate, "SubprocessBackend", lambda shape, _: shape)
    config = Config().override({"evaluation.episodes": episodes})
    rows = max(agents, 16)
    found = evaluate._backend(config, Agents(["pong"] * agents, {"weight": OnGpu()}, range(agents)), rows)
    assert found == (2, rows, size)


def test_what_goes_wrong_in_a_process_of_its_own_is_raised_here():
    backend = SubprocessBackend((1, 2, 1), ObservationConfig())
    try:
        row = backend.open((0, 0), "no_such_game", Rules(0, 0.0, 100), [[EpisodeSpec(0, 1)]])
        backend.look(wait=True)
        assert row.done
        with pytest.raises(UserError, match="no_such_game"):
            row.take()
        row = backend.open((0, 1), "pong", Rules(0, 0.0, 100), [[EpisodeSpec(0, 1)]])
        assert row.take() == []
        backend.arrays.action[0, 1] = 17  # pong has six
        row.send()
        with pytest.raises(EnvironmentFault, match="an emulator failed: ValueError: pong has 6 actions"):
            row.take()
        backend._started[1]._popen.kill()
        with pytest.raises(EnvironmentFault, match="an emulator's process ended while it played, with code -9"):
            [row.send() for _ in range(1000)] and row.take()
    finally:
        backend.close()
    assert all(process._popen.poll() is not None for process in backend._started)


@pytest.mark.slow
def test_an_emulator_that_dies_ends_its_own_agents_evaluation_and_no_others(monkeypatch, tmp_path, capsys):
    class Mortal(SubprocessBackend):
        """Processes of which those that play breakout are killed."""

        def open(self, where, game, rules, groups):
            row = super().open(where, game, rules, groups)
            if game == "breakout":
                row._process._popen.kill()
            return row

    monkeypatch.setattr(evaluate, "_backend", lambda config, _, rows: Mortal((2, rows, 1), config.observation))
    small = LITTLE_FRAMES | {"network.hidden": 4, "replay.batch_size": 2, "learner.depth": 1, "replay.n_step": 2}
    small |= {"evaluation.episodes": 2, "evaluation.max_steps": 5, "schedule.learning_starts": 60}
    command = ["train", "pong", "breakout", "--steps", "61", *as_options(small), "--out", str(tmp_path)]
    assert main(command) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "breakout, seed 0: an emulator's process ended while it played, with code -9; its agent is saved" in said
    assert [file.parts[-3] for file in tmp_path.rglob("result.json")] == ["pong"]
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    assert len(list(tmp_path.rglob("result.json"))) == 2


def test_a_game_that_never_ends_is_over_after_some_steps(monkeypatch):
    class Endless(Lengths):
        def length(self, random):
            return random.integers(1, 30) if random.random() < 0.5 else 10**9

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Endless(count))  # noqa: ARG005
    config = Config().override({"evaluation.episodes": 12, "evaluation.max_steps": 40, "network.hidden": 4})
    *_, last = play(config, Agents(["any"], agents([0], config), [0]))
    starts = evaluate.seeds_for(0, "evaluate", 12)
    expected = [min(Endless(1).length(np.random.default_rng(start)), 40) for start in starts]
    assert last.scores == [expected]
    assert last.lengths == [expected]
    assert 40 in expected


@pytest.mark.slow
def test_an_agent_scores_the_same_alone_and_beside_others():
    config = Config().override({"evaluation.episodes": 14, "network.hidden": 4, "evaluation.epsilon": 0.2})
    params = {name: p.detach() for name, p in Learner(config, 3, CPU).init(range(7)).params.items()}
    *_, fleet = play(config, Agents(["catch"] * 7, params, range(7)))
    for seed in (2, 6):
        *_, alone = play(config, Agents(["catch"], {name: p[seed : seed + 1] for name, p in params.items()}, [seed]))
        assert fleet.scores[seed] == alone.scores[0]


@pytest.mark.parametrize("count", [1, 3])
def test_an_agent_that_plays_by_itself_has_its_weights_once(monkeypatch, count):
    """Beside others every row has a copy, since rows change hands; a wide network's copies would be gigabytes."""
    copies, choice = set(), evaluate.BatchedPolicy

    def noted(*given):
        made = choice(*given)
        copies.update(len(p) for p in made._lent.values())
        return made

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Lengths(count))  # noqa: ARG005
    monkeypatch.setattr(evaluate, "BatchedPolicy", noted)
    monkeypatch.setattr(evaluate, "cores", lambda: 4)
    config = Config().override({"evaluation.episodes": 2, "network.hidden": 4})
    *_, last = play(config, Agents(["any"] * count, agents(range(count), config), range(count)))
    assert last.finished == 2 * count
    assert copies == {1 if count == 1 else 4}


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

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Slow(count))  # noqa: ARG005
    config = Config().override({"evaluation.episodes": 32, "network.hidden": 4})
    monkeypatch.setattr(row_pool, "_WORTH_STARTING", 100)
    monkeypatch.setattr(evaluate, "_EMULATORS", 4)
    monkeypatch.setattr(evaluate, "cores", lambda: 2)
    *rounds, last = play(config, Agents(["any"] * 3, agents([1, 2, 3], config), [1, 2, 3]))
    assert last.scores == [[5.0] * 32, [5.0] * 32, [100.0] * 32]
    # On its own two rows of four it would take 400 rounds; with the six rows of all three, 24 games at a time.
    assert len(rounds) < 260
    assert sum(steps) < 1.3 * 32 * (5 + 5 + 100)


@pytest.mark.slow
@pytest.mark.parametrize("rest", [True, False])
def test_very_long_games_do_not_start_last_where_idle_emulators_rest(monkeypatch, rest):
    """Agents that made way play their own games after all, however few are left."""
    started = []

    class Noted(Lengths):
        def length(self, random):  # noqa: ARG002
            return 100 if self.slow else 5

        def restart(self, places, seeds):
            self.slow = set(seeds) <= set(evaluate.seeds_for(3, "evaluate", 24))
            started.extend([self.slow] * len(places))
            return super().restart(places, seeds)

    monkeypatch.setattr(nearby, "make", lambda _, count, *more: Noted(count))  # noqa: ARG005
    monkeypatch.setattr(InProcessBackend, "idle_rest", rest)
    monkeypatch.setattr(evaluate, "_EMULATORS", 4)
    monkeypatch.setattr(row_pool, "_WORTH_STARTING", 500)  # more than the short games take that are left then
    monkeypatch.setattr(evaluate, "cores", lambda: 2)
    config = Config().override({"evaluation.episodes": 24, "network.hidden": 4})
    *_, last = play(config, Agents(["any"] * 3, agents([1, 2, 3], config), [1, 2, 3]))
    assert last.scores == [[5.0] * 24, [5.0] * 24, [100.0] * 24]
    assert sum(started) == 24
    assert any(started[-4:]) != rest


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
