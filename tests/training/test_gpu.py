"""What users run on a GPU, compiled and captured, against the same code run plainly; nothing is frozen in the graph."""

import resource

import numpy as np
import pytest
import torch

import spr
from spr.agent.schedules import fill
from spr.common.hardware import tune
from spr.config.presets import PRESETS, preset_config
from spr.envs.ale_emulator import TALLEST
from spr.envs.atari100k import game_names
from spr.envs.base import Step
from spr.envs.registry import make, make_each
from spr.evaluation import scheduler
from spr.evaluation.batched_policy import Agents
from spr.evaluation.inprocess_backend import InProcessBackend
from spr.evaluation.scheduler import play
from spr.evaluation.screen_resize import Resizer
from spr.evaluation.subprocess_backend import SubprocessBackend
from spr.ops import impala_ops
from spr.ops.cuda_graphs import HostToDevice, captured
from spr.training import snapshot
from spr.training.actor import ActStep
from spr.training.fleet import assemble
from spr.training.learner import Learner
from spr.training.loop import Training, train
from spr.training.resets import reset
from spr.training.update_runner import UpdateRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda")
SMALL = {
    "network.hidden": 32,
    "replay.batch_size": 8,
    "replay.n_step": 4,
    "learner.depth": 2,
    "schedule.learning_starts": 200,
    "schedule.steps": 20_000,
}


def filled(seeds, matmul_dtype=torch.float32, changes=SMALL, preset="spr"):
    """A fleet whose replay holds the first random steps of catch."""
    tune(GPU, "fp32" if matmul_dtype == torch.float32 else "bf16")
    config = preset_config(preset).override(changes)
    fleet = assemble(config, make("catch", len(seeds)), seeds, GPU, matmul_dtype)
    next(info for info in train(fleet) if info.step == config.schedule.learning_starts)
    return fleet, UpdateRunner(fleet.learner, fleet.state, fleet.replay, fleet.rng)


def learn(fleet, updates, count, plainly=False):
    """Make updates with a beta that rises; compiled and captured, or as the CPU would."""
    plain = plain_learner(fleet) if plainly else None
    for i in range(count):
        updates.rates.beta.fill_(0.4 + 0.03 * i)
        if plain is not None:
            plain.update(fleet.state, fleet.replay, fleet.rng, fleet.rng.sample_raw(), updates.rates)
        else:
            updates()


def plain_learner(fleet):
    """The fleet's learner with nothing compiled."""
    matmul_dtype = fleet.learner._matmul_dtype
    return Learner(
        fleet.config, fleet.envs.num_actions, GPU, matmul_dtype=matmul_dtype, fuse=lambda function, _: function
    )


def assert_learnt_alike(one, two, start):
    """Two learners moved from the same start to the same place, up to rounding."""
    way = (one - start).norm(dim=-1)
    assert (way > 0).all()
    assert ((one - two).norm(dim=-1) < 0.02 * way).all(), (one - two).norm(dim=-1) / way


@pytest.fixture(scope="module")
def three():
    fleet, updates = filled([3, 1, 7])
    start = fleet.state.weights.clone()
    learn(fleet, updates, 20)
    return fleet, updates, start, fleet.state.weights.clone(), fleet.replay.priority.clone()


def test_captured_equals_eager(three):
    _, _, start, weights, priority = three
    fleet, updates = filled([3, 1, 7])
    assert torch.equal(fleet.state.weights, start)
    learn(fleet, updates, 20, plainly=True)
    assert_learnt_alike(weights, fleet.state.weights, start)
    assert fleet.state.count.item() == 20
    assert ((fleet.replay.priority > 0) == (priority > 0)).all()
    assert (fleet.replay.priority - priority).abs().max() < 0.02 * priority.max()


def test_an_agent_in_a_captured_fleet_equals_the_same_agent_alone(three):
    _, _, start, weights, _ = three
    fleet, updates = filled([1])
    learn(fleet, updates, 20)
    assert_learnt_alike(weights[1:2], fleet.state.weights, start[1:2])


def test_nothing_that_changes_is_frozen_in_the_graph(three):
    fleet, updates, *_ = three
    state, rng = fleet.state, fleet.rng
    kept = [t.clone() for t in (state.weights, state.first_moment, state.second_moment, state.count)]
    priority, places = fleet.replay.priority.clone(), [rng.state(agent) for agent in range(rng.agents)]

    def replayed(beta, rewind_dice=True):
        for tensor, before in zip(
            (state.weights, state.first_moment, state.second_moment, state.count), kept, strict=True
        ):
            tensor.copy_(before)
        fleet.replay.priority.copy_(priority)
        if rewind_dice:
            for agent, place in enumerate(places):
                rng.restore(agent, place)
        updates.means()
        updates.rates.beta.fill_(beta)
        updates()
        return updates.means()["loss"], state.weights.clone()

    loss, weights = replayed(0.4)
    again, same = replayed(0.4)
    assert again == loss
    assert torch.equal(same, weights)
    assert replayed(1.0)[0] != loss  # beta is read at each replay
    assert replayed(0.4, rewind_dice=False)[0] != loss  # noise, augmentation and samples are drawn anew
    state.count.fill_(1e6)
    kept[3] = state.count.clone()
    assert not torch.equal(replayed(0.4)[1], weights)  # Adam's step count is read too
    assert state.count.item() == 1e6 + 1


def test_a_fault_stops_one_agent_of_a_captured_fleet():
    sound, updates = filled([3, 1, 7])
    learn(sound, updates, 12)
    poisoned, updates = filled([3, 1, 7])
    learn(poisoned, updates, 6)
    poisoned.state.weights[1, 100] = torch.inf
    before, priority = poisoned.state.weights[1].clone(), poisoned.replay.priority[1].clone()
    for i in range(6, 12):
        updates.rates.beta.fill_(0.4 + 0.03 * i)
        updates()
    assert poisoned.state.diverged.tolist() == [False, True, False]
    assert torch.equal(poisoned.state.weights[1], before)
    assert torch.equal(poisoned.replay.priority[1], priority)
    for healthy in (0, 2):
        assert torch.equal(poisoned.state.weights[healthy], sound.state.weights[healthy])


# Those left out are others with another number: a depth, or a rate of averaging.
METHODS = ["spr_ema_0.999", *(name for name in PRESETS if not name.startswith(("spr_k", "spr_ema")))]


@pytest.mark.parametrize("preset", METHODS)
def test_every_method_captured_equals_eager(preset):
    """Update by update from the same state: over several, some contrastive losses blow rounding up to percents."""
    learner = preset_config(preset).learner
    small = SMALL | {"learner.depth": min(2, learner.depth), "learner.target_period": 1 if learner.average else 4}
    captured, updates = filled([0, 1], changes=small, preset=preset)
    eager, _ = filled([0, 1], changes=small, preset=preset)
    for i in range(6):  # three compiled, then one captured, then replays
        before = eager.state.weights.clone()
        learn(captured, updates, 1)
        learn(eager, updates, 1, plainly=True)
        way = (eager.state.weights - before).norm(dim=-1)
        assert (way > 0).all()
        apart = (captured.state.weights - eager.state.weights).norm(dim=-1) / way
        assert (apart < 2e-3).all(), (i, apart)
        assert torch.allclose(captured.replay.priority, eager.replay.priority, rtol=1e-3)
        for name in ("weights", "ema", "target", "first_moment", "second_moment"):
            getattr(captured.state, name).copy_(getattr(eager.state, name))
        captured.replay.priority.copy_(eager.replay.priority)


@pytest.mark.parametrize("fills", [0, 2**60])
def test_wide_networks_captured_equal_eager_ones(monkeypatch, fills):
    """By the library's convolutions, agent by agent, and by products."""
    monkeypatch.setattr(impala_ops, "_FILLS_A_GPU", fills)
    torch._dynamo.reset()
    changes = SMALL | {
        "network.encoder": "impala",
        "network.shared_hidden": True,
        "network.noisy": False,
        "network.batch_norm": False,
        "network.initialisation": "xavier",
    }
    captured, updates = filled([3, 1], changes=changes)
    start = captured.state.weights.clone()
    learn(captured, updates, 8)
    eager, updates = filled([3, 1], changes=changes)
    learn(eager, updates, 8, plainly=True)
    assert_learnt_alike(captured.state.weights, eager.state.weights, start)


def test_schedules_and_resets_reach_the_captured_graph():
    """n, gamma and the learning rate change from replay to replay, and a reset in between changes weights and count."""
    small = SMALL | {"replay.n_step_end": 1, "replay.gamma_end": 0.997, "learner.learning_rate_end": 1e-5}
    small |= {"schedule.anneal_updates": 8, "learner.weight_decay": 0.1}
    captured, updates = filled([0, 1], changes=small, preset="sr_spr")
    eager, _ = filled([0, 1], changes=small, preset="sr_spr")
    plain = plain_learner(eager)
    for i in range(10):
        if i == 6:
            for fleet in (captured, eager):
                reset(fleet, 1)
            assert torch.equal(captured.state.weights, eager.state.weights)
            assert captured.state.count.item() == 0
        before = eager.state.weights.clone()
        fill(updates.rates, captured.config, captured.config.schedule.learning_starts, i)
        updates()
        plain.update(eager.state, eager.replay, eager.rng, eager.rng.sample_raw(), updates.rates)
        way = (eager.state.weights - before).norm(dim=-1)
        assert (way > 0).all()
        assert ((captured.state.weights - eager.state.weights).norm(dim=-1) < 2e-3 * way).all(), i
        for name in ("weights", "target", "first_moment", "second_moment"):
            getattr(captured.state, name).copy_(getattr(eager.state, name))
        captured.replay.priority.copy_(eager.replay.priority)
    assert updates.rates.n_step.item() == 1


RESETS = {"network.width": 1, "reset.every": 40, "schedule.anneal_updates": 10, "schedule.epsilon_steps": 30}


@pytest.mark.parametrize("changes", [("spr", {}), ("bbf", RESETS)])
@pytest.mark.parametrize("step", [150, 260])  # before learning starts; and between captured updates, or on a reset
def test_a_restored_fleet_goes_on_to_the_same_bits(changes, step):
    """Though the restored one's first updates are launched plainly, and the other's replayed from its graph."""
    tune(GPU, "bf16")
    config = preset_config(changes[0]).override(SMALL | {"schedule.steps": 300} | changes[1])

    def training():
        return Training(assemble(config, make("catch", 3), [3, 1, 7], GPU, torch.bfloat16))

    whole, resumed = training(), training()
    for info in whole.run():
        if info.step == step:
            saved = snapshot.snapshots(whole)
    list(snapshot.restore(resumed, saved))
    rows = [info.rows for info in resumed.run()]
    assert len(rows) == 300 - step
    assert torch.equal(resumed.fleet.state.weights, whole.fleet.state.weights)
    assert torch.equal(resumed.fleet.state.target, whole.fleet.state.target)
    assert torch.equal(resumed.fleet.replay.priority, whole.fleet.replay.priority)
    assert all(map(torch.equal, *([t.fleet.rng.state(i) for i in range(t.fleet.rng.agents)] for t in (resumed, whole))))


@pytest.mark.parametrize("seeds", [[3, 1, 7], [3]])
def test_an_evaluation_is_played_as_on_a_cpu(seeds):
    """Captured, and each agent with its own weights; all know what they want, so no rounding matters."""
    config = preset_config("spr").override(SMALL | {"evaluation.episodes": 30, "evaluation.epsilon": 0.1})
    state = Learner(config, 3, torch.device("cpu")).init(seeds)
    params = {name: p.detach().clone() for name, p in state.params.items()}
    for agent in range(len(seeds)):
        params["head.advantage.bias"][agent].view(3, -1)[agent, -1] = 100.0
    games = ["catch"] * len(seeds)
    *_, expected = play(config, Agents(games, params, seeds))
    *_, scores = play(config, Agents(games, {name: p.to(GPU) for name, p in params.items()}, seeds))
    assert scores == expected


def test_screens_are_made_smaller_on_a_gpu_as_on_a_cpu():
    """To the last bit: there as in ale-py's vector, so here too; captured, as an evaluation does it."""
    heights, frames = (210, 250, 214, 210), []
    screens = np.random.default_rng(0).integers(256, size=(4, 5, 3, 1, TALLEST, 160), dtype=np.uint8)
    for device in (torch.device("cpu"), GPU):
        resizer, to_device = (
            Resizer(5, preset_config("spr").observation, device),
            HostToDevice(device, {"screen": screens[0]}),
        )
        act = captured(lambda resizer=resizer, to_device=to_device: resizer(to_device["screen"]), device)
        for turn in range(8):  # from the fourth on by replaying
            height = heights[turn % 4]
            for place in range(5):
                resizer.lend(place, height if place == turn % 5 else 210)
            to_device.send_some("screen", range(turn % 5, 5), screens[turn % 4])
            frames.append(act().cpu().clone())
    assert all(torch.equal(here, there) for here, there in zip(frames[:8], frames[8:], strict=True))


def test_games_that_begin_alike_score_the_same_in_a_group_and_by_themselves(monkeypatch):
    """A choice depends on what the agent sees, not on the place in the batch nor on who is beside it."""
    config = preset_config("spr").override({"evaluation.episodes": 60, "evaluation.epsilon": 0.01})
    config = config.override({"evaluation.max_steps": 300})
    games = ["alien", "kangaroo", "hero"]  # of 18 actions each
    drawn = Learner(config, 18, GPU).init([3, 1, 7]).params
    # As they are drawn, networks choose one action whatever they see; these look.
    params = {name: 0 * p.detach() if "bias" in name else 3 * p.detach() for name, p in drawn.items()}
    *_, grouped = play(config, Agents(games, params, [3, 1, 7]))
    monkeypatch.setattr(
        SubprocessBackend, "group_identical_starts", lambda _, starts: [[place] for place in range(len(starts))]
    )
    *_, alone = play(config, Agents(games, params, [3, 1, 7]))
    assert grouped[:3] == alone[:3]
    assert grouped.steps < 0.95 * alone.steps
    # And as from the frames of ale-py's vector, in as many rows of one: in another shape a GPU may round otherwise.
    monkeypatch.setattr(
        scheduler, "_backend", lambda config, _, rows: InProcessBackend((2, rows, 1), config.observation, {})
    )
    *_, vector = play(config, Agents(games, params, [3, 1, 7]))
    assert vector == alone
    assert len({score for scores in alone.scores for score in scores}) > 2  # agents that look play differently


@pytest.mark.parametrize("preset", ["spr", "spr_noaug"])
def test_two_thousand_updates_in_bf16_stay_finite(preset):
    fleet, updates = filled([0, 1], torch.bfloat16, {"schedule.learning_starts": 300}, preset)
    updates.rates.beta.fill_(0.4)
    for _ in range(2_000):
        updates()
    assert fleet.state.weights.isfinite().all()
    assert fleet.state.second_moment.isfinite().all()
    fleet.replay.check()
    means = updates.means()
    assert all(abs(value) < 1e4 for values in means.values() for value in values), means


def test_memory_does_not_grow_over_ten_thousand_steps():
    tune(GPU, "bf16")
    config = preset_config("spr").override(SMALL)
    fleet = assemble(config, make("catch", 1), [1], GPU, torch.bfloat16)
    taken = {}
    for info in train(fleet):
        if info.step in (2_000, 12_000):
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            taken[info.step] = (torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), host)
        if info.step == 12_000:
            break
    before, after = taken[2_000], taken[12_000]
    assert after[0] == before[0]
    assert after[1] <= before[1] + 2**20
    assert after[2] < before[2] + 64 * 2**20


CAPACITY = 100_000  # a whole run's ring


def fill_ring(fleets, steps=130_000, bank=256):
    """Give every fleet the same full ring that has gone round once: pictures, ends, sparse rewards, 18 actions.

    Frames repeat one bank of pictures: what is drawn from where shows in them, and gigabytes are filled in a moment.
    """
    generator = torch.Generator(GPU).manual_seed(5)
    agents = len(fleets[0].seeds)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, device=GPU)

    coarse = uniform(bank, 1, 14, 14).mul(256)
    pictures = torch.nn.functional.interpolate(coarse, size=(84, 84), mode="bilinear").to(torch.uint8)
    slot = torch.arange(CAPACITY, device=GPU)
    first = uniform(agents, CAPACITY) < 1 / 100
    actions = (uniform(agents, CAPACITY) * 18).long()
    rewards = (uniform(agents, CAPACITY) < 0.05).float()
    priority = uniform(agents, CAPACITY) + 0.01
    # Near the end of the memory and around the newest step, where an index may go wrong, sequences are likely.
    newest = steps % CAPACITY
    for place in (CAPACITY, newest - 10):
        priority[:, place - 300 : place] *= 300
    horizon = fleets[0].config.horizon
    priority[:, newest - horizon : newest + 3] = 0
    for fleet in fleets:
        replay = fleet.replay
        for agent in range(agents):
            replay.frames[agent] = pictures[(slot + 7 * agent) % bank]
        replay.is_first.copy_(first)
        replay.actions.copy_(actions)
        replay.rewards.copy_(rewards)
        replay.priority[:, :CAPACITY] = priority
        replay._count.fill_(steps)
        replay.check()


def gradient(fleet, before):
    """The clipped gradient of the last update, from what it did to Adam's first moment."""
    beta = fleet.config.learner.adam_beta1
    return (fleet.state.first_moment - beta * before) / (1 - beta)


STATE = ("weights", "ema", "target", "first_moment", "second_moment")


@pytest.mark.parametrize(
    ("preset", "agents", "most"), [("spr", 1, 1), ("spr", 3, 1), ("spr", 10, 1), ("bbf", 1, 2**0.5)]
)
def test_at_real_sizes_compiling_changes_less_than_bf16_does(preset, agents, most, record_property):
    """Every result is made so: the paper's sizes, 18 actions, a full ring, bf16, compiled and captured.

    Through `bbf`'s 15 convolutions what is rounded elsewhere decides other ReLUs and pools, so that two ways to round
    are as far apart as if they had nothing in common: the square root of two times as far as one is from float32.
    """
    config, seeds = preset_config(preset), list(range(agents))
    games = make("bank_heist", agents)

    def fleet(matmul_dtype):
        return assemble(config, games, seeds, GPU, matmul_dtype)

    run, plain, exact = fleet(torch.bfloat16), fleet(torch.bfloat16), fleet(torch.float32)
    fill_ring([run, plain, exact])
    tune(GPU, "bf16")
    updates = UpdateRunner(run.learner, run.state, run.replay, run.rng)
    found = {}
    for i in range(12):
        before = plain.state.first_moment.clone()
        learn(run, updates, 1)
        learn(plain, updates, 1, plainly=True)
        torch.set_float32_matmul_precision("highest")
        learn(exact, updates, 1, plainly=True)
        tune(GPU, "bf16")
        grads = [run.state.layout.views(gradient(f, before)) for f in (run, plain, exact)]
        for name, of_run in grads[0].items():
            compiling = (of_run - grads[1][name]).flatten(1).norm(dim=1)
            rounding = (grads[1][name] - grads[2][name]).flatten(1).norm(dim=1)
            found.setdefault(name, []).append(((compiling + 1e-12) / (rounding + 1e-12)).tolist())
        for other in (run, exact):
            apart = (other.replay.priority - plain.replay.priority).abs() / (plain.replay.priority + 1e-3)
            assert apart.max() < 0.2, (i, apart.max())  # the same sequences were drawn, and judged alike
            for part in STATE:
                getattr(other.state, part).copy_(getattr(plain.state, part))
            other.replay.priority.copy_(plain.replay.priority)
    ratios = {name: torch.tensor(values) for name, values in found.items()}  # [updates, agents]
    table = {name: (round(r.mean().item(), 3), round(r.max().item(), 3)) for name, r in ratios.items()}
    record_property("compiling / rounding (mean, largest)", table)
    assert all(mean < most for mean, _ in table.values()), table
    games.close()


RING = ("frames", "is_first", "actions", "rewards", "priority")


@pytest.mark.parametrize("game", ["kangaroo", "up_n_down"])  # of 18 actions and of six; the 17th agent and the last
def test_at_real_sizes_company_changes_less_than_bf16_does(game, record_property):
    """One of 26 agents, each of another game, learns as it would alone, from the same start and the same steps."""
    config, names = preset_config("spr"), game_names()
    place = list(names).index(game)
    games, one = make_each(names), make(game, 1)
    many = assemble(config, games, [2] * len(names), GPU, torch.bfloat16)
    alone, exact = (assemble(config, one, [2], GPU, matmul_dtype) for matmul_dtype in (torch.bfloat16, torch.float32))
    fill_ring([many])
    own = torch.tensor(games.game_num_actions, device=GPU)[:, None]
    many.replay.actions.remainder_(own)
    for other in (alone, exact):
        assert torch.equal(other.state.weights[0], many.state.weights[place])
        for part in RING:
            getattr(other.replay, part)[0].copy_(getattr(many.replay, part)[place])
        other.replay._count.copy_(many.replay._count)
        other.replay.check()
    tune(GPU, "bf16")
    updates = [UpdateRunner(fleet.learner, fleet.state, fleet.replay, fleet.rng) for fleet in (many, alone)]
    found = {}
    for i in range(12):
        before = alone.state.first_moment.clone()
        learn(many, updates[0], 1)
        learn(alone, updates[1], 1)
        torch.set_float32_matmul_precision("highest")
        learn(exact, updates[1], 1, plainly=True)
        tune(GPU, "bf16")
        moved = gradient(many, torch.cat([before] * len(names)))[place : place + 1]
        grads = [alone.state.layout.views(g) for g in (moved, gradient(alone, before), gradient(exact, before))]
        for name, of_many in grads[0].items():
            company = (of_many - grads[1][name]).norm()
            rounding = (grads[1][name] - grads[2][name]).norm()
            found.setdefault(name, []).append(((company + 1e-12) / (rounding + 1e-12)).item())
        apart = (many.replay.priority[place] - alone.replay.priority[0]).abs() / (alone.replay.priority[0] + 1e-3)
        assert apart.max() < 0.2, (i, apart.max())  # the same sequences were drawn, and judged alike
        for part in STATE:
            for to in (getattr(many.state, part)[place], getattr(exact.state, part)[0]):
                to.copy_(getattr(alone.state, part)[0])
        for to in (many.replay.priority[place], exact.replay.priority[0]):
            to.copy_(alone.replay.priority[0])
    table = {name: (round(np.mean(ratio), 3), round(max(ratio), 3)) for name, ratio in found.items()}
    record_property("company / rounding (mean, largest)", table)
    assert all(mean < 1 for mean, _ in table.values()), table
    games.close()
    one.close()


def test_captured_acting_equals_plain_and_draws_new_noise_each_time():
    """At real sizes: the noise of every step is the generator's next, in a replayed graph as in plain calls."""
    config = preset_config("spr")
    games = make("bank_heist", 3)
    frames = torch.randint(0, 256, (40, 3, 1, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chosen = {}
    for way in ("captured", "plain"):
        fleet = assemble(config, games, [3, 1, 7], GPU, torch.bfloat16)
        tune(GPU, "bf16")
        act = ActStep(fleet)
        act.start(frames[0].numpy())
        actions = []
        for frame in frames:
            if way == "captured":
                act.act_async(greedy=True)
            else:
                raw = fleet.rng.sample_raw_action()
                fleet.replay.write_frame(act._to_device["frame"])
                act._to_host.post(act._select_and_store(raw, None))
            actions.append(act.act_wait()[0])
            still = np.zeros(3, np.bool_)
            act.finish_step(Step(frame.numpy(), np.zeros(3, np.float32), still, still, still))
        chosen[way] = np.stack(actions)
    games.close()
    assert (chosen["captured"] == chosen["plain"]).mean() > 0.95  # rounding may decide between equals
    assert all(len(set(chosen["captured"][-20:, agent].tolist())) > 3 for agent in range(3))


def test_an_agent_answers_on_a_gpu_as_on_a_cpu_and_is_watched_there(tmp_path):
    changes = {"network.hidden": 16, "replay.batch_size": 4, "schedule.learning_starts": 60, "evaluation.episodes": 2}
    (run,) = spr.train("catch", changes=changes, steps=70, out=tmp_path, device="cpu")
    there, here = run.agent("cuda"), run.agent("cpu")
    obs = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    actions = np.random.default_rng(1).integers(0, 3, (5, 4))
    for mine, plain in (
        (there.q_values(obs), here.q_values(obs)),
        (there.encode(obs), here.encode(obs)),
        (there.predict(obs, actions), here.predict(obs, actions)),
    ):
        # A GPU takes convolutions in TF32, and every predicted step is stretched to a range of one again.
        difference = np.abs(mine - plain)
        assert difference.mean() < 2e-3
        assert difference.max() < 5e-2
    assert there.q_values(torch.from_numpy(obs)).device.type == "cuda"
    assert len(spr.evaluate(there).scores) == 2
    pytest.importorskip("matplotlib", reason="films need the extra 'video'")
    from spr.evaluation import film  # noqa: PLC0415

    agent = film.load_player(run.folder, GPU)
    assert len(list(film.film(agent, 0, 5, []))) == 5
    agent.close()
