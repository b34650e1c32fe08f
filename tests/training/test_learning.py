"""Learning, not just running: catch is learnt from pixels in minutes, and SPR's latents predict without collapsing."""

import gymnasium
import numpy as np
import pytest
from conftest import CPU, LITTLE_FRAMES

from spr.agent.schedules import beta_at
from spr.common.errors import UserError
from spr.config.presets import preset_config
from spr.envs.registry import make
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import play
from spr.training.actor import Actor
from spr.training.fleet import assemble
from spr.training.loop import train

# Smaller frames and head, a shorter rollout and a larger step than the paper's, to be done within a minute on one core.
QUICK = LITTLE_FRAMES | {
    "network.hidden": 128,
    "learner.depth": 2,
    "learner.learning_rate": 5e-4,
    "replay.n_step": 5,
    "schedule.learning_starts": 2_000,
    "schedule.steps": 2_650,
}


LITTLE = {"network.hidden": 4, "replay.batch_size": 2, "replay.n_step": 3}


@pytest.mark.slow
def test_catch_is_learnt_and_the_latents_predict_without_collapsing():
    config = preset_config("spr").override(QUICK)
    envs = make("catch", 1, obs=config.observation)
    fleet = assemble(config, envs, [0], CPU)
    rows = [info.rows[0] for info in train(fleet) if info.rows]
    params = {name: p.detach() for name, p in fleet.state.params.items()}
    *_, chance = play(config, Agents(["catch"], params, [0]), epsilon=1.0)
    *_, learnt = play(config, Agents(["catch"], params, [0]))
    assert np.mean(chance.scores[0]) < 3.5  # of ten balls
    assert np.mean(learnt.scores[0]) >= 7.0  # six seeds caught 8.3 to 10.0

    assert rows[0]["action_entropy"] == pytest.approx(np.log(3), abs=0.1)  # random at first

    learning = [row for row in rows if "cosine" in row]
    assert learning[-1]["cosine"] > learning[0]["cosine"]
    assert learning[-1]["cosine"] > 0.9
    assert learning[-1]["spread"] > 0.05  # 0 is collapse


@pytest.mark.slow
def test_catch_is_learnt_forgotten_by_a_reset_and_learnt_again():
    """SR-SPR with a reset 600 steps after learning starts; scores are those of its average.

    Of ten balls chance catches 2.6. Rounding differs between processors and so do runs: on one processor this seed
    caught 9.99, 2.6 and 9.99 balls; with batches of 16 and a reset 100 steps earlier 6.87, 2.26 and 8.97.
    """
    short = {"schedule.steps": 3_250, "reset.every": 1_300, "schedule.epsilon_steps": 200}
    config = preset_config("sr_spr").override(QUICK | short)
    fleet = assemble(config, make("catch", 1, obs=config.observation), [0], CPU)
    scores = {}
    for info in train(fleet):
        if info.step in (2_600, 2_602, 3_000):
            params = {name: p.detach() for name, p in fleet.state.acting.items()}
            *_, played = play(config, Agents(["catch"], params, [0]))
            scores[info.step] = np.mean(played.scores[0])
        if info.step == 3_000:
            break
    assert scores[2_600] >= 7
    assert scores[2_602] < 5
    assert scores[3_000] >= 7


def test_beta_rises_from_its_start_to_its_end():
    config = preset_config("spr")
    assert beta_at(config, 2_000) == pytest.approx(0.4)
    assert beta_at(config, 51_000) == pytest.approx(0.7)
    assert beta_at(config, 100_000) == pytest.approx(1.0)


def test_the_loop_acts_randomly_then_learns_twice_per_step(monkeypatch):
    config = preset_config("rainbow").override(LITTLE | {"schedule.learning_starts": 30, "schedule.steps": 40})
    fleet = assemble(config, make("catch", 2), [0, 1], CPU)
    steps_at_update, greedy = [], []
    update, act = fleet.learner.update, Actor.greedy
    monkeypatch.setattr(
        fleet.learner, "update", lambda *args: (steps_at_update.append(fleet.replay.steps), update(*args))[1]
    )
    monkeypatch.setattr(Actor, "greedy", lambda *args: (greedy.append(fleet.replay.steps), act(*args))[1])
    assert [info.step for info in train(fleet)] == list(range(1, 41))
    assert greedy == list(range(30, 40))
    assert steps_at_update == [step for step in range(31, 41) for _ in range(2)]


def test_games_too_short_for_a_sequence_are_refused_with_the_reason():
    gymnasium.register("Blink-v0", lambda: gymnasium.wrappers.TimeLimit(Blank(), 4))
    config = preset_config("rainbow").override(LITTLE | {"replay.n_step": 10, "schedule.learning_starts": 60})
    fleet = assemble(config, make("Blink-v0", 1), [0], CPU)
    with pytest.raises(UserError, match=r"no sequence of 10 steps without a time limit.*replay.n_step"):
        list(train(fleet))


class Blank(gymnasium.Env):
    """A black screen that never ends by itself."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        return np.zeros((84, 84), np.uint8), {}

    def step(self, _):
        return np.zeros((84, 84), np.uint8), 0.0, False, False, {}


@pytest.mark.slow
def test_stored_steps_are_what_the_environment_showed():
    """Frames, ends, clipped rewards and actions of the replay against a recording of the environment itself."""
    config = preset_config("rainbow").override(LITTLE | {"schedule.learning_starts": 60, "schedule.steps": 90})
    envs = make("ms_pacman", 2)
    frames, outs, actions = [], [], []
    reset, send, recv = envs.reset, envs.send, envs.recv

    def recorded_reset(seeds):
        frames.append(reset(seeds))
        return frames[0]

    def recorded_send(action):
        actions.append(action.copy())
        send(action)

    def recorded_recv():
        outs.append(recv())
        frames.append(outs[-1].frame)
        return outs[-1]

    envs.reset, envs.send, envs.recv = recorded_reset, recorded_send, recorded_recv
    fleet = assemble(config, envs, [0, 1], CPU)
    list(train(fleet))
    envs.close()
    replay = fleet.replay
    assert (replay.frames.numpy() == np.stack(frames[:-1], 1)).all()
    assert (replay.actions.numpy() == np.stack(actions, 1)).all()
    raw = np.stack([out.reward for out in outs], 1)
    assert raw.max() > 1
    assert (replay.rewards.numpy() == np.clip(raw, -1, 1)).all()
    ends = np.stack([out.terminal | out.truncated for out in outs], 1)
    assert replay.is_first[:, 0].all()
    assert (replay.is_first[:, 1:].numpy() == ends[:, :-1]).all()
