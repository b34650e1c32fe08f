"""Environments of other packages, trained for a moment and judged: colours, planes of booleans, wrapped ones."""

import json

import numpy as np
import pytest
from conftest import CPU, ROOT, as_options

from spr.cli import main
from spr.evaluation import film

TINY = {
    "network.hidden": 16,
    "replay.batch_size": 4,
    "replay.n_step": 2,
    "learner.depth": 2,
    "schedule.learning_starts": 110,
    "evaluation.episodes": 2,
}
SMALL_PLANES = {
    "observation.height": 10,
    "observation.width": 10,
    "observation.channels": 4,
    "observation.stack": 1,
    "network.encoder": "minatar",
    "augment.shift": 1,
    "replay.clip_rewards": False,
}
GAMES = [
    ("CarRacing-v3", {"observation.channels": 3}, ["continuous=false", "max_episode_steps=30"], 5),
    ("own_env:grid", {"observation.channels": 3}, ["size=6", "max_steps=25"], 7),
    ("own_env:planes", SMALL_PLANES, ["game=breakout", "use_minimal_action_set=true"], 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("game", "changes", "arguments", "actions"), GAMES, ids=["CarRacing", "MiniGrid", "MinAtar"])
def test_other_packages_are_trained_and_judged(game, changes, arguments, actions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "docs" / "examples")
    given = [part for text in arguments for part in ("--env-arg", text)]
    options = [*as_options(TINY | changes), *given, "--steps", "120", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["train", game, *options]) == 0
    (run,) = (tmp_path / "spr").glob("*/seed-0")
    result = json.loads((run / "result.json").read_text())
    assert len(result["episodes"]) == 2
    assert np.isfinite(result["episodes"]).all()
    assert len(result["protocol"]["arguments"]) == len(arguments)
    assert result["protocol"]["learning_reward"] == ("raw" if "planes" in game else "clipped to [-1, 1]")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["episodes"]) == 2
    agent = film.load_player(run, CPU)
    moments = list(film.film(agent, 0, 5, []))
    assert len(moments[0].q_values) == len(agent.envs.action_names) == actions
    assert ("forward" in agent.envs.action_names) == ("grid" in game)  # MiniGrid says what they are
    assert max(moment.picture.max() for moment in moments) > 50  # something is to be seen
    agent.close()


@pytest.mark.slow
def test_what_does_not_fit_says_what_would_make_it_fit(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs" / "examples")
    for game, words in (
        ("CarRacing-v3", "--env-arg continuous=false"),
        ("MiniGrid-Empty-5x5-v0", "minigrid.wrappers.ImgObsWrapper"),
        ("own_env:planes", "--set observation.channels=4"),
    ):
        assert main(["train", game, "--out", str(tmp_path), "--plugin", "minigrid"]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
