"""What several tests share: small configurations, and a fleet with a replay of random content."""

import importlib.util
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spr.agent.augmentation import AugmentParams, views_of
from spr.agent.random_streams import RngStreams
from spr.agent.replay import Replay
from spr.agent.schedules import new_scalars
from spr.config.config import Config, fields
from spr.config.presets import preset_config
from spr.experiments.job_runner import JobRunner
from spr.experiments.train_request import TrainJob, TrainRequest
from spr.ops import each_agent, functional, kernels
from spr.training.learner import Learner

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
ACTIONS = 4
# Frames of a quarter of the pixels: where a test is about something else than the paper's own sizes.
LITTLE_FRAMES = {"observation.height": 44, "observation.width": 44}
# One update of it takes milliseconds.
SMALL = {
    "network.hidden": 16,
    "replay.batch_size": 6,
    "schedule.learning_starts": 60,
    "schedule.steps": 300,
    "replay.n_step": 4,
    "learner.depth": 2,
} | LITTLE_FRAMES
# A whole run of catch in seconds; it learns nothing.
TINY = {
    "network.hidden": 16,
    "replay.batch_size": 4,
    "learner.depth": 2,
    "schedule.learning_starts": 60,
} | LITTLE_FRAMES


# Before a command: under `nohup` it would be born deaf to SIGHUP.
HEARING = ["env", "--default-signal=HUP", sys.executable]


def as_options(changes):
    """Write a configuration's changes as the command line takes them."""
    return [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]


# A whole run by the command line in a second or two.
QUICK_RUN = as_options({"network.hidden": 8, "replay.batch_size": 4, "replay.n_step": 3, "learner.depth": 1})
QUICK_RUN += ["--steps", "45", "--set", "schedule.learning_starts=40", "--set", "evaluation.episodes=1"]
QUICK_RUN += ["--device", "cpu"]


# A script's background job ignores SIGINT, and children would inherit that: they are to be as from a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def by_path(file):
    """Import a script that is in no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for(what, seconds=120):
    """Ask until there is something, and return it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def rewrite(file, **changes):
    """Change what a JSON file says, as somebody does who leaves its checksum out."""
    said = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in said.items() if name != "sha256"}))


def small(preset="spr", **changes):
    """A preset in small: its own depth if that is less, and what takes thousands of steps takes a few."""
    usual = preset_config(preset)
    depth = {"learner.depth": min(usual.learner.depth, 2), "schedule.epsilon_steps": 10, "network.width": 1}
    if usual.replay.n_step_end:
        depth |= {"replay.n_step_end": 2, "schedule.anneal_updates": 4}
    return usual.override(SMALL | depth | changes)


class World:
    """A fleet with a replay of random content that depends on each agent's seed alone."""

    def __init__(self, config: Config, seeds, dtype=torch.float32, game_num_actions=None, room=ACTIONS):
        self.learner = Learner(config, room, CPU, dtype)
        self.state = self.learner.init(seeds, game_num_actions)
        self.rng = RngStreams(config, room, seeds, CPU, game_num_actions)
        self.rates = new_scalars(config, CPU)
        own = torch.tensor(game_num_actions or [room] * len(seeds))
        self.replay = Replay(config, len(seeds), CPU)
        content = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
        shape = config.observation.frame
        for step in range(100):
            frame = torch.stack([torch.randint(0, 256, shape, generator=g) for g in content]).to(torch.uint8)
            chance = torch.stack([torch.rand(4, generator=g) for g in content])
            self.replay.write_frame(frame)
            self.replay.begin_step((chance[:, 0] < 0.1) | (step == 0), (chance[:, 1] * own).long())
            self.replay.finish_step((chance[:, 2] * 3).floor() - 1, chance[:, 3] < 0.02)

    def draws(self):
        return self.rng.draws(self.rng.sample_raw())

    def update(self, count=1, raw=None):
        """Make updates with a beta that rises; each with new random numbers, or all with the given ones."""
        for i in range(count):
            numbers = self.rng.sample_raw() if raw is None else raw
            rates = self.rates._replace(beta=torch.tensor(0.4 + 0.02 * i))
            metrics = self.learner.update(self.state, self.replay, self.rng, numbers, rates)
        return metrics

    def fixed_batch_losses(self, count=20):
        """Learn the same sequences under the same random numbers again and again."""
        raw, losses = self.rng.sample_raw(), []
        for _ in range(count):
            priority = self.replay.priority.clone()
            rates = self.rates._replace(beta=torch.tensor(0.4))
            losses.append(self.learner.update(self.state, self.replay, self.rng, raw, rates)["loss"])
            self.replay.priority.copy_(priority)
        return losses


def make_job(out, seeds=(0,), games=("catch",), preset="spr", config=None, every=50, **more):
    """A training on this CPU, by a whole configuration if one is given."""
    usual = preset_config(preset)
    names = [field.name for field in fields()] if config else []
    changes = tuple((name, config.value(name)) for name in names if config.value(name) != usual.value(name))
    request = TrainRequest(tuple(games), preset, tuple(seeds), changes, out=Path(out), checkpoint_every=every, **more)
    return TrainJob(request, CPU, "fp32")


def carry_out(job, on_event, stop=lambda: False, **how):
    """Run a job, which may resume or overwrite, and return the exit code."""
    return JobRunner(replace(job, request=replace(job.request, **how)), on_event, stop).run()


def plain_params(batch, views):
    """Augmentation that changes nothing, of one agent's views."""
    none = torch.zeros(1, batch, views, dtype=torch.int64)
    return AugmentParams(none[..., None].expand(-1, -1, -1, 2), none[..., None][..., :0], none, none + 1.0)


def grad_views(config):
    """How many of an update's views gradients reach."""
    return sum(view.needs_grad for view in views_of(config))


def in_rows(learner, grads):
    """Gradients as rows [S, P], however the learner has them."""
    if isinstance(grads, torch.Tensor):
        return grads
    stacked = {name: torch.stack([mine[name] for mine in grads]) for name in grads[0]}
    return learner.layout.rows(stacked, learner._dtype, CPU)


@pytest.fixture
def gpu_ops(monkeypatch):
    """Compute on a CPU what a GPU would compute: its own way to convolve and to gather pixels."""
    monkeypatch.setattr(
        functional,
        "convolve",
        lambda x, weight, stride=1, padding=0: functional.shift_and_add(x, weight, stride, padding),
    )
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(each_agent, "takes_turns", lambda _: False)
