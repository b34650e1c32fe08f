"""Watching shows the very game that is played, and the very numbers of the networks."""

import sys
from pathlib import Path

import gymnasium
import imageio_ffmpeg
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, LITTLE_FRAMES, rewrite, small
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from spr.agent.networks import Networks
from spr.cli import main
from spr.common.errors import UnusableError, UserError
from spr.envs.base import seeds_for
from spr.envs.catch import Catch
from spr.envs.gymnasium_adapter import to_frame
from spr.envs.registry import make, make_shown
from spr.evaluation import batched_policy, canvas, film, scheduler, video_file
from spr.evaluation.canvas import Canvas, Moment
from spr.evaluation.film import Player, play
from spr.runs import run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint, snapshot
from spr.training.fleet import assemble
from spr.training.loop import Training

CURIOUS = {"evaluation.epsilon": 0.3, "evaluation.episodes": 1, "learner.depth": 3} | LITTLE_FRAMES


def agent_of(game="catch", preset="spr", **changes):
    """An agent that has learnt nothing."""
    config = small(preset, **CURIOUS | changes)
    envs = make_shown(game, config.observation)
    torch.manual_seed(3)
    networks = Networks(config, len(envs.action_names)).requires_grad_(False)
    return Player(Run(Path(), preset, game, 0, config, envs.protocols[0]), networks, envs, [])


def seen_by(agent, seed, moments):
    """Play the actions of a film again, plainly: observations [T, ...], whether each begins an episode, and rewards."""
    obs = agent.run.config.observation
    envs = make(agent.run.game, 1, obs=obs)
    frame, first = envs.reset(seeds_for(seed, "evaluate", 1))[0], True
    frames, firsts, rewards = [], [], []
    stacks = []
    for moment in moments:
        frames = [np.zeros_like(frame)] * (obs.stack - 1) + [frame] if first else [*frames[1:], frame]
        stacks.append(np.concatenate(frames))
        firsts.append(first)
        envs.send(np.array([moment.action]))
        out = envs.recv()
        frame, first = out.frame[0], bool(out.terminal[0] | out.truncated[0])
        rewards.append(float(out.reward[0]))
    envs.close()
    return torch.from_numpy(np.stack(stacks)).float() / 255, firsts, rewards


def test_the_same_seed_is_the_same_game_and_another_seed_another():
    agent = agent_of()
    one, again, other = (list(play(agent, seed)) for seed in (5, 5, 6))
    assert len(one) == len(again) == 30
    for a, b in zip(one, again, strict=True):
        assert all(np.array_equal(x, y, equal_nan=isinstance(x, np.ndarray)) for x, y in zip(a, b, strict=True))
    assert [moment.action for moment in one] != [moment.action for moment in other]
    assert [moment.step for moment in one] == list(range(1, 31))
    assert [moment.step for moment in play(agent, 5, most=7)] == list(range(1, 8))


@pytest.mark.parametrize("seed", [0, 4])
def test_it_is_the_first_game_of_the_evaluation_and_its_score_the_sum_of_rewards(seed):
    agent = agent_of()
    moments = list(play(agent, seed))
    params = {name: p[None] for name, p in agent.networks.named_parameters()}
    *_, last = scheduler.play(agent.run.config, batched_policy.Agents(["catch"], params, [seed]))
    assert moments[-1].score == last.scores[0][0]
    _, _, rewards = seen_by(agent, seed, moments)
    assert [moment.score for moment in moments] == np.cumsum(rewards).tolist()
    assert moments[-1].score > 0
    assert any(moment.explores for moment in moments)


@pytest.mark.parametrize("preset", ["spr", "drq"])
def test_what_is_shown_is_what_the_networks_say(preset):
    agent = agent_of(preset=preset)
    moments = list(play(agent, 1))
    obs, _, _ = seen_by(agent, 1, moments)
    q = agent.networks(obs)
    np.testing.assert_allclose(np.stack([moment.q_values for moment in moments]), q.numpy(), atol=1e-5)
    assert all(moment.action == moment.q_values.argmax() for moment in moments if not moment.explores)
    for moment in moments:
        if agent.run.config.learner.rl_loss == "categorical":
            assert moment.distribution.sum() == pytest.approx(1, abs=1e-5)
            mean = (moment.distribution * agent.networks.support.numpy()).sum()
            assert mean == pytest.approx(moment.q_values[moment.action], abs=1e-5)
        else:
            assert moment.distribution is None
        shown = to_frame(moment.picture, agent.run.config.observation)
        np.testing.assert_allclose(shown / 255, obs[moment.step - 1, -1:].numpy(), atol=0.005)


def plain_model(transition, z, action):
    """One step of the transition model as the paper has it: z [B, C, H, W], an action for each."""
    planes = F.one_hot(action, transition.conv1.weight.shape[1] - z.shape[1]).float()[:, :, None, None]
    x = torch.cat([z, planes.expand(-1, -1, *z.shape[2:])], 1)
    x = F.relu(F.conv2d(x, transition.conv1.weight, transition.conv1.bias, padding=1))
    x = F.batch_norm(x, None, None, transition.bn.weight, transition.bn.bias, training=True, eps=transition.bn.eps)
    x = F.relu(F.conv2d(x, transition.conv2.weight, transition.conv2.bias, padding=1))
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return (x - low) / (high - low).clamp(min=1e-5)


@pytest.mark.parametrize(("window", "lives"), [(16, True), (4, True), (8, False)])
def test_cosines_are_those_of_the_loss_and_none_reaches_before_an_episode(window, lives, monkeypatch):
    agent = agent_of()
    networks, depth = agent.networks, 3
    if not lives:  # one long episode: the deepest predictions are there too
        recv = Catch.recv
        monkeypatch.setattr(Catch, "recv", lambda self: recv(self)._replace(terminal=np.array([False])))
    made = film.Foresight
    monkeypatch.setattr(film, "Foresight", lambda networks, depth: made(networks, depth, window))
    moments = list(play(agent, 2))
    obs, firsts, _ = seen_by(agent, 2, moments)
    actions = torch.tensor([moment.action for moment in moments])
    z = networks.encoder(obs)

    def head(latents):
        return latents.permute(0, 2, 3, 1).flatten(1) @ networks.head.hidden.weight.T + networks.head.hidden.bias

    counted = 0
    for t, moment in enumerate(moments):
        for k in range(1, depth + 1):
            if t < k or any(firsts[t - k + 1 : t + 1]):
                assert np.isnan(moment.cosines[k - 1])
                continue
            begins = list(range(max(0, t - max(window, depth)), t))
            ahead = z[begins].permute(0, 3, 1, 2)
            for j in range(k):
                begins = [i for i in begins if i + j < t]  # the others have arrived before
                ahead = plain_model(networks.transition, ahead[: len(begins)], actions[[i + j for i in begins]])
            assert begins[-1] == t - k
            predicted = head(ahead[-1:]) @ networks.predictor.weight.T + networks.predictor.bias
            wanted = F.cosine_similarity(predicted, head(z[t : t + 1].permute(0, 3, 1, 2)))
            assert moment.cosines[k - 1] == pytest.approx(float(wanted), abs=1e-4)
            counted += 1
    assert counted == (10 * 2 + 10 if lives else 29 + 28 + 27)


def test_agents_without_a_model_foresee_nothing():
    assert next(play(agent_of(preset="rainbow"), 0)).cosines is None


def test_ataris_colours_are_of_the_very_game_that_is_played():
    shown, plain = make_shown("breakout"), make("breakout", 1)
    assert shown.action_names == ["NOOP", "FIRE", "RIGHT", "LEFT"]
    frame, same = shown.reset([5]), plain.reset([5])
    random, ends, pictures = np.random.default_rng(0), 0, []
    for _ in range(300):
        assert np.array_equal(frame, same)
        picture = shown.picture()
        assert picture.shape == (210, 160, 3)
        off = np.abs(to_frame(picture).astype(int) - frame[0])
        assert off.mean() < 2  # gray by the palette, or by the colours that it is made of
        pictures.append(picture)
        action = random.integers(4, size=1)
        shown.send(action)
        plain.send(action)
        mine, yours = shown.recv(), plain.recv()
        assert all(np.array_equal(a, b) for a, b in zip(mine, yours, strict=True))
        frame, same = mine.frame, yours.frame
        ends += int(mine.game_over[0])
    assert ends > 0
    assert len(np.unique(pictures[0].reshape(-1, 3), axis=0)) > 6
    assert len({picture.tobytes() for picture in pictures}) > 250
    shown.close()
    plain.close()


def test_two_emulators_that_part_are_noticed():
    shown = make_shown("breakout")
    shown.reset([5])
    shown._colour.reset([6])

    def play_on():
        for action in np.random.default_rng(0).integers(4, size=500):
            shown.send(np.array([action]))
            shown.recv()

    with pytest.raises(RuntimeError, match="did not play the same game"):
        play_on()
    shown.close()


class Lamp(gymnasium.Env):
    """Shows itself to people larger than to agents, and in another colour; four steps long."""

    metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = gymnasium.spaces.Box(0, 255, (44, 44), np.uint8)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def get_action_meanings(self):
        return ["off", "on"]

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return self.image(), {}

    def image(self):
        return np.full((44, 44), 10 * self.time, np.uint8)

    def step(self, action):
        assert action in (1, 2)
        self.time += 1
        return self.image(), 1.0, self.time == 4, False, {}

    def render(self):
        return np.full((100, 50, 3), (self.time, 0, 200), np.uint8)


class Dark(Lamp):
    """The same, but it can't draw itself, and does not name its actions."""

    metadata = {"render_modes": []}  # noqa: RUF012
    get_action_meanings = None

    def __init__(self):
        pass


gymnasium.register("Lamp-v0", Lamp, disable_env_checker=True)
gymnasium.register("Dark-v0", Dark, disable_env_checker=True)


def test_games_of_gymnasium_draw_themselves_where_they_can():
    agent = agent_of("Lamp-v0")
    moments = list(play(agent, 0))
    assert agent.envs.action_names == ["off", "on"]
    assert [moment.picture.shape for moment in moments] == [(100, 50, 3)] * 4
    assert [moment.picture[0, 0].tolist() for moment in moments] == [[time, 0, 200] for time in range(4)]
    assert moments[-1].score == 4
    agent = agent_of("Dark-v0")
    moments = list(play(agent, 0))
    assert agent.envs.action_names == ["1", "2"]
    assert [moment.picture[0, 0].tolist() for moment in moments] == [[10 * time] * 3 for time in range(4)]


def pixels(picture, colour):
    return int((picture == np.array(colour, np.uint8)).all(-1).sum())


@pytest.mark.parametrize(("actions", "depth", "atoms"), [(3, 5, 51), (18, 5, 51), (200, 40, 1001), (2, None, None)])
def test_pictures_are_of_one_size_whatever_there_is_to_show(actions, depth, atoms):
    random = np.random.default_rng(0)
    title, names = "a title that is much too long for its line " * 3, ["UPRIGHTFIRE" * 2] * actions
    drawer = Canvas(title, names, np.linspace(-10, 10, atoms or 2))
    for explores, side in ((False, 84), (True, 900), (False, 7)):
        moment = Moment(
            step=12_345,
            picture=np.full((side, 2 * side, 3), 77, np.uint8),
            q_values=random.normal(size=actions).astype(np.float32),
            action=actions - 1,
            explores=explores,
            distribution=None if atoms is None else random.dirichlet(np.ones(atoms)).astype(np.float32),
            cosines=None if depth is None else np.array([np.nan, -0.5, *np.ones(depth - 2)], np.float32),
            score=-1_234_567.5,
        )
        drawn = drawer.draw(moment)
        assert (drawn.shape, drawn.dtype) == ((canvas.HEIGHT, canvas.WIDTH, 3), np.uint8)
        assert pixels(drawn, (77, 77, 77)) > 50_000
        assert (pixels(drawn, canvas._RANDOM) > 0) == explores
        assert (pixels(drawn, canvas._FORESEEN) > 0) == (depth is not None)


def test_the_action_that_is_taken_is_marked_and_bars_are_as_long_as_their_values():
    drawer = Canvas("", ["a", "b", "c"], np.zeros(2))
    q = np.array([1.0, 3.0, 2.0], np.float32)
    drawn = drawer.draw(Moment(1, np.zeros((9, 9, 3), np.uint8), q, 1, False, None, None, 0.0))
    chosen, other = pixels(drawn, canvas._CHOSEN), pixels(drawn, canvas._BAR)
    assert other == pytest.approx(chosen / 2, rel=0.05)
    drawn = drawer.draw(Moment(1, np.zeros((9, 9, 3), np.uint8), q, 2, False, None, None, 0.0))
    assert pixels(drawn, canvas._CHOSEN) == pytest.approx(chosen / 2, rel=0.05)


def save(path, game="catch", steps=(), agent_at=None, **changes):
    """Make a run's folder with checkpoints after some steps, each with other weights, and perhaps an agent."""
    config = small(**CURIOUS | {"schedule.steps": 100} | changes)
    envs = make(game, 1, obs=config.observation)
    training = Training(assemble(config, envs, [0], CPU))
    run = Run(path, "spr", game, 0, config, envs.protocols[0], "fp32")
    run_folder.create([run])
    weights = {}
    for step in sorted({*steps, agent_at} - {None}):
        training.fleet.state.weights[0] *= 1.01
        weights[step] = {name: p.clone() for name, p in training.fleet.agent(0).items()}
        if step == agent_at:
            run_folder.save_agent(run, weights[step], step)
        if step in steps:
            checkpoint.write(path, snapshot.snapshot(training, 0)._replace(step=step))
    envs.close()
    return weights


def alike(agent, weights):
    named = dict(agent.networks.named_parameters())
    return named.keys() == weights.keys() and all(torch.equal(named[name], weights[name]) for name in named)


@pytest.mark.parametrize("game", ["catch", "breakout"])
def test_a_run_in_the_middle_of_training_is_watched_from_its_newest_good_checkpoint(game, tmp_path):
    folder = tmp_path / "run"
    weights = save(folder, game, steps=(10, 20))
    agent = film.load_player(folder, CPU)
    assert agent.run.step == 20
    assert agent.notes == []
    assert alike(agent, weights[20])
    assert len(list(play(agent, 0, most=3))) == 3
    agent.close()
    newest = checkpoint.path_of(folder, 20)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    agent = film.load_player(folder, CPU)
    assert agent.run.step == 10
    assert alike(agent, weights[10])
    assert agent.notes == [f"{newest} can't be used: its checksum does not match its content"]
    agent.close()
    with pytest.raises(UnusableError, match="'weights' is not what this run's configuration asks for"):
        checkpoint.read_row(folder, 10, "weights", 7)
    checkpoint.path_of(folder, 10).write_bytes(b"")
    with pytest.raises(UserError, match=r"there is nothing to play: .*0020.safetensors can't be used"):
        film.load_player(folder, CPU)


def test_the_newer_of_agent_and_checkpoint_is_watched(tmp_path):
    weights = save(tmp_path / "a", steps=(10, 20), agent_at=10)
    assert alike(film.load_player(tmp_path / "a", CPU), weights[20])
    weights = save(tmp_path / "b", steps=(10,), agent_at=20)
    assert alike(film.load_player(tmp_path / "b", CPU), weights[20])


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_films_of_a_run_and_of_an_exported_agent_are_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", agent_at=50)
    assert main(["export", "run", "agent.safetensors"]) == 0
    capsys.readouterr()
    assert main(["watch", "run", "--seed", "3", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "catch-seed-3.mp4: 30 frames, score " in said
    assert "after 50 of 100 steps" in said
    assert imageio_ffmpeg.count_frames_and_secs("catch-seed-3.mp4") == (30, 2.0)
    arguments = ["watch", "agent.safetensors", "--out", "film.GIF", "--steps", "12", "--fps", "10", "--device", "cpu"]
    assert main(arguments) == 0
    with Image.open("film.GIF") as made:
        assert (made.n_frames, made.size, made.info["duration"]) == (12, (canvas.WIDTH, canvas.HEIGHT), 100)
    before = Path("film.GIF").read_bytes()
    assert main(arguments) == 2
    assert "is there already" in capsys.readouterr().err
    assert Path("film.GIF").read_bytes() == before
    assert main([*arguments, "--overwrite", "--seed", "8"]) == 0
    assert Path("film.GIF").read_bytes() != before
    assert files(tmp_path) == ["agent.safetensors", "catch-seed-3.mp4", "film.GIF", "run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither a run's folder"),
        (["."], "has no config.json: it is not a run's folder"),
        (["begun"], "neither an agent nor a checkpoint yet"),
        (["run", "--out", "film.avi"], "a film is a file such as film.mp4 or film.gif, not film.avi"),
        (["run", "--out", "run"], "a film is a file such as"),
        (["run", "--out", "nowhere/film.mp4"], "there is no folder nowhere"),
        (["run", "--steps", "0"], "--steps takes a number of at least 1"),
        (["run", "--fps", "0"], "--fps takes a number of at least 1"),
        (["run", "--seed", "-1"], "seeds are whole numbers and ranges"),
        (["run", "--device", "tpu"], "unknown device 'tpu'"),
        (["run", "--live"], "--live needs a display, and there is none here"),
        (["other"], "chooses between 3 actions, but breakout has 4"),
    ],
)
def test_what_can_not_be_watched_is_refused_in_one_line_and_leaves_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    save(tmp_path / "begun")
    save(tmp_path / "run", agent_at=50)
    save(tmp_path / "other", agent_at=50)
    rewrite(tmp_path / "other" / "config.json", game="breakout")
    capsys.readouterr()
    assert main(["watch", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert files(tmp_path) == ["begun", "other", "run"]


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_a_window_shows_the_game_until_it_is_closed(tmp_path, monkeypatch, capsys):
    """As far as it goes without a display: on matplotlib's canvas that draws into memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISPLAY", ":99")
    plt.switch_backend("agg")
    save(tmp_path / "run", agent_at=50)
    arguments = ["watch", "run", "--live", "--fps", "1000", "--steps", "6", "--device", "cpu"]
    assert main(arguments) == 2
    assert "--live needs a toolkit for windows" in capsys.readouterr().err
    monkeypatch.setattr(FigureCanvasAgg, "required_interactive_framework", "memory")
    seen = []

    def pause(seconds):
        assert seconds == 0.001
        seen.append(plt.gcf().axes[0].images[0].get_array().copy())
        if len(seen) == 8:
            plt.close()

    monkeypatch.setattr(plt, "pause", pause)
    assert main(arguments) == 0
    assert len(seen) == 6
    assert "catch: 6 frames, score" in capsys.readouterr().out
    assert pixels(seen[0], canvas._CHOSEN) + pixels(seen[0], canvas._RANDOM) > 0
    assert main([*arguments, "--out", "film.mp4"]) == 0
    assert imageio_ffmpeg.count_frames_and_secs("film.mp4")[0] == 2  # its window was closed
    assert plt.get_fignums() == []
    assert files(tmp_path) == ["film.mp4", "run"]


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", agent_at=50)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert main(["watch", "run"]) == 2
    assert "pip install imageio-ffmpeg" in capsys.readouterr().err
    assert files(tmp_path) == ["run"]


def test_a_film_that_is_cut_off_or_can_not_be_written_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    picture = np.zeros((canvas.HEIGHT, canvas.WIDTH, 3), np.uint8)
    file = tmp_path / "film.mp4"

    def cut_off():
        with video_file.writing(file, 15) as show:
            while not any(name.startswith("film.mp4.") for name in files(tmp_path)):
                show(picture)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert files(tmp_path) == []

    def failing():
        with video_file.writing(file, 15) as show:
            for _ in range(50):
                show(picture)

    monkeypatch.setattr(video_file, "_FORMS", {".mp4": ["-c:v", "no_such_codec", "-f", "mp4"]})
    with pytest.raises(UserError, match=r"can't write to .*film.mp4: ") as refused:
        failing()
    assert "\n" not in str(refused.value)
    assert files(tmp_path) == []
    assert capsys.readouterr().err == ""
