"""The package from Python: train, look on, load, ask, evaluate, share; and the notebook that shows it."""

import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from conftest import ROOT

import spr
from spr import api
from spr.agent.networks import Networks
from spr.cli import main
from spr.envs.gymnasium_adapter import Gymnasium
from spr.experiments import events

TINY = {
    "network.hidden": 16,
    "replay.batch_size": 4,
    "replay.n_step": 2,
    "evaluation.episodes": 3,
    "schedule.learning_starts": 60,
    "learner.depth": 2,
}


class Corners(gymnasium.Env):
    """Walks on a 12x12 board; one step to the right earns 2.5."""

    observation_space = gymnasium.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return self._image(), {}

    def step(self, action):
        self.time += 1
        return self._image(), 2.5 * action, self.time == 8, False, {}

    def _image(self):
        image = np.zeros((12, 12), np.uint8)
        image[self.time] = 255
        return image


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return spr.train("catch", seeds=[3, 4], changes=TINY, steps=70, out=out, device="cpu")


@pytest.fixture(scope="module")
def agent(runs):
    return runs[0].agent("cpu")


def observations(agent, count, seed=0):
    obs = agent.config.observation
    return np.random.default_rng(seed).integers(0, 256, (count, obs.planes, obs.height, obs.width), dtype=np.uint8)


def test_importing_takes_no_time_and_shows_what_there_is():
    """Without PyTorch, which alone takes seconds."""
    code = "import spr, sys; assert 'torch' not in sys.modules; print(*[n for n in dir(spr) if n in spr.__all__])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(spr.__all__)
    assert all(getattr(spr, name).__doc__ for name in spr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spr.nothing


def test_runs_come_back_with_their_results_and_curves(runs):
    assert [(run.game, run.seed) for run in runs] == [("catch", 3), ("catch", 4)]
    for run in runs:
        assert json.loads((run.folder / "result.json").read_text())["episodes"] == run.scores
        assert run.score == pytest.approx(np.mean(run.scores))
        curve = run.curve()
        assert {"step", "score", "spr", "rl"} <= curve.keys()
        assert curve["step"][-1] == 70
        assert len({len(column) for column in curve.values()}) == 1
        assert run.training_games().keys() == {"step", "score", "length"}
        assert len(repr(run)) < 500


@pytest.mark.slow
def test_a_curve_that_lost_lines_says_so(tmp_path):
    (run,) = spr.train("catch", changes=TINY, steps=70, out=tmp_path, device="cpu", log="csv", log_every=35)
    assert run.curve()["step"] == [35, 70]
    assert (run.folder / "metrics.csv").read_text().startswith("step,games,")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text(lines[1])
    with pytest.warns(UserWarning, match="has lost lines since its run was finished"):
        assert run.curve()["step"] == [70]


def test_what_an_agent_says_is_what_its_networks_compute(agent):
    batch = observations(agent, 3)
    networks = Networks(agent.config, 3)
    networks.load_state_dict(agent.weights)
    x = torch.from_numpy(batch).float() / 255
    with torch.no_grad():
        q, z = networks(x), networks.encoder(x)
        bias = networks.transition.action_bias(torch.tensor([2, 0, 1]))
        one = networks.transition(z, bias[None])[0]
        two = networks.transition(one, bias.flip(0)[None])[0]
    np.testing.assert_allclose(agent.q_values(batch), q.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(agent.encode(batch), z.numpy(), rtol=1e-5, atol=1e-6)
    predicted = agent.predict(batch, [[2, 1], [0, 0], [1, 2]])
    np.testing.assert_allclose(predicted, torch.stack([one, two], 1).numpy(), rtol=1e-4, atol=1e-5)
    assert agent.act(batch).tolist() == q.argmax(1).tolist()


def test_one_observation_or_many_as_array_or_tensor(agent):
    batch = observations(agent, 4)
    assert isinstance(agent.act(batch[0]), int)
    for answer in (agent.q_values, agent.encode):
        np.testing.assert_allclose(answer(batch[1]), answer(batch)[1], rtol=1e-5, atol=1e-6)
        assert isinstance(answer(torch.from_numpy(batch)), torch.Tensor)
    assert agent.predict(batch[0], [0, 1, 2]).shape == (3, *agent.encode(batch[0]).shape)
    for wrong in (batch[:, :2], batch.astype(np.float32), batch[None]):
        with pytest.raises(spr.UserError, match="an observation is 4x84x84 numbers of type uint8"):
            agent.act(wrong)
    for wrong in (None, "x"):
        with pytest.raises(spr.UserError, match=f"an observation is 4x84x84 .* not {wrong!r}"):
            agent.act(wrong)
    assert (agent.act(batch[..., ::-1]) == agent.act(batch[..., ::-1].copy())).all()  # a view is as good
    for good in (torch.tensor([0, 1]), np.array([0, 1], np.uint8), np.array([1, 0])[::-1]):
        assert (agent.predict(batch[0], good) == agent.predict(batch[0], [0, 1])).all()
    with pytest.raises(spr.UserError, match="actions must be"):
        agent.predict([[1], [2, 3]], [0])
    for wrong in ([3], [[0]], [-1], [], [0.5], 1, "ab", None, [True], np.array([0], np.uint64), np.array([1j])):
        with pytest.raises(spr.UserError, match="each a whole number from 0 to 2"):
            agent.predict(batch[0], wrong)
    for wrong in ([[0]] * (len(batch) + 1), [[0, 1], [0]], [0]):
        with pytest.raises(spr.UserError, match="actions must be"):
            agent.predict(batch, wrong)


def test_an_agent_is_saved_to_a_file_and_not_to_a_folder(agent, tmp_path):
    for folder in (f"{tmp_path}/new/", tmp_path):
        with pytest.raises(spr.UserError, match="is a folder: name a file"):
            agent.save(folder)
    assert not list(tmp_path.iterdir())


def test_an_observer_stacks_what_the_agent_sees(agent):
    observer = agent.observer()
    first = observer.reset(np.full((84, 84), 7, np.uint8))
    second = observer.push(np.full((42, 42, 3), 9, np.uint8))
    assert [int(plane.max()) for plane in first] == [0, 0, 0, 7]
    assert [int(plane.max()) for plane in second] == [0, 0, 7, 9]
    assert int(observer.reset(np.zeros((84, 84), np.uint8)).max()) == 0
    agent.act(second)


class Images(gymnasium.Env):
    """Shows images of any kind, and nothing else."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}


@pytest.mark.parametrize(
    ("space", "speaks"),
    [
        (gymnasium.spaces.Box(0, 255, (42, 30), np.uint8), True),
        (gymnasium.spaces.Box(0, 255, (3, 42, 30), np.uint8), True),
        (gymnasium.spaces.Box(0, 255, (42, 30, 3), np.uint8), True),
        (gymnasium.spaces.Box(0, 1, (42, 30), bool), True),
        (gymnasium.spaces.Box(0, 1, (42, 30), np.float32), False),
        (gymnasium.spaces.Box(-1, 3, (42, 30), np.float64), False),
        (gymnasium.spaces.Box(0, 1000, (42, 30), np.int16), False),
    ],
)
def test_an_observer_makes_the_frames_that_training_makes(agent, space, speaks):
    """Of whatever numbers; where these do not say what is black and what white, the environment must be given."""
    env = Images(space)
    image, _ = env.reset()
    (frame,) = Gymnasium("Images", 1, agent.config.observation, lambda: env).reset([0])
    for given in (env, space):
        assert (agent.observer(given).reset(image)[-1:] == frame).all()
    assert frame.max() > 200  # and not black
    if speaks:
        assert (agent.observer().reset(image)[-1:] == frame).all()
    else:
        with pytest.raises(spr.UserError, match=rf"an image of {image.dtype} does not say .* agent.observer\(env\)"):
            agent.observer().reset(image)


def test_an_observer_refuses_what_is_no_image(agent):
    whole = gymnasium.spaces.Box(0, 1, (2, 2), np.float32)
    for given, wrong, said in (
        (None, np.zeros(5, np.uint8), "images are needed"),
        (None, None, "an array of numbers, not None"),
        (None, [[1], [2, 3]], "an array of numbers, not"),
        (gymnasium.spaces.Dict({}), np.zeros((84, 84), np.uint8), "images are needed"),
        (None, np.zeros((84, 84, 5), np.uint8), "shows 5 planes"),
        (whole, np.zeros((3, 2)), "this is an image of shape"),
        (None, np.zeros((0, 4), np.uint8), "an array of numbers, not array"),
        (whole, np.full((2, 2), np.nan), "not finite"),
    ):
        with pytest.raises(spr.UserError, match=said):
            agent.observer(given).reset(wrong)
    with pytest.raises(spr.UserError, match="begins with reset"):
        agent.observer().push(np.zeros((84, 84), np.uint8))
    with pytest.raises(spr.UserError, match="an environment or its observation_space, not 3"):
        agent.observer(3)


@pytest.mark.slow
def test_an_agent_is_judged_as_its_run_was_wherever_it_is_loaded_from(runs, agent, tmp_path):
    assert spr.evaluate(agent).scores == runs[0].scores
    assert spr.evaluate(runs[0].folder).scores == runs[0].scores
    agent.save(tmp_path / "agent.safetensors")
    assert main(["export", str(runs[0].folder), str(tmp_path / "hub") + "/"]) == 0
    for path in (tmp_path / "agent.safetensors", tmp_path / "hub", tmp_path / "hub" / "agent.safetensors"):
        assert spr.evaluate(spr.load(path, "cpu")).scores == runs[0].scores
    assert len(spr.evaluate(agent, episodes=5, seed=8).scores) == 5
    with pytest.raises(spr.UserError, match="this agent chooses between 3 actions, but pong has 6"):
        spr.evaluate(agent, "pong", 1)


def test_a_hubs_folder_has_a_card_and_says_how_it_was_made(runs, tmp_path, capsys):
    target = tmp_path / "new" / "folder"
    assert main(["export", str(runs[1].folder), str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md",
        "agent.safetensors",
        "config.json",
        "result.json",
    ]
    card = (target / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: spr\n")
    assert f"Mean score {runs[1].score:,.2f} over 3 games" in card
    assert "| learner.depth | 2 |" in card
    assert "| training_steps | 70 |" in card
    assert main(["export", str(runs[1].folder), str(target)]) == 2
    assert "is there already: choose another folder" in " ".join(capsys.readouterr().err.split())
    assert main(["report", str(target), "--out", str(tmp_path / "report")]) == 0


@pytest.mark.slow
def test_looking_on_yields_everything_and_leaving_saves(tmp_path):
    more = {"changes": TINY, "steps": 70, "out": tmp_path, "device": "cpu"}
    seen = []
    for event in spr.train_events("catch", **more):
        seen.append(event)
        if isinstance(event, events.Stepped) and event.info.step >= 63:
            break
    assert {events.FleetBegins, events.TrainingBegins, events.Stepped} <= {type(event) for event in seen}
    rest = list(spr.train_events("catch", resume=True, **more))
    assert isinstance(rest[-1], events.Finished)
    assert any(isinstance(event, events.Replaying) for event in rest)
    with pytest.raises(spr.UserError, match="holds a finished run"):
        list(spr.train_events("catch", **more))


@pytest.mark.slow
def test_environments_of_ones_own_are_given_as_functions_or_objects(tmp_path):
    (run,) = spr.train("corners", env=Corners, changes=TINY | {"replay.clip_rewards": False}, steps=70, out=tmp_path)
    assert all(0 <= score <= 20 for score in run.scores)
    assert run.result["protocol"]["learning_reward"] == "raw"
    assert spr.evaluate(run.agent("cpu"), Corners, 2).scores[:2] == run.scores[:2]
    gymnasium.register("Corners-v0", Corners)
    made = gymnasium.make("Corners-v0")
    assert spr.evaluate(run.folder, made, 2).scores[:2] == run.scores[:2]
    assert spr.evaluate(run.folder, Corners(), 2).scores[:2] == run.scores[:2]  # an object that is copied
    one = Corners()
    one.handle = sys.stdout
    with pytest.raises(spr.UserError, match=r"neither made again nor copied \(TypeError: .*\): give a function"):
        spr.evaluate(run.folder, one, 2)
    with pytest.raises(spr.UserError, match=r"env is an environment or a function that makes one, .* not 5"):
        spr.evaluate(run.folder, 5)

    class Louder(Corners):
        """Earns more."""

        def step(self, action):
            image, reward, *ends = super().step(action)
            return image, reward + 100, *ends

    with pytest.raises(spr.UserError, match="holds a finished run"):
        spr.train("corners", env=Louder, changes=TINY, steps=70, out=tmp_path)
    assert spr.evaluate(run.folder, episodes=2).scores == run.scores[:2]  # what was refused has changed nothing
    with pytest.raises(spr.UserError, match="can't be called 'pong'"):
        spr.train("pong", env=Corners, out=tmp_path)


@pytest.mark.parametrize(
    "seeds", [range(3), np.arange(3), torch.arange(3), (n for n in (0, 1, 2)), [np.int64(0), 1, 2]]
)
def test_seeds_are_whole_numbers_of_any_kind(seeds):
    assert api._whole_numbers(seeds) == (0, 1, 2)
    assert api._whole_numbers(np.int64(3)) == (3,)


def test_wrong_arguments_say_what_is_right(tmp_path):
    with pytest.raises(TypeError, match="unexpected argument 'step'; there are checkpoint_every"):
        spr.train("catch", step=3, out=tmp_path)
    with pytest.raises(spr.UserError, match="unknown preset 'sprr'; did you mean 'spr'"):
        spr.train("catch", preset="sprr", out=tmp_path)
    with pytest.raises(spr.UserError, match="seed 3 is given twice"):
        spr.train("catch", seeds=[3, 3], out=tmp_path)
    with pytest.raises(spr.UserError, match="the game catch is given twice"):
        spr.train(["catch", "catch"], out=tmp_path)
    for wrong in (5, None, [3], np.array("pong")):
        with pytest.raises(spr.UserError, match=r"games are names, 'pong' or \['pong', 'breakout'\]"):
            spr.train(wrong, out=tmp_path)
    for wrong in (["a"], {3: 4}):
        with pytest.raises(spr.UserError, match="changes are fields by name"):
            spr.train("catch", changes=wrong, out=tmp_path)
    with pytest.raises(spr.UserError, match=r"resume .* overwrite .* choose one"):
        spr.train("catch", resume=True, overwrite=True, out=tmp_path)
    with pytest.raises(spr.UserError, match="a run's folder or an exported file, not from None"):
        spr.load(None)
    for wrong in ("0-3", 3.5, [0.5], True, [False]):
        with pytest.raises(spr.UserError, match=r"seeds are whole numbers, seeds=3 or seeds=\[0, 1, 2\]"):
            spr.train("catch", seeds=wrong, out=tmp_path)
    with pytest.raises(spr.UserError, match="nothing to train: no seed is given"):
        spr.train("catch", seeds=[], out=tmp_path)
    with pytest.raises(spr.UserError, match="nothing to train: no game is given"):
        spr.train([], out=tmp_path)
    with pytest.raises(spr.UserError, match="log-every takes a number of at least 1"):
        spr.train("catch", log_every=0, out=tmp_path)
    with pytest.raises(spr.UserError, match="unknown logger 'tensorbord'"):
        spr.train("catch", log="tensorbord", out=tmp_path)
    assert "rainbow" in spr.presets()
    assert spr.preset("der").replay.n_step == 20
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells one after the other, as a kernel would."""
    notebook = json.loads((ROOT / "docs" / "guide" / "python.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["runs"][0].score >= 0
