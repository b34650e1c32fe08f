"""Fleets of several games: an agent is the same alone, among seeds of its game, and among other games."""

import json

import numpy as np
import pytest
import torch
from conftest import CPU, TINY, as_options
from safetensors.torch import load_file

from spr.cli import main
from spr.config.presets import preset_config
from spr.envs.registry import MultiGameEnvs, make
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import play
from spr.experiments.progress import StopRequest, _summary
from spr.training.fleet import assemble
from spr.training.loop import train

GAMES = ["pong", "breakout", "alien", "pong"]  # 6, 4, 18 and 6 actions
SEEDS = [3, 1, 7, 5]
# Few updates: in float32 a best action may flip by rounding later, and then runs part.
CONFIG = preset_config("spr").override(TINY | {"schedule.steps": 64, "evaluation.episodes": 2})


def together(games, obs):
    places = {game: [i for i, name in enumerate(games) if name == game] for game in games}
    return MultiGameEnvs([(make(game, len(where), obs=obs), where) for game, where in places.items()])


def trained(games, seeds):
    envs = together(games, CONFIG.observation)
    fleet = assemble(CONFIG, envs, seeds, CPU)
    rows = [info.rows for info in train(fleet) if info.rows]
    envs.close()
    return fleet, rows


@pytest.mark.slow
def test_the_whole_loop_and_the_evaluation_of_a_mixed_fleet_are_those_of_its_agents_alone():
    mixed, rows = trained(GAMES, SEEDS)
    assert mixed.envs.game_num_actions == [6, 4, 18, 6]
    judged = ["breakout", "alien"]  # whose games are short
    params = {name: p[1:3] for name, p in mixed.state.params.items()}
    *_, scores = play(CONFIG, Agents(judged, params, SEEDS[1:3]), epsilon=0.3)
    for i, (game, seed) in enumerate(zip(GAMES, SEEDS, strict=True)):
        alone, its_rows = trained([game], [seed])
        assert torch.equal(mixed.replay.actions[i], alone.replay.actions[0])
        assert torch.equal(mixed.replay.frames[i], alone.replay.frames[0])
        assert torch.equal(mixed.replay.rewards[i], alone.replay.rewards[0])
        assert mixed.replay.actions[i].max() < mixed.envs.game_num_actions[i]
        torch.testing.assert_close(mixed.state.weights[i], alone.state.weights[0], rtol=0, atol=1e-5)
        for name, value in its_rows[-1][0].items():
            assert value is None or rows[-1][i][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        params = {name: p[i : i + 1] for name, p in mixed.state.params.items()}
        if game in judged:
            *_, its_scores = play(CONFIG, Agents([game], params, [seed]), epsilon=0.3)
            assert scores.scores[judged.index(game)] == its_scores.scores[0]


def test_steps_of_several_games_are_put_where_they_belong():
    games = ["breakout", "pong", "breakout"]
    both = together(games, CONFIG.observation)
    parts = [make(game, 1, obs=CONFIG.observation) for game in games]
    assert both.num_actions == 18
    assert both.game_num_actions == [4, 6, 4]
    frames = both.reset([4, 5, 6])
    assert (frames == np.concatenate([part.reset([seed]) for part, seed in zip(parts, [4, 5, 6], strict=True)])).all()
    random = np.random.default_rng(0)
    for _ in range(40):
        action = random.integers(0, both.game_num_actions)
        both.send(action)
        out = both.recv()
        for i, part in enumerate(parts):
            part.send(action[i : i + 1])
            own = part.recv()
            assert all((whole[i] == one[0]).all() for whole, one in zip(out, own, strict=True))
    new = both.restart([2, 1], [8, 9])
    assert (new == np.concatenate([parts[2].restart([0], [8]), parts[1].restart([0], [9])])).all()
    both.close()


@pytest.mark.parametrize("game", ["catch", "breakout"])
def test_a_game_that_is_restarted_is_the_one_that_its_seed_starts(game):
    """Whatever was played before: this is what lets an evaluation play its games in any order and place."""
    envs, fresh = make(game, 3), make(game, 1)
    random = np.random.default_rng(0)
    envs.reset([1, 2, 3])
    for _ in range(50):
        envs.send(random.integers(0, 3, 3))
        envs.recv()
    assert (envs.restart([2], [9])[0] == fresh.reset([9])[0]).all()
    for _ in range(100):
        action = random.integers(0, 3, 3)
        envs.send(action)
        fresh.send(action[2:])
        for whole, one in zip(envs.recv(), fresh.recv(), strict=True):
            assert (whole[2] == one[0]).all()
    envs.close()
    fresh.close()


@pytest.mark.slow
def test_several_games_are_trained_resumed_and_evaluated_in_one_command(tmp_path, capsys):
    """Killed between two checkpoints and resumed, a fleet of three games ends like one that was not."""
    small = as_options(TINY | {"evaluation.episodes": 1, "evaluation.epsilon": 0.5})
    command = ["train", "catch", "breakout", "alien", "--seeds", "0", "1", "--steps", "75", *small]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    shown = capsys.readouterr().out
    assert "spr on catch, seeds 0 1," in shown  # it can't share a fleet with games that have room for 18 actions
    assert "spr on breakout, seeds 0 1; alien, seeds 0 1" in shown
    stopped = []

    def stop():
        stopped.append(1)
        return len(stopped) > 200

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "check", lambda _: stop())
        assert main([*command, "--out", str(tmp_path / "cut")]) == 130
    assert main([*command, "--out", str(tmp_path / "cut"), "--resume"]) == 0
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("agent.safetensors"))
    assert len(files) == 6
    for file in files:
        one, two = (tmp_path / where / file for where in ("whole", "cut"))
        assert one.read_bytes() == two.read_bytes(), file
    for game, actions in (("catch", 3), ("alien", 18), ("breakout", 4)):
        weights = load_file(tmp_path / "whole" / "spr" / game / "seed-0" / "agent.safetensors")
        assert weights["head.advantage.bias"].shape == (actions * 51,)
    capsys.readouterr()
    folder = tmp_path / "whole" / "spr" / "breakout" / "seed-1"
    assert main(["evaluate", str(folder), "--json"]) == 0
    episodes = json.loads((folder / "result.json").read_text())["episodes"]
    assert json.loads(capsys.readouterr().out)["episodes"] == episodes


@pytest.mark.parametrize(
    ("games", "message"), [(["pong", "pong"], "pong is given twice"), (["pong", "pnog"], "did you mean 'pong'")]
)
def test_games_that_can_not_be_a_fleet_are_refused_before_anything_is_written(games, message, tmp_path, capsys):
    assert main(["train", *games, "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds checkpoints, but its config.json is gone"),
        (lambda folder: [file.write_bytes(b"torn") for file in folder.glob("checkpoint*")], "no checkpoint in"),
    ],
)
def test_one_run_that_can_not_go_on_is_named_and_costs_the_others_nothing(harm, said, tmp_path, capsys):
    small = as_options(TINY | {"evaluation.episodes": 1, "schedule.steps": 75})
    command = ["train", "catch", "--seeds", "0", "1", "--out", str(tmp_path), "--checkpoint-every", "70", *small]
    with pytest.MonkeyPatch.context() as patch:
        steps = iter(range(73))
        patch.setattr(StopRequest, "check", lambda _: next(steps, None) is None)
        assert main(command) == 130
    good, bad = (tmp_path / "spr" / "catch" / f"seed-{seed}" for seed in (0, 1))
    harm(bad)
    files = {path: path.read_bytes() for path in good.iterdir()}
    capsys.readouterr()
    assert main([*command, "--resume"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(bad) in error
    assert error.count("\n") == 1
    assert files == {path: path.read_bytes() for path in good.iterdir()}


def test_a_summary_names_what_each_games_score_is_beside():
    common = {"seed": 0, "score": 2.0, "episodes": [2.0], "train_seconds": 1, "eval_seconds": 1}
    table = _summary(
        [
            common | {"game": "pong", "human_normalised": 0.5},
            common | {"game": "catch", "human_normalised": None, "random_score": 2.6},
        ]
    )
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["human-normalised"] == ["0.500", ""]
    assert columns["random agent"] == ["", "2.60"]
