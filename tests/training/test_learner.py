"""One update, and fleets: an agent among others is the same agent alone."""

from itertools import combinations

import pytest
import torch
from conftest import ACTIONS, CPU, World, in_rows, small
from torch.utils._pytree import tree_map

from spr.agent.action_padding import crop_actions, pad_actions
from spr.agent.augmentation import Views
from spr.agent.distributions import cross_entropy, project_distribution
from spr.agent.networks import Networks
from spr.agent.random_streams import RngStreams
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.training.learner import Learner


def drawn(config, seeds=(0,)):
    rng = RngStreams(config, ACTIONS, seeds, CPU)
    return rng.draws(rng.sample_raw())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["spr", "spr_noaug"])
def test_an_agent_in_a_fleet_equals_the_same_agent_alone(preset):
    config = small(preset)
    fleet = World(config, [3, 1, 7, 5], torch.float64)
    fleet.update(20)
    for position, seed in enumerate([3, 1, 7, 5]):
        alone = World(config, [seed], torch.float64)
        alone.update(20)
        for name, value in alone.state.params.items():
            torch.testing.assert_close(fleet.state.params[name][position], value[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(fleet.replay.priority[position], alone.replay.priority[0], rtol=0, atol=1e-6)


def test_different_seeds_differ():
    world = World(small(), [0, 1])
    world.update(2)
    for name in ("encoder.conv1.weight", "head.value.weight_sigma", "transition.conv2.weight"):
        first, second = world.state.params[name]
        assert not torch.allclose(first, second)
    assert not torch.equal(world.replay.priority[0], world.replay.priority[1])


def test_same_seed_same_bits():
    one, two = World(small(), [4]), World(small(), [4])
    one.update(5)
    two.update(5)
    assert all(torch.equal(one.state.params[name], two.state.params[name]) for name in one.state.params)


@pytest.mark.parametrize("preset", ["spr", "spr_noaug", "rainbow", "rainbow_noaug", "spr_1step", "spr_ema_0.5783"])
def test_every_kind_of_preset_stays_finite_and_learns_a_fixed_batch(preset):
    world = World(small(preset, **{"learner.learning_rate": 1e-3}), [0])
    losses = [loss.item() for loss in world.fixed_batch_losses()]
    assert all(torch.isfinite(p).all() for p in world.state.params.values())
    assert losses[-1] < losses[0] - 0.1


def test_rainbow_has_no_transition_model_and_no_spr_loss():
    world = World(small("rainbow"), [0])
    assert not any(name.startswith(("transition", "predictor")) for name in world.state.params)
    assert "spr" not in world.update()


def test_clip_groups_are_separate_per_agent_and_spare_the_predictor():
    learner = Learner(small(), ACTIONS, CPU)
    grads = torch.zeros(2, learner.layout.size)
    by_name = learner.layout.views(grads)

    def first(name):
        return by_name[name].flatten(1)[:, 0].tolist()

    for name, values in {
        "encoder.conv1.weight": (3, 30),
        "head.value.bias": (4, 40),
        "transition.conv1.bias": (20, 1),
        "predictor.weight": (1e3, 1e3),
    }.items():
        by_name[name].flatten(1)[:, 0] = torch.tensor(values, dtype=torch.float32)
    norms = {"agent": torch.tensor([5.0, 50.0]), "model": torch.tensor([20.0, 1.0])}
    learner.apply_gradients(learner.init([0, 1]), grads, norms)
    assert first("encoder.conv1.weight") == pytest.approx([3, 6])
    assert first("head.value.bias") == pytest.approx([4, 8])
    assert first("transition.conv1.bias") == pytest.approx([10, 1])
    assert first("predictor.weight") == [1e3, 1e3]
    assert grads.count_nonzero() == 8


def test_the_norms_are_those_of_encoder_and_head_and_of_the_model():
    world = World(small(), [0, 1])
    kept = []
    compute = world.learner.gradients
    world.learner.gradients = lambda *args: (kept.append(compute(*args)), kept[0])[1]  # type: ignore[method-assign]
    found = world.learner.gradients_and_priorities(world.state, world.replay, world.draws(), world.rates)
    grads = world.learner.layout.views(in_rows(world.learner, kept[0][0]))
    for norm, beginnings in {"norm_agent": ("encoder.", "head."), "norm_model": ("transition.",)}.items():
        squares = sum(grad.flatten(1).square().sum(1) for name, grad in grads.items() if name.startswith(beginnings))
        torch.testing.assert_close(found.metrics[norm], squares.sqrt(), rtol=1e-5, atol=1e-5)


def test_the_step_is_adam_of_the_paper():
    world = World(small(), [0])
    expected = world.state.weights.clone()
    m, v = torch.zeros_like(expected), torch.zeros_like(expected)
    for count in range(1, 4):
        found = world.learner.gradients_and_priorities(world.state, world.replay, world.draws(), world.rates)
        world.learner.apply_gradients(world.state, found.grads, found.norms)
        grads = in_rows(world.learner, found.grads)  # clipped by now
        m = 0.9 * m + 0.1 * grads
        v = 0.999 * v + 0.001 * grads**2
        rate = 1e-4 / (1 - 0.9**count)
        expected = expected - rate * m / ((v / (1 - 0.999**count)).sqrt() + 1.5e-4)
    torch.testing.assert_close(world.state.weights, expected, rtol=1e-5, atol=1e-7)


def test_the_step_with_decay_is_adamw_on_everything_but_vectors():
    world = World(small(**{"learner.weight_decay": 0.1, "learner.learning_rate": 1e-2}), [0])
    params = {name: torch.nn.Parameter(p[0].clone()) for name, p in world.state.params.items()}
    decayed = [p for p in params.values() if p.dim() > 1]
    vectors = [p for p in params.values() if p.dim() == 1]
    assert decayed
    assert vectors
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, eps=1.5e-4)
    for _ in range(3):
        found = world.learner.gradients_and_priorities(world.state, world.replay, world.draws(), world.rates)
        world.learner.apply_gradients(world.state, found.grads, found.norms)
        for name, grad in world.learner.layout.views(in_rows(world.learner, found.grads)).items():  # clipped by now
            params[name].grad = grad[0].clone()
        adamw.step()
    for name, p in world.state.params.items():
        torch.testing.assert_close(p[0], params[name].detach(), rtol=1e-5, atol=1e-7)


def test_decay_leaves_a_diverged_agent_as_it_was():
    world = World(small(**{"learner.weight_decay": 0.1}), [0, 1])
    before = world.state.weights.clone()
    world.state.diverged[1] = True
    world.update()
    assert torch.equal(world.state.weights[1], before[1])
    assert not torch.equal(world.state.weights[0], before[0])


def test_without_a_norm_nothing_is_clipped_and_norms_are_still_told():
    world = World(small(**{"learner.max_grad_norm": 0.0}), [0])
    grads = torch.full((1, world.learner.layout.size), 3.0)
    world.learner.apply_gradients(world.state, grads, {"agent": torch.tensor([1e4]), "model": torch.tensor([1e4])})
    assert (grads == 3).all()
    assert torch.equal(world.state.first_moment, torch.full_like(grads, 0.1 * 3))
    metrics = world.update()
    assert metrics["norm_agent"] > 0
    assert metrics["norm_model"] > 0


def test_targets_are_a_moving_average_after_the_step():
    world = World(small("spr_noaug", **{"learner.ema_decay": 0.75}), [0])

    def averaged():
        return world.learner.layout.views(world.state.ema, lambda group: group.in_ema)

    start = {name: p.clone() for name, p in averaged().items()}
    assert "encoder.conv3.bias" in start
    assert "head.hidden.weight" in start
    assert not any("head.value" in name or "head.advantage" in name or "sigma" in name for name in start)
    assert all(torch.equal(value, world.state.params[name]) for name, value in start.items())
    world.update()
    for name, target in averaged().items():
        torch.testing.assert_close(target, 0.75 * start[name] + 0.25 * world.state.params[name])


def test_a_decay_of_zero_keeps_no_copy_because_the_target_is_the_online_network():
    assert World(small("spr"), [0]).state.ema.numel() == 0


@pytest.mark.parametrize("preset", ["spr", "rainbow"])
def test_the_average_is_of_all_weights_after_the_step_and_acts(preset):
    world = World(small(preset, **{"learner.average": 0.75}), [0, 1], torch.float64)
    state = world.state
    start = state.weights.clone()
    assert torch.equal(state.target, start)
    world.update()
    torch.testing.assert_close(state.target, 0.75 * start + 0.25 * state.weights, rtol=0, atol=1e-12)
    once, state.diverged[1] = state.target.clone(), True
    world.update()
    torch.testing.assert_close(state.target[0], 0.75 * once[0] + 0.25 * state.weights[0], rtol=0, atol=1e-12)
    assert torch.equal(state.target[1], once[1])
    assert state.acting.keys() == state.params.keys()
    assert all(torch.equal(p, world.learner.layout.views(state.target)[name]) for name, p in state.acting.items())
    plain = World(small(preset), [0]).state
    assert all(torch.equal(p, plain.params[name]) for name, p in plain.acting.items())


def test_an_average_that_equals_the_weights_changes_no_loss():
    """It stands where the online network is its own target: same latents, same values, same projections."""
    quiet = {"network.noisy": False}
    plain, averaged = World(small(**quiet), [0]), World(small(**quiet, **{"learner.average": 0.9}), [0])
    draws = plain.draws()
    batch, views = plain.learner.sample_views(plain.replay, draws, plain.rates)
    one, other = (w.learner.gradients(w.state, batch, views, draws) for w in (plain, averaged))
    torch.testing.assert_close(other[0], one[0])
    for name, loss in one[2].losses.items():
        torch.testing.assert_close(other[2].losses[name], loss)


def test_the_average_values_the_bootstrap_and_gives_the_targets():
    """By hand: actions by the online network, their values and the targets of SPR by the average."""
    config = small(**{"network.noisy": False, "learner.average": 0.9})
    world = World(config, [0])
    noise = torch.randn(world.state.target.shape, generator=torch.Generator().manual_seed(0))
    world.state.target.add_(0.02 * noise)
    draws = world.draws()
    batch, views = world.learner.sample_views(world.replay, draws, world.rates)
    grads, _, output = world.learner.gradients(world.state, batch, views, draws)
    online, average = Networks(config, ACTIONS), Networks(config, ACTIONS)
    online.load_state_dict({name: p[0] for name, p in world.state.params.items()})
    average.load_state_dict({name: p[0] for name, p in world.state.acting.items()})
    obs, (*targets, bootstrap) = views.with_grad.scaled()[0, 0], views.without_grad.scaled()[0]
    with torch.no_grad():
        best = online(bootstrap).argmax(-1)
        rows = torch.arange(len(best))
        following = average.head(average.encoder(bootstrap).flatten(1), ())[0][rows, best].softmax(-1)
        atoms = batch.returns[0][:, None] + batch.discount[0][:, None] * online.support
        target = project_distribution(atoms, following, online.support)
        z = online.encoder(obs)
        predicted = online.head(z.flatten(1), ())[0][rows, batch.actions[0, :, 0]]
        torch.testing.assert_close(output.losses["rl"][0], cross_entropy(target, predicted))
        actions = batch.actions[0].T
        bias = online.transition.action_bias(actions.flatten()).unflatten(0, actions.shape)
        spr = 0
        for k, latent in enumerate(online.transition(z, bias)):
            y = online.predict(online.project(latent.flatten(1)))
            t = average.project(average.encoder(targets[k]).flatten(1))
            spr = spr - torch.cosine_similarity(y, t) * batch.mask[0, :, k]
    torch.testing.assert_close(output.losses["spr"][0], spr)
    assert in_rows(world.learner, grads).isfinite().all()


def test_priorities_are_the_root_of_the_divergence():
    world = World(small(), [0])
    kept = []
    compute = world.learner.gradients

    def spy(state, batch, *rest):
        result = compute(state, batch, *rest)
        kept.append((batch.start, result[2].raw_priority))
        return result

    world.learner.gradients = spy  # type: ignore[method-assign]
    world.update()
    (start, kl) = kept[0]
    largest = {}
    for slot, divergence in zip(start[0].tolist(), kl[0].tolist(), strict=True):
        largest[slot] = max(largest.get(slot, 0), divergence)
    for slot, divergence in largest.items():
        assert world.replay.priority[0, slot].item() == pytest.approx(divergence**0.5, rel=1e-5)


def test_priorities_may_be_the_root_of_the_cross_entropy():
    world = World(small(**{"replay.priority": "cross_entropy"}), [0])
    draws = world.draws()
    batch, views = world.learner.sample_views(world.replay, draws, world.rates)
    _, _, output = world.learner.gradients(world.state, batch, views, draws)
    assert torch.equal(output.raw_priority, output.losses["rl"])
    kl = World(small(), [0])
    _, _, usual = kl.learner.gradients(kl.state, batch, views, draws)
    assert (usual.raw_priority < output.raw_priority).all()  # less the target's entropy


def test_a_perfect_prediction_keeps_a_small_priority():
    world = World(small(), [0])
    compute = world.learner.gradients

    def perfect(*args):
        grads, loss, output = compute(*args)
        # Rounding may even leave it below zero.
        return grads, loss, output._replace(raw_priority=output.raw_priority * 0 - 1e-7)

    world.learner.gradients = perfect  # type: ignore[method-assign]
    before = (world.replay.priority > 0).sum()
    world.update(30)
    assert (world.replay.priority > 0).sum() == before
    assert world.replay.priority[world.replay.priority > 0].min().item() == pytest.approx(1e-3)


def test_no_gradient_reaches_the_targets_though_the_loss_depends_on_them():
    world = World(small("spr_noaug"), [0])
    draws = world.draws()
    batch = world.replay.sample(draws.sample, torch.tensor(0.4))
    obs = torch.rand(1, 4, 6, 4, 44, 44, generator=torch.Generator().manual_seed(0))
    row, target = world.state.weights[0], world.state.ema[0]
    one = [tree_map(lambda t: t[0], struct) for struct in (batch, Views(obs[:, :1], obs[:, 1:]), draws)]

    def loss(row, target):
        return world.learner._row_loss(row, (target, world.state.target[0]), *one)[0]

    by_row, by_target = torch.func.grad(loss, argnums=(0, 1))(row, target)
    assert by_row.count_nonzero() > 0.5 * by_row.numel()
    assert by_target.count_nonzero() == 0
    assert loss(row, target) != loss(row, target + 0.1 * torch.randn_like(target))


def test_draws_differ_between_updates_and_between_the_two_heads():
    rng = RngStreams(small(), ACTIONS, [0], CPU)
    both = [rng.draws(rng.sample_raw()) for _ in range(2)]
    assert not torch.equal(both[0].sample, both[1].sample)
    noises = [draws.noise.hidden.input[0, head] for draws in both for head in (0, 1)]
    assert all(not torch.equal(a, b) for a, b in combinations(noises, 2))
    assert torch.stack(noises).std().item() == pytest.approx(1, abs=0.02)


def test_shift_and_factor_distributions():
    params = drawn(Config().override({"replay.batch_size": 1900})).augment
    counts = torch.bincount(params.shift.flatten() + 4, minlength=9)
    assert counts.sum() == params.shift.numel()
    expected = params.shift.numel() / 9
    assert ((counts - expected).abs() < 5 * expected**0.5).all()
    assert params.factor.min() == pytest.approx(0.9)
    assert params.factor.max() == pytest.approx(1.1)
    assert params.factor.mean().item() == pytest.approx(1, abs=2e-3)


def test_dropout_masks_keep_their_share_and_the_mean():
    config = preset_config("spr_noaug").override({"replay.batch_size": 4, "network.dropout": 0.25})
    for mask in drawn(config, (0, 1)).dropout:
        assert sorted(mask.unique().tolist()) == pytest.approx([0, 4 / 3])
        assert mask.mean().item() == pytest.approx(1, abs=0.01)
        assert not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize("preset", ["spr", "spr_noaug", "der", "drq", "otrainbow"])
def test_an_agent_among_games_with_other_actions_is_the_same_agent(preset):
    """Alone, among seeds of its own game, and among others: whoever has few actions has room for more."""
    config = small(preset)
    own, seeds, room = [3, 6, 4], [3, 1, 7], 6
    mixed = World(config, seeds, torch.float64, own, room)
    start = mixed.state.weights.clone()
    mixed.update(10)
    assert (mixed.state.weights != start).any(1).all()
    dims = Networks(config, room).action_dims()
    for position, (seed, actions) in enumerate(zip(seeds, own, strict=True)):
        alone = World(config, [seed], torch.float64, [actions], room)
        alone.update(10)
        torch.testing.assert_close(mixed.state.weights[position], alone.state.weights[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(mixed.replay.priority[position], alone.replay.priority[0], rtol=0, atol=1e-6)
        # What is padded stays zero: no gradient reaches it.
        agent = {name: p[position] for name, p in mixed.state.params.items()}
        cropped = crop_actions(agent, dims, actions, room)
        again = pad_actions(cropped, dims, actions, room)
        assert all(torch.equal(again[name], agent[name]) for name in agent)
        # And without the room it has the same values of its own actions.
        obs = torch.rand(2, 4, 44, 44, dtype=torch.float64)
        networks = Networks(config, actions).double()
        roomy = Networks(config, room).double()
        action_mask = torch.arange(room) < actions
        q = torch.func.functional_call(networks, cropped, (obs,))
        padded = torch.func.functional_call(roomy, agent, (obs, (), action_mask))
        torch.testing.assert_close(padded[:, :actions], q)
        assert (padded[:, actions:] == -torch.inf).all()


def test_agents_choose_only_among_their_own_actions():
    own = [2, 6, 3]
    rng = RngStreams(small(), 6, [0, 1, 2], CPU, own)
    chosen = torch.cat([rng.random_actions() for _ in range(500)], 1)
    assert chosen.amax(1).tolist() == [1, 5, 2]
    assert (
        torch.stack([torch.bincount(row, minlength=6)[:n].min() for row, n in zip(chosen, own, strict=True)]) > 50
    ).all()
