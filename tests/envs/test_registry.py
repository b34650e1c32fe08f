"""The games follow the protocol: lives, rewards, time limits, seeds, and what can't be played is refused."""

import gymnasium
import numpy as np
import pytest
from ale_py import ALEVectorInterface, roms

from spr.common.errors import UserError
from spr.envs import atari
from spr.envs.atari import Atari
from spr.envs.atari100k import PublishedRom, game_names, reference_table, unlike_published
from spr.envs.base import ObservationConfig, seeds_for
from spr.envs.catch import Catch
from spr.envs.gymnasium_adapter import picture_of, to_frame
from spr.envs.registry import make
from spr.envs.roms import rom_checksum, rom_of, rom_path, rom_problem


def step(envs, action):
    envs.send(action)
    return envs.recv()


def play(envs, seeds, steps, seed=0):
    random = np.random.default_rng(seed)
    frames = [envs.reset(seeds)]
    outs = []
    for _ in range(steps):
        outs.append(step(envs, random.integers(0, (envs.game_num_actions or [envs.num_actions])[0], len(seeds))))
        frames.append(outs[-1].frame)
    envs.close()
    return np.stack(frames), outs


@pytest.mark.slow
@pytest.mark.parametrize("game", game_names())
def test_every_game_starts_and_moves(game):
    frames, outs = play(make(game, 2), [1, 2], 120)
    assert frames.shape == (121, 2, 1, 84, 84)
    assert frames.dtype == np.uint8
    assert frames.std() > 0
    assert (frames[0] != frames[-1]).any()
    assert outs[0].reward.dtype == np.float32


def test_a_lost_life_does_not_reset_breakout():
    envs = make("breakout", 1)
    envs.reset([3])
    random = np.random.default_rng(0)
    terminals = overs = 0
    walls = []
    while overs < 2:
        out = step(envs, random.integers(0, 4, 1))
        terminals += int(out.terminal[0])
        overs += int(out.game_over[0])
        if out.terminal[0] and not out.game_over[0]:
            walls.append(out.frame[0, 0, 24:36].sum())
        assert not out.game_over[0] or out.terminal[0]
    envs.close()
    assert terminals == 10  # five lives a game, two games
    assert len(walls) == 8
    # The wall is as it was when the life was lost: bricks stay broken within a game.
    assert walls[3] < walls[0] or walls[7] < walls[4]


@pytest.mark.slow
@pytest.mark.parametrize(("game", "noop_max"), [*((game, 30) for game in game_names()), ("amidar", 1)])
def test_every_end_of_a_game_is_seen_and_nothing_else_is_taken_for_one(game, noop_max, monkeypatch):
    """Past two ends, by random play, beside emulators of the same game that report nothing but its end.

    Amidar also without no-ops, after which it shows no lives for a moment.
    """

    def emulators(*args, **options):
        return ALEVectorInterface(*args, **(options | {"noop_max": noop_max}))

    monkeypatch.setattr(atari, "ALEVectorInterface", emulators)
    envs = Atari(game, 1, threads=1)
    plain = ALEVectorInterface(
        rom_path(game), 1, noop_max=noop_max, use_fire_reset=False, reward_clipping=False, autoreset_mode="SameStep"
    )
    random, start = np.random.default_rng(0), np.array([7])
    envs.reset(start)
    plain.reset(np.arange(1), start)
    over = lost = 0
    while over < 2:
        action = random.integers(envs.game_num_actions[0], size=1)
        envs.send(action)
        plain.send(action, np.ones(1, np.float32))
        out = envs.recv()
        _, reward, ended, cut, _ = plain.recv()
        assert out.reward[0] == reward[0]
        assert out.game_over[0] == (ended[0] or cut[0])
        assert out.terminal[0] or not ended[0]
        over += int(out.game_over[0])
        lost += int(out.terminal[0] and not out.game_over[0])
    envs.close()
    assert (lost == 0) == (game in ("boxing", "freeway", "pong", "private_eye"))  # these have no lives


def test_no_fire_is_pressed_for_the_player():
    envs = make("breakout", 1)
    frames = [envs.reset([0])]
    frames += [step(envs, np.zeros(1, np.int64)).frame for _ in range(30)]
    envs.close()
    below_the_wall = np.stack(frames)[:, 0, 0, 40:72, 10:74]  # without FIRE no ball ever flies here
    assert (below_the_wall == below_the_wall[0]).all()


def test_rewards_are_raw():
    _, outs = play(make("ms_pacman", 2), [0, 1], 200)
    rewards = np.concatenate([out.reward for out in outs])
    assert set(rewards.tolist()) >= {0.0, 10.0}


@pytest.mark.slow
def test_same_seed_and_actions_give_the_same_game_in_any_vector():
    one, _ = play(make("seaquest", 1), [11], 300)
    random = np.random.default_rng(0)
    wide = make("seaquest", 3)
    frames = [wide.reset([5, 11, 8])]
    for _ in range(300):
        action = random.integers(0, wide.game_num_actions[0], 1)
        frames.append(step(wide, np.array([0, action[0], 3])).frame)
    wide.close()
    assert (np.stack(frames)[:, 1] == one[:, 0]).all()
    other, _ = play(make("seaquest", 1), [12], 300)
    assert (other != one).any()


def test_the_time_limit_truncates_and_is_not_a_terminal(monkeypatch):
    build = atari.ALEVectorInterface
    monkeypatch.setattr(atari, "ALEVectorInterface", lambda *a, **k: build(*a, **(k | {"max_episode_steps": 80})))
    _, outs = play(Atari("boxing", 1), [0], 45)
    assert [i for i, out in enumerate(outs) if out.truncated[0]] == [19, 39]
    assert not any(out.terminal[0] for out in outs)
    assert [out.game_over[0] for out in outs] == [out.truncated[0] for out in outs]


def test_the_protocol_is_stamped():
    envs = make("pong", 1)
    assert envs.protocols[0]["name"] == "atari"
    assert envs.protocols[0]["repeat_action_probability"] == 0
    assert envs.protocols[0]["max_num_frames_per_episode"] == 108_000
    assert (envs.num_actions, envs.game_num_actions) == (18, [6])
    envs.close()


def test_a_missing_rom_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("spr.envs.roms._WHEEL", tmp_path)
    assert rom_problem("pong") is not None
    with pytest.raises(UserError, match=r"pong\.bin can't be read: No such file"):
        make("pong", 1)
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="ALE_ROMS_DIR names"):
        make("pong", 1)


def test_the_list_of_roms_is_ale_pys_and_says_where_published_ones_differ():
    rows = {row["game"]: row for row in reference_table("roms")}
    assert list(rows) == list(game_names())
    assert {game: rom_of(game)["rom"] for game in rows} == {game: row["ale_py"] for game, row in rows.items()}
    assert rom_of("catch") == rom_of("Painter-v0") == {}
    for game, row in rows.items():
        assert not row["different"] or row["ale_py"] != row["atari_py"], game
    assert unlike_published("bank_heist", rows["bank_heist"]["ale_py"]) == "pictures"
    assert unlike_published("bank_heist", None) == "pictures"
    assert unlike_published("bank_heist", rows["bank_heist"]["atari_py"]) == ""
    assert unlike_published("pong", rows["pong"]["ale_py"]) == unlike_published("tennis", "any") == ""


def test_a_rom_of_published_scores_is_taken_from_a_folder_and_no_other(monkeypatch, tmp_path):
    ours = roms.get_rom_path("bank_heist").read_bytes()
    (tmp_path / "bank_heist.bin").write_bytes(ours[:-1] + bytes([ours[-1] ^ 1]))
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(UserError, match="neither ale-py's ROM of bank_heist nor atari-py's"):
        make("bank_heist", 1)
    assert rom_path("pong").parent != tmp_path  # what does not lie there is ale-py's own
    found = rom_checksum(tmp_path / "bank_heist.bin")  # stands for the published one, which can't be shipped
    for module in ("spr.envs.roms", "spr.envs.atari100k"):
        monkeypatch.setattr(f"{module}.published_rom", lambda _: PublishedRom(found, "pictures"))
    envs = make("bank_heist", 1)
    assert envs.protocols[0]["rom"] == found
    assert envs.notice == ""
    envs.close()
    monkeypatch.delenv("ALE_ROMS_DIR")
    envs = make("bank_heist", 1)
    assert "ROM differs from the one that published scores were made with in its pictures" in envs.notice
    assert envs.protocols[0]["rom"] != found
    envs.close()


def test_unknown_games_are_refused_with_a_hint():
    with pytest.raises(UserError, match="unknown game 'pnog'; did you mean 'pong'"):
        make("pnog", 1)
    with pytest.raises(UserError, match="unknown game 'zzz'"):
        make("zzz", 1)
    with pytest.raises(UserError, match="can't make the environment 'Nope-v0'"):
        make("Nope-v0", 1)
    with pytest.raises(UserError, match="made by the module no_such_package, which runs only if you name it"):
        make("no_such_package:Game-v0", 1)
    with pytest.raises(UserError, match="'pong' takes no arguments"):
        make("pong", 1, arguments={"mode": 1})


class Painter(gymnasium.Env):
    """A colour game of 40x60 pixels, actions 1..3, that ends after five steps and is cut off in every third game."""

    def __init__(self, shape=(40, 60, 3), dtype=np.uint8, space=None, high=None):
        high = high or (255 if dtype in (np.uint8, np.float32) else 1)
        self.observation_space = gymnasium.spaces.Box(0, high, shape, dtype)
        self.action_space = space or gymnasium.spaces.Discrete(3, start=1)
        self.games = 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.games += 1
        self.time = 0
        return self._image(), {}

    def step(self, action):
        assert action in (1, 2, 3)
        self.time += 1
        done = self.time == 5
        cut = self.games % 3 == 0
        return self._image(), float(action), done and not cut, done and cut, {}

    def _image(self):
        bright = 50 if self.observation_space.high.max() == 255 else 1
        return np.full(self.observation_space.shape, min(bright * self.time, 250), self.observation_space.dtype)


gymnasium.register("Painter-v0", Painter)
gymnasium.register("Wide-v0", Painter, kwargs={"shape": (84, 84)})
gymnasium.register("Channel-v0", Painter, kwargs={"shape": (30, 30, 1)})
gymnasium.register("Vector-v0", Painter, kwargs={"shape": (8,)})
gymnasium.register("Float-v0", Painter, kwargs={"dtype": np.float32})
gymnasium.register("First-v0", Painter, kwargs={"shape": (3, 40, 60)})
gymnasium.register("Planes-v0", Painter, kwargs={"shape": (10, 10, 4), "dtype": bool})
gymnasium.register("Grids-v0", Painter, kwargs={"shape": (4, 10, 10), "dtype": np.int8})
gymnasium.register("Boundless-v0", Painter, kwargs={"dtype": np.float32, "high": np.inf})
gymnasium.register("Continuous-v0", Painter, kwargs={"space": gymnasium.spaces.Box(-1, 1, (2,))})


def test_any_image_game_of_gymnasium_is_played():
    envs = make("Painter-v0", 2)
    assert envs.num_actions == 3
    frames = envs.reset([0, 1])
    assert frames.shape == (2, 1, 84, 84)
    outs = [step(envs, np.array([0, 2])) for _ in range(15)]
    assert [out.frame[0, 0, 3, 3] for out in outs[:5]] == [
        50,
        100,
        150,
        200,
        0,
    ]  # the next game's first frame at its end
    assert outs[0].reward.tolist() == [1, 3]
    ends = [(bool(out.terminal[0]), bool(out.truncated[0]), bool(out.game_over[0])) for out in outs]
    assert [ends[4], ends[9], ends[14]] == [(True, False, True), (True, False, True), (False, True, True)]
    assert sum(over for *_, over in ends) == 3


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("ALE/Pong-v5", "4 frames and repeated with probability 0.25"),
        ("PongNoFrameskip-v4", "held for 1 frame,"),
        ("Pong-v4", "held for 2 to 4 frames,"),
    ],
)
def test_atari_by_other_rules_says_so_and_names_the_benchmarks_game(name, rules):
    envs = make(name, 1)
    assert f"{name} is not played by the rules of Atari 100k" in envs.notice
    assert rules in envs.notice
    assert "spr train pong" in envs.notice
    envs.close()


def test_other_games_have_nothing_to_say():
    assert [make(name, 1).notice for name in ("pong", "catch", "Painter-v0")] == ["", "", ""]


@pytest.mark.parametrize("name", ["Wide-v0", "Channel-v0"])
def test_gray_images_of_any_size_are_played(name):
    assert make(name, 1).reset([0]).shape == (1, 1, 84, 84)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Vector-v0", "images are needed"),
        ("Boundless-v0", "images without bounds: gymnasium.wrappers.RescaleObservation"),
        ("Planes-v0", "shows 4 planes, but observation.channels is 1: --set observation.channels=4"),
        ("Continuous-v0", "actions of type Box, they must be Discrete: some environments have an argument"),
        ("CartPole-v1", "images are needed: gymnasium.wrappers.AddRenderObservation shows its picture instead"),
        ("Blackjack-v1", "observes a Tuple, images are needed"),
    ],
)
def test_what_has_no_images_or_no_discrete_actions_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        make(name, 1)


def test_a_picture_among_other_observations_is_named():
    space = gymnasium.spaces.Dict(
        {"mission": gymnasium.spaces.Text(9), "image": gymnasium.spaces.Box(0, 255, (7, 7, 3), np.uint8)}
    )
    with pytest.raises(UserError, match=r"observes a Dict, .*TransformObservation can take its 'image' .*ImgObs"):
        picture_of("a grid", space, ObservationConfig())


@pytest.mark.parametrize(
    ("name", "channels"), [("Painter-v0", 3), ("First-v0", 3), ("Float-v0", 3), ("Planes-v0", 4), ("Grids-v0", 4)]
)
def test_images_of_any_kind_are_the_same_frames(name, channels):
    """Channels first or last, whole numbers, fractions, booleans: the second frame is half white, or all of it."""
    envs = make(name, 1, obs=ObservationConfig(height=40, width=60, channels=channels))
    envs.reset([0])
    envs.send(np.zeros(1, np.int64))
    frame = envs.recv().frame
    assert frame.shape == (1, channels, 40, 60)
    assert (frame == (50 if channels == 3 else 255)).all()


def test_resizing_averages_areas_and_weighs_colours():
    image = np.zeros((168, 168, 3), np.uint8)
    image[::2, :, 1] = 200  # every other line green
    assert (to_frame(image) == round(200 * 0.587 / 2)).all()
    pattern = np.random.default_rng(0).integers(0, 256, (84, 84), dtype=np.uint8)
    assert (to_frame(pattern) == pattern).all()


def test_colour_and_other_sizes_are_delivered_as_asked_for():
    small = ObservationConfig(height=64, width=48, channels=3)
    image = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    assert (to_frame(image, small) == image.transpose(2, 0, 1)).all()
    assert (to_frame(image[..., 0], small) == image[..., 0]).all()  # a gray image in three channels
    for game in ("pong", "Painter-v0", "catch"):
        envs = make(game, 2, obs=small)
        frames = [envs.reset([0, 1]), *(step(envs, np.zeros(2, np.int64)).frame for _ in range(3))]
        envs.close()
        assert {(frame.shape, frame.dtype) for frame in frames} == {((2, 3, 64, 48), np.dtype(np.uint8))}
    with pytest.raises(UserError, match="multiples of 4"):
        make("catch", 1, obs=ObservationConfig(height=62))


def test_ataris_colours_are_the_emulators():
    """In gray by the usual weights, they are what the emulator shows in gray, but where things move: it pools first."""
    gray, colour = (play(make("pong", 1, obs=ObservationConfig(channels=c)), [3], 60)[0][-1, 0] for c in (1, 3))
    assert colour.std(0).max() > 10  # there is colour
    expected = np.tensordot(np.array([0.299, 0.587, 0.114]), colour.astype(float), 1)
    assert (np.abs(expected - gray[0]) < 1).mean() > 0.99


def test_catch_by_hand():
    envs = Catch(1)
    envs.reset([0])
    envs._column[0], envs._paddle[0], envs._row[0] = 3, 2, 0
    outs = [step(envs, np.array([a])) for a in (2, 2)]
    assert not any(out.terminal[0] or out.reward[0] for out in outs)
    assert envs._row[0] == 2
    caught = step(envs, np.array([1]))
    assert caught.reward[0] == 1
    assert caught.terminal[0]
    assert not caught.game_over[0]


def test_catch_ends_after_ten_balls_and_random_play_catches_about_one_in_four():
    envs = Catch(200)
    envs.reset(range(200))
    random = np.random.default_rng(0)
    outs = [step(envs, random.integers(0, 3, 200)) for _ in range(30)]
    assert all(not out.game_over.any() for out in outs[:-1])
    assert outs[-1].game_over.all()
    caught = np.stack([out.reward for out in outs]).sum(0).mean()
    assert 2.0 < caught < 3.2


def test_seeds_for_are_distinct_by_agent_and_purpose():
    seeds = [s for agent in range(50) for purpose in ("train", "evaluate") for s in seeds_for(agent, purpose, 30)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**31 for s in seeds)
    assert seeds_for(3, "train", 5) == seeds_for(3, "train", 9)[:5]


def test_an_action_that_a_game_lacks_is_an_error_and_not_an_endless_wait():
    envs = make("pong", 2)
    envs.reset([1, 2])
    with pytest.raises(ValueError, match="pong has 6 actions"):
        envs.send(np.array([0, 6]))
    envs.close()
