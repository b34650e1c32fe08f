"""The replay against a slow oracle that keeps every step in Python lists; frames carry their own step number."""

import numpy as np
import pytest
import torch
from conftest import CPU, plain_params
from hypothesis import given, settings
from hypothesis import strategies as st

from spr.agent.augmentation import observations, views_of
from spr.agent.replay import Replay, memory_needed
from spr.config.config import Config
from spr.config.schema import BOOTSTRAPS

GAMMA = 0.9
ON, TERMINAL, TRUNCATED = 0, 1, 2


def small_config(capacity=60, n_step=3, depth=2, batch=4, steps=500):
    return Config().override(
        {
            "replay.capacity": capacity,
            "replay.n_step": n_step,
            "replay.batch_size": batch,
            "replay.gamma": GAMMA,
            "learner.depth": depth,
            "learner.aux_weight": 2.0 if depth else 0.0,
            "schedule.learning_starts": 50,
            "schedule.steps": steps,
        }
    )


class Oracle:
    """Everything that ever happened, and what a sequence from step t should look like, by the words of the spec."""

    def __init__(self, config, ends, actions, rewards):
        self.config, self.ends, self.actions, self.rewards = config, ends, actions, rewards
        self.count = len(ends)
        self.n, self.depth = config.replay.n_step, config.learner.depth

    def begins(self, t):
        return t == 0 or self.ends[t - 1] != ON

    def action_mask(self, t):
        reach = max(self.n, self.depth)
        kept = min(self.config.replay.capacity, self.config.schedule.steps)
        overwritten = self.count > kept and t - 3 < self.count - kept
        crosses = any(end == TRUNCATED for end in self.ends[t : t + self.n])
        return t >= 0 and t + reach < self.count and not overwritten and not crosses

    def stack(self, t):
        """Values of the four stacked frames, oldest first; 0 stands for black."""
        values = [t + 1]  # frame of step t has pixel value t + 1
        for back in range(1, 4):
            crossed = any(self.begins(t - i) for i in range(back))
            values.insert(0, 0 if crossed else t - back + 1)
        return values

    def n_step_return(self, t, n=None, gamma=GAMMA):
        n = n or self.n
        total, discount = 0.0, gamma**n
        for i in range(n):
            total += gamma**i * self.rewards[t + i]
            if self.ends[t + i] == TERMINAL:
                discount = 0.0
                break
        return total, discount

    def mask(self, t):
        return [float(all(end == ON for end in self.ends[t : t + k])) for k in range(1, self.depth + 1)]


def fill(config, ends, actions, rewards, agents=1):
    replay = Replay(config, agents, CPU)
    for t, end in enumerate(ends):
        first = t == 0 or ends[t - 1] != ON
        replay.write_frame(torch.full((agents, 1, 84, 84), (t + 1) % 256, dtype=torch.uint8))
        replay.begin_step(torch.full((agents,), first), torch.full((agents,), actions[t]))
        replay.finish_step(torch.full((agents,), rewards[t]), torch.full((agents,), end == TRUNCATED))
        if t % 13 == 0:
            replay.check()
    replay.check()
    return replay


histories = st.lists(st.sampled_from([ON] * 8 + [TERMINAL, TERMINAL, TRUNCATED]), min_size=30, max_size=180)


@settings(max_examples=60, deadline=None)
@given(histories, st.integers(1, 7), st.integers(0, 6), st.integers(0, 10**6))
def test_sequences_equal_the_oracle(ends, n_step, depth, seed):
    config = small_config(n_step=n_step, depth=depth)
    random = np.random.default_rng(seed)
    actions = random.integers(0, 9, len(ends)).tolist()
    rewards = random.integers(-1, 2, len(ends)).astype(float).tolist()
    oracle = Oracle(config, ends, actions, rewards)
    replay = fill(config, ends, actions, rewards)

    eligible = {t for t in range(len(ends)) if oracle.action_mask(t)}
    drawable = set(torch.nonzero(replay.priority[0] > 0).flatten().tolist())
    assert drawable == {t % replay.capacity for t in eligible}
    if not eligible:
        return

    batch = replay.sample(torch.from_numpy(random.random((1, 40))), torch.tensor(0.5))
    by_slot = {t % replay.capacity: t for t in eligible}
    params = plain_params(40, len(views_of(config)))
    pixels = observations(batch.frames, replay.offsets, batch.visible, params, 0, torch.float32)
    for row, slot in enumerate(batch.start[0].tolist()):
        t = by_slot[slot]
        total, discount = oracle.n_step_return(t)
        assert batch.returns[0, row].item() == pytest.approx(total, abs=1e-5)
        assert batch.discount[0, row].item() == pytest.approx(discount, abs=1e-6)
        assert batch.mask[0, row].tolist() == oracle.mask(t)
        assert batch.actions[0, row].tolist() == actions[t : t + max(depth, 1)]
        for o, offset in enumerate([*range(depth + 1), n_step]):
            seen = (pixels[0, o, row, :, 40, 40] * 255).round().int().tolist()
            assert seen == oracle.stack(t + offset)


def test_hand_computed_return_with_a_lost_life():
    # Steps 0..9, reward 1 each; a life is lost at step 4: from t = 2 the return is 1 + .9 + .81, with no bootstrap.
    ends = [ON] * 4 + [TERMINAL] + [ON] * 10
    replay = fill(small_config(n_step=4), ends, [0] * 15, [1.0] * 15)
    replay.priority.zero_()
    replay.priority[0, 2] = 1
    batch = replay.sample(torch.zeros(1, 1, dtype=torch.float64), torch.tensor(1.0))
    assert batch.returns.item() == pytest.approx(2.71)
    assert batch.discount.item() == 0
    assert batch.mask.tolist() == [[[1.0, 1.0]]]


def test_sequences_never_cross_a_truncation_but_may_cross_a_terminal():
    ends = [ON] * 20
    ends[8] = TRUNCATED
    ends[14] = TERMINAL
    replay = fill(small_config(n_step=3), ends, [0] * 20, [0.0] * 20)
    assert torch.nonzero(replay.priority[0]).flatten().tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 16]


def test_sampling_follows_the_priorities():
    replay = fill(small_config(), [ON] * 59, [0] * 59, [0.0] * 59)
    start = replay.priority[0] > 0
    weights = torch.where(start, torch.rand(start.shape, generator=torch.Generator().manual_seed(3)) ** 3, 0)
    replay.priority[0] = weights
    draws = 200_000
    uniform = torch.rand(1, draws, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(replay._tree.find(uniform)[0], minlength=len(weights)).double()
    p = weights.double() / weights.double().sum()
    sigma = (draws * p * (1 - p)).sqrt()
    assert ((counts - draws * p).abs() <= 5 * sigma + 1e-9).all()
    assert counts[~start].sum() == 0


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_extreme_draws_stay_on_drawable_starts(edge):
    replay = fill(small_config(), [ON] * 59, [0] * 59, [0.0] * 59)
    replay.priority[0] *= torch.rand(replay.priority.shape[1], generator=torch.Generator().manual_seed(0)) * 1e-3
    slot = replay._tree.find(torch.full((1, 3), edge, dtype=torch.float64))
    assert (replay.priority[0, slot] > 0).all()


def test_importance_weights_by_hand():
    replay = fill(small_config(), [ON] * 59, [0] * 59, [0.0] * 59)
    replay.priority.zero_()
    replay.priority[0, 7], replay.priority[0, 21] = 1.0, 4.0
    batch = replay.sample(torch.tensor([[0.1, 0.5]], dtype=torch.float64), torch.tensor(0.5))
    assert batch.start.tolist() == [[7, 21]]
    expected = ((1 + 1e-5) / (4 + 1e-5)) ** 0.5
    torch.testing.assert_close(batch.weight, torch.tensor([[1.0, expected]]))


def test_a_start_drawn_twice_takes_the_larger_priority():
    replay = fill(small_config(), [ON] * 59, [0] * 59, [0.0] * 59, agents=2)
    start = torch.tensor([[5, 9, 5], [9, 9, 5]])
    replay.update_priorities(start, torch.tensor([[0.2, 0.3, 0.7], [3.0, 0.1, 0.4]]), torch.zeros(2, dtype=torch.bool))
    assert replay.priority[0, [5, 9]].tolist() == pytest.approx([0.7, 0.3])
    assert replay.priority[1, [5, 9]].tolist() == pytest.approx([0.4, 3.0])


def test_new_steps_get_priority_one_whatever_was_learnt_before():
    config = small_config(capacity=50)
    replay = fill(config, [ON] * 50, [0] * 50, [0.0] * 50)
    replay.priority[0, :47] = 0.25
    for _ in range(10):
        none = torch.zeros(1, dtype=torch.int64)
        replay.write_frame(torch.zeros(1, 1, 84, 84, dtype=torch.uint8))
        replay.begin_step(none.bool(), none)
        replay.finish_step(none.float(), none.bool())
    # Steps 47..56 became drawable in the meantime; slots 57..59 wait for their windows, 60..62 lost their stacks.
    assert replay.priority[0, 47:50].tolist() == [1, 1, 1]
    assert replay.priority[0, :7].tolist() == [1] * 7
    assert replay.priority[0, 7:13].tolist() == [0] * 6
    assert replay.priority[0, 13:47].tolist() == [0.25] * 34


@pytest.mark.parametrize("depth", [0, 2, 6])
def test_what_is_drawn_does_not_depend_on_the_step_that_is_still_open(depth):
    """Updates may run while the environments step: between begin_step and finish_step, the open slot is never read."""
    config = small_config(depth=depth, capacity=50)
    replay = fill(config, [ON] * 75, [0] * 75, [1.0] * 75)
    replay.write_frame(torch.full((1, 1, 84, 84), 76, dtype=torch.uint8))
    replay.begin_step(torch.tensor([False]), torch.tensor([0]))
    slot = (replay.steps - 1) % replay.capacity
    uniform = torch.linspace(0, 0.999, 200, dtype=torch.float64)[None]
    batches = []
    for reward, truncated in ((float("nan"), True), (1.0, False)):
        replay.rewards[0, slot], replay.truncated[0, slot] = reward, truncated
        batches.append(replay.sample(uniform, torch.tensor(1.0)))
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    newest = (replay.steps - 1 - max(depth, 3)) % replay.capacity
    assert newest in batches[0].start  # the sequence that ends with the open step's own frame


def test_memory_is_what_is_announced():
    config = small_config(capacity=5000, steps=5000)
    replay = Replay(config, 3, CPU)
    held = [replay.frames, replay.actions, replay.rewards, replay.is_first, replay.truncated, replay.priority]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert memory_needed(config, 3) <= taken < 1.01 * memory_needed(config, 3)


@pytest.mark.parametrize(("n_step", "depth"), [(10, 5), (3, 5), (4, 0)])
def test_with_the_authors_ends_only_the_first_step_cuts_and_the_last_state_before_a_near_end_is_valued(n_step, depth):
    """Their released code, by a slow loop over every drawn sequence; rewards and predictions are as they should be."""
    config = small_config(capacity=600, n_step=n_step, depth=depth)
    random = np.random.default_rng(0)
    ends = [int(random.random() < 0.12) for _ in range(400)]
    actions, rewards = random.integers(0, 9, 400).tolist(), random.integers(-1, 2, 400).astype(float).tolist()
    right, authors = (fill(config.override({"replay.ends": way}), ends, actions, rewards) for way in ("all", "first"))
    oracle = Oracle(config, ends, actions, rewards)
    uniform = torch.from_numpy(random.random((1, 300)))
    plain, batch = (replay.sample(uniform, torch.tensor(0.4)) for replay in (right, authors))
    for same in ("start", "actions", "returns", "mask", "weight"):
        assert torch.equal(getattr(plain, same), getattr(batch, same)), same
    views = views_of(config)
    params = plain_params(300, len(views))
    pixels = observations(batch.frames, authors.offsets, batch.visible, params, 0, torch.float32)
    pixels = (pixels[0, :, :, :, 40, 40] * 255).round().int()  # [O, B, 4]
    found = set()
    for row, t in enumerate(batch.start[0].tolist()):
        end = next((k for k in range(n_step) if ends[t + k] == TERMINAL), None)
        state = t + (end if end is not None and end <= depth else n_step)
        assert pixels[-1, row].tolist() == [value % 256 for value in oracle.stack(state)]
        assert batch.discount[0, row].item() == pytest.approx(0.0 if end == 0 else GAMMA**n_step)
        for o, view in enumerate(views[:-1]):
            assert pixels[o, row].tolist() == [value % 256 for value in oracle.stack(t + view.offset)]
        found.add(end)
    assert found == {None, *range(n_step)}  # the history held every case


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(("start", "end", "depth"), [(10, 3, 5), (3, 10, 2), (10, 3, 0)])
def test_returns_of_a_changing_length_equal_a_slow_loop(start, end, depth, early):
    """Every n between the two: returns, discounts and bootstraps are of n steps, all else as for the longest.

    As in the released code of SR-SPR and BBF the state that is valued may lie one step before the last reward.
    """
    changes = {"replay.n_step_end": end, "replay.gamma_end": 0.99, "schedule.anneal_updates": 100}
    changes["replay.bootstrap_at"] = BOOTSTRAPS[early]
    config = small_config(capacity=600, n_step=start, depth=depth).override(changes)
    random = np.random.default_rng(1)
    ends = random.choice([ON] * 8 + [TERMINAL, TERMINAL, TRUNCATED], 400).tolist()
    actions, rewards = random.integers(0, 9, 400).tolist(), random.integers(-1, 2, 400).astype(float).tolist()
    replay = fill(config, ends, actions, rewards)
    oracle = Oracle(small_config(capacity=600, n_step=10, depth=depth), ends, actions, rewards)
    drawable = torch.nonzero(replay.priority[0] > 0).flatten().tolist()
    assert drawable == [t for t in range(400) if oracle.action_mask(t)]
    uniform = torch.from_numpy(random.random((1, 100)))
    views = views_of(config)
    for n in range(3, 11):
        gamma = 0.9 + 0.01 * n
        now = torch.tensor(n), torch.tensor(gamma, dtype=torch.float64)
        batch = replay.sample(uniform, torch.tensor(0.4), *now)
        offsets = replay.offsets_at(now[0])
        pixels = observations(batch.frames, offsets, batch.visible, plain_params(100, len(views)), 0, torch.float32)
        pixels = (pixels[0, :, :, :, 40, 40] * 255).round().int()  # [O, B, 4]
        for row, t in enumerate(batch.start[0].tolist()):
            total, _ = oracle.n_step_return(t, n, gamma)
            _, discount = oracle.n_step_return(t, n - early, gamma)
            assert batch.returns[0, row].item() == pytest.approx(total, abs=1e-5)
            assert batch.discount[0, row].item() == pytest.approx(discount * gamma**early, abs=1e-6)
            assert batch.mask[0, row].tolist() == oracle.mask(t)
            for o, offset in enumerate([view.offset for view in views[:-1]] + [n - early]):
                assert pixels[o, row].tolist() == [value % 256 for value in oracle.stack(t + offset)]


@pytest.mark.parametrize("early", [0, 1])
def test_at_its_longest_a_changing_return_is_the_constant_one(early):
    where = {"replay.bootstrap_at": BOOTSTRAPS[early]}
    changes = {"replay.n_step_end": 2, "schedule.anneal_updates": 100} | where
    random = np.random.default_rng(2)
    ends = random.choice([ON] * 8 + [TERMINAL], 59).tolist()
    history = ends, [0] * 59, random.integers(-1, 2, 59).astype(float).tolist()
    constant = fill(small_config(n_step=4).override(where), *history)
    changing = fill(small_config(n_step=4).override(changes), *history)
    uniform, beta = torch.from_numpy(random.random((1, 50))), torch.tensor(0.4)
    plain = constant.sample(uniform, beta)
    other = changing.sample(uniform, beta, torch.tensor(4), torch.tensor(GAMMA, dtype=torch.float64))
    for name in plain._fields:
        torch.testing.assert_close(getattr(other, name), getattr(plain, name))
