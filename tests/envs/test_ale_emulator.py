"""An emulator in the caller's own thread plays what ale-py's vector plays, and its screens become the same frames."""

import numpy as np
import pytest
import torch
from ale_py import ALEInterface

from spr.envs import ale_emulator, atari
from spr.envs.ale_emulator import TALLEST, Emulator, noops, shows
from spr.envs.atari import Atari
from spr.envs.atari100k import game_names
from spr.envs.base import ObservationConfig
from spr.envs.roms import rom_path
from spr.evaluation.screen_resize import Resizer

CPU = torch.device("cpu")
GRAY = ObservationConfig()


def resizer(heights, obs=GRAY):
    """What makes the screens of so many rows of one emulator each smaller."""
    made = Resizer(len(heights), obs, CPU)
    for place, height in enumerate(heights):
        made.lend(place, height)
    return made


def resized(screens, obs=GRAY, made=None):
    """Make screens [H, 160] smaller: [H', W'] each."""
    room = np.full((len(screens), 1, 1, TALLEST, 160), 99, np.uint8)  # what is below a screen is not looked at
    for place, screen in enumerate(screens):
        room[place, 0, 0, : len(screen)] = screen
    made = made or resizer([len(screen) for screen in screens], obs)
    return made(torch.from_numpy(room))[:, 0, 0].numpy()


def assert_same_game(game, steps, obs=GRAY, seeds=(5, 2**31 - 1)):
    """Play both with the same random actions; return how many games came to their end."""
    vector, mine = Atari(game, 1, 1, obs), Emulator(game)
    random, over = np.random.default_rng(1), 0
    made = None

    def smaller(screen):
        return resized(screen[0], obs, made)[None]

    for seed in seeds:
        first = mine.reset([seed])
        made = made or resizer([mine.height], obs)
        assert (smaller(first) == vector.reset([seed])).all()
        assert (mine.game_num_actions, mine.num_actions) == (vector.game_num_actions, vector.num_actions)
        for step in range(steps):
            action = random.integers(mine.game_num_actions[0], size=1)
            vector.send(action)
            mine.send(action)
            theirs, ours = vector.recv(), mine.recv()
            for expected, found in zip(theirs[1:], ours[1:], strict=True):
                assert expected.dtype == found.dtype
                assert expected.shape == found.shape
            assert theirs[1:] == ours[1:]
            if ours.game_over[0]:  # the vector has started another game; here somebody must ask for it
                over += 1
                fresh = [(seed + step) % 2**31]
                assert (smaller(mine.reset(fresh)) == vector.reset(fresh)).all()
            else:
                assert (theirs.frame == smaller(ours.frame)).all()
    return over


# Lives of Bank Heist end at 0, which is no lost one; Amidar may show none at first; Breakout's games are short.
@pytest.mark.parametrize(("game", "games"), [("bank_heist", 2), ("amidar", 2), ("breakout", 8), ("krull", 0)])
def test_it_plays_the_games_of_the_vector(game, games):
    assert assert_same_game(game, 900) >= games


@pytest.mark.slow
def test_a_game_depends_neither_on_the_seed_its_rom_was_loaded_with_nor_on_what_was_played_before():
    """Hero's does, for one, where the console is not brought back: what it finds in its memory it takes for its own."""
    for game in game_names():
        loaded = []
        for seed in (1, 2, 2**31 - 1):
            fresh = ALEInterface()
            fresh.setInt("random_seed", seed)
            fresh.setFloat("repeat_action_probability", 0.0)
            fresh.loadROM(rom_path(game))
            loaded.append(fresh.cloneState().serialize())  # the whole console but for its random numbers
        assert loaded == loaded[:1] * 3
        mine = Emulator(game)
        first, memory = mine.reset([3]).copy(), mine._ale.getRAM().tobytes()
        for action in np.random.default_rng(0).integers(mine.game_num_actions[0], size=(100, 1)):
            mine.send(action)
            mine.recv()
        assert (mine.reset([3]) == first).all()
        assert mine._ale.getRAM().tobytes() == memory


def assert_goes_back(game, steps=120, before=150, seed=7):
    """Whatever was played since, from what was saved the same actions lead to the same game, to its end."""
    mine, random = Emulator(game), np.random.default_rng(2)
    mine.reset([seed])

    def run(actions):
        brought = []
        for action in actions:
            mine.send(action)
            brought.append([part.copy() for part in mine.recv()])
            if brought[-1][-1]:
                break
        return brought

    def drawn(count):
        return random.integers(mine.game_num_actions[0], size=(count, 1))

    run(drawn(before))
    saved, actions = mine.save(), drawn(steps)
    first = run(actions)
    if not first[-1][-1]:
        run(drawn(80))
    mine.restore(saved)
    again = run(actions)
    for theirs, ours in zip(first, again, strict=True):
        assert all((one == other).all() for one, other in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("game", ["breakout", "hero", "air_raid"])  # a paddle; memory that outlives a game; 250 rows
def test_a_game_goes_on_from_what_was_saved(game):
    assert_goes_back(game)


@pytest.mark.parametrize("game", ["qbert", "tetris", "pong"])
def test_a_game_that_has_not_moved_is_saved_too(game):
    """After a reset Q*bert and Tetris are in the middle of a frame, which a console's state leaves out."""
    seed = next(seed for seed in range(1_000) if noops(seed) == 0)
    assert_goes_back(game, before=0, seed=seed)
    assert_goes_back(game, before=1, seed=seed)


def test_a_time_limit_counts_from_the_beginning_of_a_game_that_was_saved(monkeypatch):
    monkeypatch.setattr(ale_emulator, "MAX_FRAMES", 100)
    mine = Emulator("freeway")

    def run(steps):
        over = []
        for _ in range(steps):
            mine.send(np.zeros(1, np.int64))
            over.append(bool(mine.recv().game_over[0]))
        return over

    mine.reset([1])
    run(10)
    saved = mine.save()
    run(12)
    mine.restore(saved)
    assert run(15) == [False] * 14 + [True]


@pytest.mark.slow
def test_every_game_goes_on_from_what_was_saved():
    for game in game_names():
        assert_goes_back(game, 60)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["alien", "asterix", "crazy_climber", "hero", "pong", "road_runner", "up_n_down"])
def test_it_plays_other_games_of_the_vector(game):
    assert_same_game(game, 600)


def test_a_time_limit_ends_games_as_in_the_vector(monkeypatch):
    for module in (atari, ale_emulator):
        monkeypatch.setattr(module, "MAX_FRAMES", 100)
    assert assert_same_game("freeway", 110) == 8  # 25 steps each, from either seed


@pytest.mark.parametrize(("height", "width"), [(96, 70), (44, 44), (83, 61), (105, 100), (209, 159)])
def test_frames_of_other_sizes_are_the_same(height, width):
    obs = ObservationConfig(height=height, width=width)
    assert shows(obs)
    assert_same_game("ms_pacman", 40, obs, [3])


# Games for European television sets have 250 rows: air_raid is one, and so are some of the ROMs of published scores.
@pytest.mark.parametrize(("game", "rows"), [("air_raid", 250), ("carnival", 214)])
def test_games_with_more_rows_are_shown_whole(game, rows):
    mine = Emulator(game)
    mine.reset([1])
    assert mine._ale.getScreenDims() == (rows, 160)
    assert_same_game(game, 300)


@pytest.mark.parametrize("size", [(105, 80), (70, 80), (107, 80), (210, 84), (84, 160), (300, 300)])
def test_frames_that_opencv_makes_in_other_ways_are_not_shown(size):
    height, width = size
    assert not shows(ObservationConfig(height=height, width=width))


def test_no_colours_are_shown():
    assert not shows(ObservationConfig(channels=3))


def test_a_smaller_pixel_is_the_mean_of_the_area_that_it_covers():
    """Of 210 rows every 2.5 make one, of 160 columns every 40/21."""
    rows, columns = np.zeros((2, 210, 160), np.uint8)
    rows[2, :], columns[:, 0] = 200, 200
    small, other = resized([rows, columns])
    assert (small[0] == 40).all()  # half of row 2: a fifth of 2.5 rows
    assert (small[1] == 40).all()
    assert not small[2:].any()
    assert (other[:, 0] == 105).all()  # 200 * 21 / 40
    assert not other[:, 1:].any()


def test_screens_of_several_heights_are_made_smaller_side_by_side():
    random = np.random.default_rng(0)
    screens = [random.integers(256, size=(rows, 160), dtype=np.uint8) for rows in (210, 250, 214, 210)]
    together = resized(screens)
    for screen, found in zip(screens, together, strict=True):
        assert (found == resized([screen])[0]).all()


def test_a_row_of_emulators_can_go_on_with_a_game_of_another_height():
    random = np.random.default_rng(0)
    made = resizer([210])
    for rows in (250, 210, 214):
        screen = random.integers(256, size=(rows, 160), dtype=np.uint8)
        made.lend(0, rows)
        assert (resized([screen], made=made) == resized([screen])).all()


def test_a_screen_is_the_brighter_of_the_last_two_frames_of_a_step():
    mine, other = Emulator("asterix"), Emulator("asterix")
    unlike = 0
    for each in (mine, other):
        each.reset([1])
    for _ in range(40):
        mine.send(np.zeros(1, np.int64))
        frames = []
        for _ in range(4):
            other._ale.act(other._actions[0])
            frames.append(other._ale.getScreenGrayscale().reshape(210, 160))
        brighter = np.maximum(*frames[-2:])
        assert (mine.recv().frame[0, 0] == brighter).all()
        unlike += all((frame != brighter).any() for frame in frames[-2:])
    assert unlike > 5  # steps in which it is neither of the two


def test_screens_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(ale_emulator, "TALLEST", 209)
    with pytest.raises(ValueError, match="pong has 210 rows of 160 pixels, not 209 of 160 at most"):
        Emulator("pong").reset([1])


def test_numbers_of_no_ops_are_drawn_as_by_the_c_library():
    class Given:
        """A generator that gives these words."""

        def __init__(self, *words):
            self.words = list(words)

        def bytes(self, count):
            return self.words.pop(0).to_bytes(count, "little")

    assert ale_emulator._below(30, Given(2**32 - 1)) == 29
    assert ale_emulator._below(30, Given(2**31 + 1)) == 15
    # 2**32 is 30 * 143,165,576 + 16: of the words whose product's lower half is below 16 none counts.
    assert ale_emulator._below(30, Given(0, 2**31, 2**31 + 1)) == 15


def test_an_action_that_the_game_lacks_is_refused():
    mine = Emulator("pong")
    mine.reset([1])
    with pytest.raises(ValueError, match="pong has 6 actions, and 6 was chosen"):
        mine.send(np.array([6]))
