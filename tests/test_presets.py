"""Every method of the paper: it learns a fixed batch, targets move when they should, gradients flow where they may."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import ACTIONS, CPU, SMALL, World
from torch.utils._pytree import tree_map

from spr.draws import Dice
from spr.envs import make
from spr.fleet import assemble
from spr.presets import PRESETS, preset_config
from spr.train import epsilon_at, train

METHODS = [name for name in PRESETS if not name.startswith(("spr_tau_", "spr_k"))]


def small(preset, **changes):
    depth = {"learner.depth": min(preset_config(preset).learner.depth, 2)}
    return preset_config(preset).override(SMALL | depth | {"schedule.epsilon_steps": 10} | changes)


@pytest.mark.parametrize("preset", METHODS)
def test_every_preset_stays_finite_and_learns_a_fixed_batch(preset):
    # Squared distances to targets that share the predictions' weights grow first, as both do: here they stand still.
    still = {"learner.tau": 1.0} if preset == "spr_quadratic" else {}
    world = World(small(preset, **{"learner.learning_rate": 1e-3}, **still), [0, 1])
    draws = world.dice.update()
    losses = []
    for _ in range(20):
        priority = world.replay.priority.clone()
        losses.append(world.learner.update(world.state, world.replay, draws, torch.tensor(0.4))["loss"])
        world.replay.priority.copy_(priority)  # the same sequences again
    assert world.state.weights.isfinite().all()
    assert (losses[-1] < losses[0] - 0.05 * losses[0].abs()).all()


@pytest.mark.parametrize(
    "preset", ["der", "curl", "otrainbow", "drq", "spr_nostopgrad", "contrastive_5step", "spr_uniformity"]
)
def test_an_agent_in_a_fleet_equals_the_same_agent_alone(preset):
    fleet, alone = World(small(preset), [3, 5], torch.float64), World(small(preset), [5], torch.float64)
    fleet.update(5)
    alone.update(5)
    torch.testing.assert_close(fleet.state.weights[1:], alone.state.weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(fleet.state.copied[1:], alone.state.copied, rtol=0, atol=1e-9)


def test_the_rl_target_is_copied_exactly_at_its_period():
    world = World(small("der", **{"learner.target_period": 3}), [0])
    columns = world.learner.layout.columns("out", "sigma", "averaged")
    start = world.state.weights[:, columns].clone()
    assert torch.equal(world.state.copied, start)
    for update in range(1, 8):
        before = world.state.copied.clone()
        world.update()
        now = world.state.weights[:, columns]
        assert not torch.equal(now, start)
        assert torch.equal(world.state.copied, now if update % 3 == 0 else before)


def test_the_rl_target_values_the_bootstrap():
    """Moving only the copied network changes the loss, and no gradient reaches it."""
    world = World(small("otrainbow"), [0])
    loss = one_agents_loss(world)
    copied = world.state.copied[0]
    assert loss(world.state.weights[0], copied) != loss(world.state.weights[0], copied + 0.1 * torch.randn_like(copied))
    assert torch.func.grad(loss, argnums=1)(world.state.weights[0], copied).count_nonzero() == 0


def one_agents_loss(world):
    draws = world.dice.update()
    batch = world.replay.sample(draws.sample, torch.tensor(0.4))
    views, learnt = len(world.learner._config.views), world.learner._config.learnt_views
    obs = torch.rand(
        1, views, world.learner._config.replay.batch, 4, 84, 84, generator=torch.Generator().manual_seed(0)
    )
    one = [tree_map(lambda t: t[0], struct) for struct in (batch, (obs[:, :learnt], obs[:, learnt:]), draws)]
    averaged = world.state.averaged[0]
    return lambda row, copied: world.learner._agent_loss(row, (averaged, copied), *one)[0]


@pytest.mark.parametrize(
    ("preset", "flows"), [("spr", False), ("spr_nostopgrad", True), ("spr_nostopgrad_noaug", True)]
)
def test_gradients_flow_into_the_targets_only_without_the_stop(preset, flows):
    """By the images of the targets: they move the loss in any case, and its gradient reaches them or does not."""
    config = small(preset, **{"replay.batch": 4})
    world = World(config, [0])
    draws = world.dice.update()
    batch = world.replay.sample(draws.sample, torch.tensor(0.4))
    obs = torch.rand(1, len(config.views), 4, 4, 84, 84, generator=torch.Generator().manual_seed(0))
    structs = [tree_map(lambda t: t[0], struct) for struct in (batch, draws)]

    def loss(images):
        pair = (images[: config.learnt_views], images[config.learnt_views :])
        row, targets = world.state.weights[0], (world.state.averaged[0], world.state.copied[0])
        return world.learner._agent_loss(row, targets, structs[0], pair, structs[1])[0]

    by_view = torch.func.grad(loss)(obs[0]).abs().flatten(1).sum(1)
    assert by_view[0] > 0
    assert (by_view[1:-1] > 0).all() == flows
    assert by_view[-1] == 0  # the bootstrap is a constant in any case
    moved = obs[0].clone()
    moved[1:-1] = moved[1:-1].flip(0)
    assert loss(moved) != loss(obs[0])


def test_plain_q_learning_by_hand():
    """The target is return + discount * Q(best by the online head), and the loss Huber's of the difference."""
    config = small("drq")
    world = World(config, [0])
    draws = world.dice.update()
    batch = world.replay.sample(draws.sample, torch.tensor(0.4))
    obs = torch.rand(1, 2, config.replay.batch, 4, 84, 84, generator=torch.Generator().manual_seed(0))
    _, _, terms = world.learner.gradients(world.state, batch, (obs[:, :1], obs[:, 1:]), draws)
    params = {name: p[0] for name, p in world.state.params.items()}
    networks = world.learner._objective.online
    now, then = (torch.func.functional_call(networks, params, (view,)) for view in obs[0])
    error = now.gather(1, batch.actions[0]).squeeze(1) - (batch.returns[0] + batch.discount[0] * then.amax(1))
    expected = torch.nn.functional.huber_loss(error, 0 * error, reduction="none")
    torch.testing.assert_close(terms.losses["rl"][0], expected)
    torch.testing.assert_close(terms.surprise[0], error.abs())


def test_uniform_replay_is_a_priority_of_one():
    world = World(small("drq"), [0])
    world.update(5)
    assert world.replay.priority.unique().tolist() == [0, 1]
    draws = world.dice.update()
    assert world.replay.sample(draws.sample, torch.tensor(0.7)).weight.unique().tolist() == [1]


def test_epsilon_falls_in_a_straight_line_and_is_obeyed():
    config = preset_config("otrainbow")
    steps = (0, 20_000, 45_000, 70_000, 99_999)
    assert [epsilon_at(config, step) for step in steps] == pytest.approx([1, 1, 0.505, 0.01, 0.01])
    assert epsilon_at(preset_config("spr"), 50_000) == 0
    dice = Dice(config, ACTIONS, range(2_000), CPU)
    greedy = torch.zeros(2_000, 1, dtype=torch.int64)
    numbers = dice.roll_action()
    assert torch.equal(dice.explored(greedy, numbers, torch.tensor(0.0)), greedy)
    counts = torch.bincount(dice.explored(greedy, numbers, torch.tensor(0.5)).flatten(), minlength=ACTIONS)
    expected = torch.tensor([1_250, 250, 250, 250])
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_curl_sees_crops_only_where_it_compares_them():
    config = small("curl")
    looks = Dice(config, ACTIONS, [0], CPU).update().looks
    assert looks.side[0, 0].tolist() == [84, 80, 80, 84]
    for still in (0, 3):
        assert not looks.shift[:, :, still].any()
        assert not looks.corner[:, :, still].any()
    assert looks.shift[:, :, 1:3].any()
    large = {"replay.batch": 500, "schedule.random_steps": 600, "schedule.steps": 700}
    drawn = Dice(config.override(large), ACTIONS, [0], CPU).update().looks
    # A crop of 80 is padded to 88 and cut to 84 at one of five places: never further in than its own edge.
    assert sorted(drawn.corner[:, :, 1:3].unique().tolist()) == [0, 1, 2, 3, 4]
    assert sorted(drawn.shift[:, :, 1:3].unique().tolist()) == [-4, -3, -2, -1, 0]
    # What is seen of the frame is in its middle, on average: pixel i shows pixel i + shift + corner.
    moved = (drawn.shift + drawn.corner)[:, :, 1:3].double()
    assert abs(moved.mean()) < 5 * moved.std() / moved.numel() ** 0.5
    assert (looks.factor == 1).all()


def test_the_quadratic_loss_collapses_the_latents_and_the_cosine_does_not():
    quick = {"network.hidden": 64, "replay.batch": 16, "learner.depth": 2, "replay.n_step": 5}
    quick |= {"schedule.random_steps": 400, "schedule.steps": 600, "learner.learning_rate": 5e-4}
    spread = {}
    for preset in ("spr", "spr_quadratic"):
        fleet = assemble(preset_config(preset).override(quick), make("catch", 1), [0], CPU)
        rows = [tick.rows[0] for tick in train(fleet) if tick.rows]
        spread[preset] = np.mean([row["spread"] for row in rows[-5:]])
    assert spread["spr_quadratic"] < 0.2 * spread["spr"], spread


def test_the_example_of_a_loss_of_ones_own_runs(tmp_path):
    script = Path(__file__).parent.parent / "docs" / "own_loss.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "spr" / "catch" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert '"angle"' in lines[-1]
