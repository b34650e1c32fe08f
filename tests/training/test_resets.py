"""Resets: when they come, what they draw anew and what they keep; and that a seed stays a seed."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ACTIONS, CPU, TINY, World, small

from spr.agent.action_padding import crop_actions, pad_actions
from spr.agent.networks import Networks
from spr.agent.schedules import fill, n_step_at, new_scalars, reset_at, updates_before
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.envs.base import seeds_for
from spr.envs.registry import make
from spr.training import snapshot
from spr.training.fleet import assemble
from spr.training.loop import Training
from spr.training.resets import reset

HEAD = {"reset.every": 40, "reset.keep": 0.75, "reset.redraw": "head"}
OUTPUTS = {"reset.every": 40}


def fleet_of(world, seeds, game_num_actions=None):
    """What a reset needs of a fleet."""
    envs = SimpleNamespace(game_num_actions=game_num_actions)
    return SimpleNamespace(
        config=world.learner.config, seeds=seeds, envs=envs, learner=world.learner, state=world.state
    )


def fresh(config, seed, number, which):
    """The networks that a reset draws for an agent: 0 the online ones, 1 those of its targets."""
    torch.manual_seed(seeds_for(seed, f"reset {number}", 2)[which])
    return {name: p.detach() for name, p in Networks(config, ACTIONS).named_parameters()}


@pytest.mark.parametrize(
    ("ratio", "interval", "count"), [(2, 20_000, 4), (4, 10_000, 9), (8, 5_000, 19), (16, 2_500, 39)]
)
def test_resets_come_every_40000_updates_but_not_in_the_last_interval(ratio, interval, count):
    config = Config().override({"reset.every": 40_000, "schedule.updates_per_step": ratio})
    steps = {step: number for step in range(100_000) if (number := reset_at(config, step))}
    assert list(steps) == list(range(interval, 100_000, interval))
    assert list(steps.values()) == list(range(1, count + 1))


def test_a_run_of_another_length_has_its_own_last_reset():
    def steps(length, starts=2_000, every=40_000):
        changes = {"reset.every": every, "schedule.steps": length, "schedule.learning_starts": starts}
        config = Config().override(changes)
        return [step for step in range(length) if reset_at(config, step)]

    assert steps(40_000) == [20_000]
    assert steps(39_999) == []
    assert steps(59_999) == [20_000]
    assert steps(10_000) == []
    assert steps(100_000, every=0) == []
    assert steps(100, starts=50, every=40) == [60, 80]  # before there is anything to forget there is none
    assert steps(101, starts=60, every=41) == [80]  # whole environment steps


def test_updates_are_counted_from_the_last_reset_and_so_is_what_changes_with_them():
    anneal = {"replay.n_step_end": 3, "schedule.anneal_updates": 10_000}
    config = Config().override({"reset.every": 40_000} | anneal)
    steps = (0, 2_000, 2_001, 19_999, 20_000, 20_001, 79_999, 80_000, 99_999)
    assert [updates_before(config, step) for step in steps] == [0, 0, 2, 35_998, 0, 2, 39_998, 0, 39_998]
    rates, lengths = new_scalars(config, CPU), []
    for step in (2_000, 19_999, 20_000, 22_500, 50_000, 60_000):
        fill(rates, config, step, 1)
        lengths.append(rates.n_step.item())
    assert lengths == [10, 3, 10, n_step_at(config, 5_001), 3, 10]


@pytest.mark.parametrize("changes", [HEAD, OUTPUTS])
def test_what_a_reset_does_to_weights_average_and_adam(changes):
    config = small(**changes, **{"learner.average": 0.9})
    world = World(config, [3, 8])
    world.update(3)
    state, seeds = world.state, (3, 8)
    before = {"weights": state.weights.clone(), "target": state.target.clone()}
    priority, streams = world.replay.priority.clone(), [world.rng.state(i) for i in (0, 1)]
    chance = torch.get_rng_state()
    reset(fleet_of(world, seeds), 2)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(world.rng.state(i), stream) for i, stream in enumerate(streams))
    assert torch.equal(world.replay.priority, priority)
    for moment in (state.first_moment, state.second_moment, state.count):
        assert moment.count_nonzero() == 0
    for which, name in enumerate(("weights", "target")):
        new, old = world.learner.layout.views(getattr(state, name)), world.learner.layout.views(before[name])
        for agent, seed in enumerate(seeds):
            drawn = fresh(config, seed, 2, which)
            for part, p in new.items():
                kept, anew = old[part][agent], drawn[part]
                if part.startswith(("encoder.", "transition.")):
                    expected = 0.75 * kept + 0.25 * anew if changes == HEAD else kept
                elif part.startswith(("head.value", "head.advantage")) or changes == HEAD:
                    expected = anew
                else:
                    expected = kept
                assert torch.equal(p[agent], expected), part
    assert not torch.equal(state.weights, state.target)
    world.update(3)
    assert state.weights.isfinite().all()
    assert state.count == 3


def test_each_reset_each_seed_and_each_target_draws_its_own():
    config = small(**HEAD)
    bias = "head.hidden.bias"
    drawn = [fresh(config, seed, number, which)[bias] for seed in (0, 1) for number in (1, 2) for which in (0, 1)]
    assert len({tuple(row.tolist()) for row in drawn}) == 8


@pytest.mark.parametrize(("preset", "copy"), [("spr_noaug", "ema"), ("der", "target")])
def test_other_targets_follow_the_same_rule_with_their_own_draw(preset, copy):
    config = small(preset, **HEAD)
    world = World(config, [3])
    world.update(2)
    rows = getattr(world.state, copy)
    columns = world.learner.ema_columns if copy == "ema" else world.learner.target_columns
    before = rows.clone()
    reset(fleet_of(world, [3]), 1)
    named = {name: p[None] for name, p in fresh(config, 3, 1, 1).items()}
    anew = world.learner.layout.rows(named, torch.float32, CPU)[:, columns]
    encoder = world.learner.layout.one_number_each(lambda name, _: float(name.startswith("encoder.")))[columns] > 0
    assert torch.equal(rows[:, encoder], (0.75 * before + 0.25 * anew)[:, encoder])
    assert torch.equal(rows[:, ~encoder], anew[:, ~encoder])


def test_an_agent_is_reset_alike_alone_in_a_fleet_and_among_other_games():
    config = small(**HEAD, **{"learner.average": 0.9})
    own, seeds, room = [3, 6, 4], [3, 1, 7], 6
    mixed = World(config, seeds, torch.float64, own, room)

    def learn(world, seeds, own):
        world.update(3)
        reset(fleet_of(world, seeds, own), 1)
        start = world.state.weights.clone()
        world.update(3)
        return start

    start = learn(mixed, seeds, own)
    dims = Networks(config, room).action_dims()
    for i, (seed, actions) in enumerate(zip(seeds, own, strict=True)):
        alone = World(config, [seed], torch.float64, [actions], room)
        torch.testing.assert_close(learn(alone, [seed], [actions])[0], start[i], rtol=0, atol=1e-9)
        for name in ("weights", "target"):
            there, here = getattr(mixed.state, name)[i], getattr(alone.state, name)[0]
            torch.testing.assert_close(there, here, rtol=0, atol=1e-9)
        agent = {name: p[i] for name, p in mixed.state.params.items()}
        again = pad_actions(crop_actions(agent, dims, actions, room), dims, actions, room)
        assert all(torch.equal(again[name], p) for name, p in agent.items())  # what is padded is zero


def test_a_diverged_agent_stays_as_it_was():
    world = World(small(**HEAD, **{"learner.average": 0.9}), [0, 1])
    world.update(2)
    world.state.diverged[1] = True
    world.state.weights[1, 100] = torch.inf
    names = ("weights", "target", "first_moment", "second_moment")
    before = [getattr(world.state, name)[1].clone() for name in names]
    reset(fleet_of(world, [0, 1]), 1)
    assert all(torch.equal(getattr(world.state, name)[1], row) for name, row in zip(names, before, strict=True))
    assert world.state.first_moment[0].count_nonzero() == 0


RUN = TINY | {
    "schedule.steps": 90,
    "replay.capacity": 75,
    "reset.every": 20,
    "reset.keep": 0.5,
    "reset.redraw": "head",
    "learner.average": 0.9,
    "replay.n_step": 5,
    "replay.n_step_end": 2,
    "replay.gamma_end": 0.997,
    "schedule.anneal_updates": 15,
}


def training(config, seeds=(0, 1)):
    return Training(assemble(config, make("catch", len(seeds), obs=config.observation), seeds, CPU))


def stopped_after(config, step):
    begun = training(config)
    rows = []
    for info in begun.run():
        rows.append(info.rows)
        if info.step == step:
            break
    return begun, rows


def test_a_reset_comes_after_the_updates_and_before_the_action_of_its_step():
    config = preset_config("spr").override(RUN)
    steps = []
    begun = training(config)
    weights, act = begun.fleet.state.weights, begun.act.act_async
    kept = weights.clone()

    def acting(greedy):
        if not torch.equal(weights, kept):
            steps.append(begun.step)
        act(greedy)

    begun.act.act_async = acting
    for _ in begun.run():
        kept.copy_(weights)
    assert steps == [70, 80]  # between two steps nothing else changes them


@pytest.mark.slow
@pytest.mark.parametrize("step", [66, 70, 76])  # before a reset, on its step, and after it
def test_a_run_goes_on_across_resets_to_the_same_bits(step):
    config = preset_config("spr").override(RUN)
    whole, rows = stopped_after(config, 90)
    cut, first = stopped_after(config, step)
    resumed = training(config)
    list(snapshot.restore(resumed, snapshot.snapshots(cut)))
    assert first + [info.rows for info in resumed.run()] == rows
    for name in ("weights", "target", "first_moment", "second_moment", "count"):
        assert torch.equal(getattr(whole.fleet.state, name), getattr(resumed.fleet.state, name)), name
    assert torch.equal(whole.fleet.replay.priority, resumed.fleet.replay.priority)
    assert whole.fleet.state.count == 20  # since the reset before step 80


def test_a_checkpoint_of_a_method_without_resets_holds_what_it_held():
    config = preset_config("spr").override(TINY | {"schedule.steps": 90})
    assert set(snapshot.specs(training(config), 70, 3)) == {
        *("weights", "ema", "target", "first_moment", "second_moment", "count"),
        *("priority", "generator", "metrics", "actions", "rewards", "ends"),
    }
