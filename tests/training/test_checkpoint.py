"""Nothing is lost: runs that are killed and resumed end byte for byte like others, and bad files are recognised."""

import ctypes
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from conftest import CPU, TINY, as_options, carry_out, make_job
from safetensors.torch import load, save

from spr.agent.random_streams import RawNumbers
from spr.agent.schedules import fill
from spr.cli import main
from spr.common.errors import StorageFault, UnusableError, UserError
from spr.config.presets import preset_config
from spr.envs.registry import make
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import play
from spr.experiments import events, job_runner
from spr.experiments.job_runner import JobRunner
from spr.experiments.train_request import Member
from spr.ops.cuda_graphs import DeviceToHost, HostToDevice
from spr.runs import metrics_files, run_files, run_folder
from spr.training import checkpoint, snapshot
from spr.training.checkpoint import Checkpoint, Spec
from spr.training.fleet import assemble
from spr.training.learner import Learner
from spr.training.loop import Training

CONFIG = preset_config("spr").override(TINY | {"schedule.steps": 90, "replay.capacity": 75})
# How many times the killed runs below are killed: CI has a few, the whole proof is `SPR_KILLS=20 pytest -k killed`.
KILLS = int(os.environ.get("SPR_KILLS", "3"))


def training(seeds, config=CONFIG, game="catch"):
    return Training(assemble(config, make(game, len(seeds), obs=config.observation), seeds, CPU))


def after(steps, seeds=(0, 1, 2), config=CONFIG, game="catch"):
    """A fleet after some steps, with its rows of metrics."""
    fleet = training(seeds, config, game)
    rows = []
    for info in fleet.run():
        rows.append(info.rows)
        if info.step == steps:
            break
    return fleet, rows


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["spr", "spr_noaug", "der", "drq"])
@pytest.mark.parametrize("step", [40, 76])  # before learning starts; and after the ring has wrapped around
def test_a_restored_fleet_goes_on_to_the_same_bits(preset, step):
    small = TINY | {"schedule.steps": 90, "replay.capacity": 75, "learner.target_period": 7, "replay.n_step": 5}
    small["learner.depth"] = min(2, preset_config(preset).learner.depth)
    config = preset_config(preset).override(small)
    whole, rows = after(90, config=config)
    cut, first = after(step, config=config)
    resumed = training((0, 1, 2), config)
    assert list(snapshot.restore(resumed, snapshot.snapshots(cut))) == list(range(1, step + 1))
    rest = [info.rows for info in resumed.run()]
    assert first + rest == rows
    for name in ("weights", "ema", "target", "first_moment", "second_moment", "count"):
        assert torch.equal(getattr(whole.fleet.state, name), getattr(resumed.fleet.state, name)), name
    for name in ("priority", "frames", "actions", "rewards", "is_first", "truncated"):
        assert torch.equal(getattr(whole.fleet.replay, name), getattr(resumed.fleet.replay, name)), name


@pytest.mark.slow
def test_nothing_is_sent_again_before_the_device_has_had_it(monkeypatch):
    """A CPU is never late, a GPU may be: between two sendings of one thing, something later must be waited for."""
    sent, again, times = set(), [], 0
    send, read = HostToDevice.send, DeviceToHost.read

    def sending(self, **arrays):
        nonlocal times
        times += 1
        again.extend(name for name in arrays if (id(self), name) in sent)
        sent.update((id(self), name) for name in arrays)
        send(self, **arrays)

    def reading(self):
        sent.clear()
        return read(self)

    monkeypatch.setattr(HostToDevice, "send", sending)
    monkeypatch.setattr(DeviceToHost, "read", reading)
    cut, _ = after(70)
    resumed = training((0, 1, 2))
    list(snapshot.restore(resumed, snapshot.snapshots(cut)))
    list(resumed.run())
    list(play(CONFIG, Agents(["catch"] * 3, resumed.fleet.state.params, (0, 1, 2))))
    assert times > 2 * 70 + 90
    assert not again


@pytest.mark.slow
def test_an_agent_of_a_fleet_goes_on_alone():
    whole, _ = after(90)
    cut, _ = after(70)
    alone = training([1])
    list(snapshot.restore(alone, snapshot.snapshots(cut)[1:2]))
    list(alone.run())
    here, (there, start) = alone.fleet.state.weights[0], (t.fleet.state.weights[1] for t in (whole, cut))
    # Up to rounding, of which Adam makes whole steps where a gradient is next to nothing: 40 of up to 1e-4 each.
    assert (here - there).norm() < 5e-3 * (there - start).norm()
    torch.testing.assert_close(here, there, rtol=0, atol=1e-4)


def test_a_game_that_does_not_repeat_itself_is_noticed():
    saved = snapshot.snapshots(after(70, [0])[0])
    saved[0].tensors["rewards"][33] += 1
    with pytest.raises(UserError, match="did not repeat itself at step 33"):
        list(snapshot.restore(training([0]), saved))


@pytest.mark.slow
def test_a_whole_checkpoint_is_small_enough():
    config = preset_config("spr")
    fleet = assemble(config, make("kangaroo", 1), [0], CPU)
    assert sum(spec.bytes for spec in snapshot.specs(Training(fleet), 100_000, 9).values()) < 80e6


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    fleet, _ = after(70, [0])
    (whole,) = snapshot.snapshots(fleet)
    checkpoint.write(folder, whole)
    wanted = snapshot.specs(fleet, 70, len(whole.about["metrics"]))
    return lambda _: wanted, whole, checkpoint.path_of(folder, 70).read_bytes()


def read(folder, data, specs, step=70, name=None):
    (folder / (name or f"checkpoint-{step:010}.safetensors")).write_bytes(data)
    return checkpoint.read(folder, step, specs)


def test_what_is_written_is_read(good, tmp_path):
    specs, whole, data = good
    back = read(tmp_path, data, specs)
    assert back.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert back.about == whole.about | {"step": 70, "format": 2}
    assert load(data).keys() == whole.tensors.keys()  # any tool that reads safetensors opens it


def test_torn_files_are_recognised_wherever_they_end(good, tmp_path):
    specs, _, data = good
    for end in [0, 1, 20, 100, *range(2**16, len(data), 2**16), len(data) - 1]:
        with pytest.raises(UnusableError):
            read(tmp_path, data[:end], specs)
    with pytest.raises(UnusableError, match="does not end with them"):
        read(tmp_path, data + b"x", specs)


def test_flipped_bytes_are_recognised(good, tmp_path):
    specs, _, data = good
    places = random.Random(0).sample(range(len(data)), 40)
    for place in [0, 16, 40, 300, *places]:
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        with pytest.raises((UnusableError, UserError)):
            read(tmp_path, bytes(flipped), specs)


def as_in_0_7(whole):
    """What version 0.7 wrote: safetensors behind two lines, under the names of then."""
    names = {"ema": "averaged", "target": "copied", "metrics": "watched", "metrics_updates": "watched_updates"}
    tensors, about = ({names.get(k, k): v for k, v in part.items()} for part in (whole.tensors, whole.about))
    payload = save(tensors, {"about": json.dumps(about | {"step": whole.step})})
    says = {"format": 1, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    return b"SPR checkpoint\n" + json.dumps(says).encode() + b"\n" + payload


def test_a_checkpoint_of_0_7_is_read_and_verified(good, tmp_path):
    specs, whole, _ = good
    old, name = as_in_0_7(whole), "checkpoint-0000000070.spr"
    back = read(tmp_path, old, specs, name=name)
    assert back.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in whole.tensors.items())
    assert back.about == whole.about | {"step": 70}
    assert checkpoint.steps_of(tmp_path) == [70]
    for place in (3, 40, len(old) // 2, len(old) - 1):
        flipped = bytearray(old)
        flipped[place] ^= 0x10
        with pytest.raises(UnusableError):
            read(tmp_path, bytes(flipped), specs, name=name)
    checkpoint.write(tmp_path, whole)  # the same step, by this version
    checkpoint.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def forged(tensors, about="{}", **more):
    """A file whose checksum is right: what a clever forger would write."""
    data = save(tensors, {"about": about, **more})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["sha256"] = checkpoint._checksum(header, data[8 + length :])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


class Bomb:
    def __reduce__(self):
        return (os._exit, (66,))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle.dumps(Bomb()), "damaged"),
        (b"", "damaged"),
        (b"\x02" + b"\0" * 7 + b"[]", "damaged"),
        (forged({"weights": torch.zeros(3)}), "not what this run's configuration asks for"),
        (forged({"weights": torch.zeros(3)}, about="[]"), "damaged"),
        (save({"weights": torch.zeros(3)}), "damaged"),
        ((2**62).to_bytes(8, "little") + b"{}", "damaged"),
    ],
)
def test_hostile_files_are_refused_without_running_them(good, tmp_path, data, reason):
    with pytest.raises(UnusableError, match=reason):
        read(tmp_path, data, good[0])


def test_absurd_shapes_take_no_memory(good, tmp_path):
    specs, _, _ = good
    header = {name: {"dtype": "F32", "shape": [10**9, 10**6], "data_offsets": [0, 0]} for name in specs({})}
    header["__metadata__"] = {"about": json.dumps({"step": 70})}
    text = json.dumps(header).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnusableError, match="not what this run's configuration asks for"):
        read(tmp_path, len(text).to_bytes(8, "little") + text, specs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_newer_format_is_refused_in_one_line(good, tmp_path):
    newer = forged({"weights": torch.zeros(3)}, about=json.dumps({"format": 3, "step": 70}))
    with pytest.raises(UnusableError, match=r"format 3, which a newer version of spr wrote"):
        read(tmp_path, newer, good[0])


def test_the_last_two_are_kept(tmp_path):
    for step in (10, 20, 30):
        checkpoint.write(tmp_path, Checkpoint(step, {"x": torch.full((2,), step)}, {}))
    assert checkpoint.steps_of(tmp_path) == [30, 20]
    os.utime(checkpoint.path_of(tmp_path, 30), (0, 0))  # a clock that went backwards changes nothing
    assert checkpoint.steps_of(tmp_path) == [30, 20]
    back = checkpoint.read(tmp_path, 20, lambda _: {"x": Spec((2,), torch.int64)})
    assert back.tensors["x"].tolist() == [20, 20]
    checkpoint.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def full_disk(folder, limit):
    """A process that may write no file larger than the limit, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoint.write(folder, Checkpoint(10, {"x": torch.zeros(10)}, {}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoint.write(folder, Checkpoint(20, {"x": torch.zeros(10**6)}, {}))
    except StorageFault as error:
        (folder / "said").write_text(str(error))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    process = CONTEXT.Process(target=full_disk, args=(tmp_path, 2**16))
    process.start()
    process.join(60)
    assert "File too large" in (tmp_path / "said").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0000000010.safetensors", "said"]
    assert checkpoint.read(tmp_path, 10, lambda _: {"x": Spec((10,), torch.float32)}).step == 10


def test_a_folder_that_can_not_be_written_to_is_named(tmp_path):
    nowhere = tmp_path / "gone"
    with pytest.raises(StorageFault, match=r"can't write a checkpoint to .*gone: No such file or directory"):
        checkpoint.write(nowhere, Checkpoint(10, {"x": torch.zeros(10)}, {}))


# Processes that start at once, because they are forked from one that has imported everything.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["spr.cli"])


def command(arguments, out):
    """Run the command line in a process of its own."""
    with Path(out).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        checkpoint.remove = lambda _: None  # what a run ends with is looked at
        sys.exit(main(arguments))


def start(arguments, out):
    process = CONTEXT.Process(target=command, args=(arguments, str(out)))
    process.start()
    return process


def arguments(game, seeds, out, steps):
    changes = as_options(TINY | {"evaluation.episodes": 2})
    often = ["--steps", str(steps), "--checkpoint-every", "5", "--device", "cpu"]
    return ["train", game, "--seeds", *map(str, seeds), *changes, *often, "--out", str(out)]


def filling_disk(arguments, out, folder):
    """Run the command line; as soon as a first checkpoint is there, no file may grow any more."""

    def fill():
        while not checkpoint.steps_of(folder):
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    threading.Thread(target=fill, daemon=True).start()
    command(arguments, out)


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_ends_with_a_line_and_goes_on_when_there_is_room(tmp_path):
    folder = run_files.folder(tmp_path / "runs", "spr", "catch", 0)
    asked = arguments("catch", [0], tmp_path / "runs", 90)
    process = CONTEXT.Process(target=filling_disk, args=(asked, tmp_path / "said", folder))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    line = (tmp_path / "said").read_text().splitlines()[-1]
    good = checkpoint.steps_of(folder)
    assert f"File too large; saved after step {good[0]}: --resume continues from there" in line
    assert not list(folder.glob("*.part"))
    process = start([*asked, "--resume"], tmp_path / "said")
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "said").read_text()


def obey_modes():
    """Let a folder's mode bind this process even if it is root's: give up the right to pass it over."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this process
    assert libc.capget(header, rights) == 0
    rights[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE, of those in effect
    assert libc.capset(header, rights) == 0


def bound(arguments, out):
    obey_modes()
    command(arguments, out)


def test_a_read_only_folder_is_refused_in_one_line(tmp_path):
    out, said = tmp_path / "out", tmp_path / "said"
    out.mkdir(mode=0o555)
    process = CONTEXT.Process(target=bound, args=(arguments("catch", [0], out / "runs", 90), str(said)))
    process.start()
    process.join(120)
    assert process.exitcode == 2, said.read_text()
    assert said.read_text() == f"spr: can't write to {out}/runs/spr/catch/seed-0: Permission denied\n"
    assert list(out.iterdir()) == []


def bound_saving(folder, said):
    obey_modes()
    try:
        checkpoint.write(folder, Checkpoint(20, {"x": torch.zeros(10)}, {}))
    except StorageFault as error:
        Path(said).write_text(str(error))


def test_a_folder_that_became_read_only_keeps_its_last_good_one(tmp_path):
    folder, said = tmp_path / "run", tmp_path / "said"
    folder.mkdir()
    checkpoint.write(folder, Checkpoint(10, {"x": torch.zeros(10)}, {}))
    folder.chmod(0o555)
    process = CONTEXT.Process(target=bound_saving, args=(folder, said))
    process.start()
    process.join(60)
    assert "Permission denied" in said.read_text()
    assert [path.name for path in folder.iterdir()] == ["checkpoint-0000000010.safetensors"]
    assert checkpoint.read(folder, 10, lambda _: {"x": Spec((10,), torch.float32)}).step == 10


@pytest.mark.slow
@pytest.mark.parametrize(("game", "seeds"), [("catch", [0]), ("ms_pacman", [0]), ("catch", [0, 1, 2])])
def test_a_run_killed_again_and_again_ends_like_one_that_was_not(game, seeds, tmp_path):
    steps = 90 + 10 * KILLS
    whole = start(arguments(game, seeds, tmp_path / "whole", steps), tmp_path / "whole.txt")
    whole.join(900)
    assert whole.exitcode == 0, (tmp_path / "whole.txt").read_text()
    rng = random.Random(len(seeds))
    log = tmp_path / "killed.txt"
    folder = run_files.folder(tmp_path / "killed", "spr", game, seeds[0])
    # Once before it has done anything, then while it trains, at random moments around random steps.
    for target in [0, *sorted(rng.sample(range(5, steps - 5), KILLS - 1))]:
        process = start([*arguments(game, seeds, tmp_path / "killed", steps), "--resume"], log)
        while (metrics_files.last_step(folder) or 0) < target and process.is_alive():
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        assert process.is_alive(), f"it came to its end, or to an error, before step {target}: {log.read_text()}"
        process.kill()
        process.join()
    last = start([*arguments(game, seeds, tmp_path / "killed", steps), "--resume"], log)
    last.join(900)
    assert last.exitcode == 0, log.read_text()
    for seed in seeds:
        one, two = (run_files.folder(tmp_path / where, "spr", game, seed) for where in ("whole", "killed"))
        episodes = ["episodes.jsonl"] if game == "catch" else []  # no game of ms_pacman ends so soon
        for name in ("agent.safetensors", "metrics.jsonl", *episodes, "config.json"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
        last, like = (load(checkpoint.path_of(f, steps).read_bytes()) for f in (one, two))
        assert last.keys() == like.keys() >= {"priority", "generator", "first_moment"}
        assert all(torch.equal(last[name], like[name]) for name in last)
        results = [json.loads((folder / "result.json").read_text()) for folder in (one, two)]
        assert results[0]["episodes"] == results[1]["episodes"]


@pytest.mark.slow
def test_the_one_before_is_used_when_the_last_is_damaged(tmp_path, capsys, monkeypatch):
    order = arguments("catch", [0], tmp_path, 80)
    wrote = []
    monkeypatch.setattr(checkpoint, "remove", wrote.append)  # keep them after the end
    assert main(order) == 0
    folder = run_files.folder(tmp_path, "spr", "catch", 0)
    weights, metrics = (folder / "agent.safetensors").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    last, before = checkpoint.steps_of(folder)
    assert (last, before) == (80, 75)
    damaged = bytearray(checkpoint.path_of(folder, last).read_bytes())
    damaged[-5] ^= 1
    checkpoint.path_of(folder, last).write_bytes(damaged)
    (folder / "result.json").unlink()
    capsys.readouterr()
    assert main([*order, "--resume"]) == 0
    said = capsys.readouterr().out
    # The terminal's width may break it anywhere: before it stands a path.
    said = "".join(said.split())
    assert (
        "checkpoint-0000000080.safetensors can't be used: its checksum does not match its content".replace(" ", "")
        in said
    )
    assert (folder / "agent.safetensors").read_bytes() == weights
    assert (folder / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_what_a_first_learning_step_compiles_is_told_before_it_and_once(tmp_path, monkeypatch):
    """To whoever watches a GPU; here the moments at which it is told, on a CPU that says it is one."""
    monkeypatch.setattr(job_runner, "_compiles", lambda _: True)
    monkeypatch.setattr(checkpoint, "remove", lambda _: None)
    config = CONFIG.override({"evaluation.episodes": 1, "schedule.steps": 80})
    job = make_job(tmp_path, config=config, every=5)

    def told(**how):
        seen = []
        assert carry_out(job, seen.append, **how) == 0
        steps = [event for event in seen if isinstance(event, events.Compiling | events.Stepped)]
        return [after.info.step - 1 for event, after in pairwise(steps) if isinstance(event, events.Compiling)]

    assert told() == [TINY["schedule.learning_starts"]]
    (job.request.folder(job.request.members[0]) / "result.json").unlink()
    checkpoint.path_of(job.request.folder(job.request.members[0]), 80).unlink()
    assert told(resume=True) == [75]


@pytest.mark.slow
def test_a_wish_to_stop_interrupts_an_evaluation_and_a_replay_at_once(tmp_path):
    config = CONFIG.override({"evaluation.episodes": 3, "schedule.steps": 80})
    job = make_job(tmp_path, config=config, every=5)
    for kind, how in ((events.Evaluated, {}), (events.Replaying, {"resume": True})):
        seen = []

        def stop(seen=seen, kind=kind):
            return any(isinstance(event, kind) for event in seen)

        with pytest.raises(KeyboardInterrupt):
            carry_out(job, seen.append, stop, **how)
        assert not run_files.finished(job.request.folder(job.request.members[0]))
    assert carry_out(job, seen.append, resume=True) == 0
    assert run_files.finished(job.request.folder(job.request.members[0]))


def test_a_fleet_killed_while_its_first_checkpoints_are_written_stays_together(tmp_path):
    """Runs with a checkpoint each, and one that has none yet; a new seed beside them is another fleet."""
    order = make_job(tmp_path, (0, 1, 2), every=5, resume=True)

    members = [Member("catch", seed) for seed in range(4)]

    def leave(member, *steps):
        folder = order.request.folder(member)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        for step in steps:
            checkpoint.path_of(folder, step).write_bytes(b"")

    def fleets(*which):
        return [
            [member.seed for member in fleet]
            for fleet in JobRunner(order, list, bool)._fleets([members[i] for i in which])
        ]

    leave(members[0], 5)
    leave(members[1], 5)
    assert fleets(0, 1, 2) == [[2], [0, 1]]
    leave(members[2])
    assert fleets(0, 1, 2) == [[0, 1, 2]]
    leave(members[3], 10, 15)
    assert fleets(0, 1, 2, 3) == [[2], [0, 1], [3]]
    assert fleets() == []


@pytest.mark.slow
def test_an_agent_of_an_unfinished_run_says_so_wherever_it_is_evaluated(tmp_path, capsys):
    order = arguments("catch", [0], tmp_path, 70)
    assert main(order) == 0
    folder, exported = run_files.folder(tmp_path, "spr", "catch", 0), tmp_path / "agent.safetensors"
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["trained_steps"], told["steps"]) == (70, 70)
    run, weights = run_folder.load_run(folder)
    run_folder.save_agent(run, weights, 65)
    (folder / "result.json").unlink()
    assert main(["export", str(folder), str(exported)]) == 0
    for path in (folder, exported):
        assert main(["evaluate", str(path)]) == 0
        assert "an unfinished run: this agent has learnt for 65 of 70 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_on_one_run_and_other_settings_are_refused(tmp_path, capsys):
    order = arguments("catch", [0], tmp_path, 70)
    with run_files.locked([run_files.folder(tmp_path, "spr", "catch", 0)]):
        other = start(order, tmp_path / "other.txt")
        other.join(60)
        assert other.exitcode == 2
        said = (tmp_path / "other.txt").read_text()
        assert f"seed-0 is being worked on by process {os.getpid()} on {socket.gethostname()}, since 2" in said
        assert said.count("\n") == 1
    assert main(order) == 0
    folder = run_files.folder(tmp_path, "spr", "catch", 0)
    with run_files.locked([folder]):
        capsys.readouterr()
        assert main(order) == 2
        assert "seed-0 is being worked on by process" in capsys.readouterr().err
    (folder / "result.json").unlink()
    assert main([*order, "--resume", "--set", "learner.learning_rate=0.5"]) == 2
    assert "holds an unfinished run with learner.learning_rate" in capsys.readouterr().err
    assert main([*order, "--resume", "--overwrite"]) == 2
    assert (folder / "agent.safetensors").exists()


class Dream(gymnasium.Env):
    """Noise that is never twice the same, in games of 17 steps: nothing to play again."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.left = 17
        return self.image(), {}

    def image(self):
        return np.frombuffer(os.urandom(84 * 84), np.uint8).reshape(84, 84)

    def step(self, _):
        self.left -= 1
        return self.image(), float(self.left), self.left == 0, False, {}


COLOUR = {"observation.height": 64, "observation.width": 60, "observation.channels": 3, "observation.stack": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "seen"), [(200, {}), (75, {}), (75, COLOUR)])
def test_an_environment_that_can_not_be_played_again_keeps_its_memory_and_begins_a_new_game(capacity, seen):
    gymnasium.register("Dream-v0", Dream)
    config = CONFIG.override({"replay.capacity": capacity, "replay.n_step": 3} | seen)
    cut, _ = after(80, (0, 1), config, "Dream-v0")
    saved = snapshot.snapshots(cut)
    resumed = training((0, 1), config, "Dream-v0")
    list(snapshot.restore(resumed, saved))
    assert resumed.restarts == [80]
    old, new = cut.fleet.replay, resumed.fleet.replay
    new.check()
    for name in ("frames", "actions", "rewards", "is_first", "priority"):
        assert torch.equal(getattr(old, name), getattr(new, name)), name
    last = 79 % new.capacity
    assert new.truncated[:, last].all()  # as after a time limit: no sequence crosses this place
    assert torch.equal(old.truncated[:, :last], new.truncated[:, :last])
    steps = [info.step for info in resumed.run()]
    assert steps == list(range(81, 91))
    crossing = [(79 - i) % new.capacity for i in range(3)]
    assert not new.priority[:, crossing].any()
    assert snapshot.snapshots(resumed)[0].about["restarts"] == [80]


def poisoned(monkeypatch, agent, when):
    """Let one agent's update fail: one of its weights becomes infinite just before its numbers are used."""
    compute = Learner.gradients_and_priorities
    made = []

    def failing(self, state, *rest):
        made.append(1)
        if len(made) == when:
            state.weights[agent, 100] = torch.inf
        return compute(self, state, *rest)

    monkeypatch.setattr(Learner, "gradients_and_priorities", failing)


def update_again(training, saved):
    """Do the update by which an agent diverged, of a fleet of one, and return its metrics."""
    list(snapshot.restore(training, [saved]))
    fleet = training.fleet
    raw = RawNumbers(*(saved.tensors[f"raw_{name}"][None] for name in RawNumbers._fields))
    rates = training.update.rates
    fill(rates, fleet.config, saved.step - 1, 0)
    return fleet.learner.update(fleet.state, fleet.replay, fleet.rng, raw, rates)


@pytest.mark.slow
def test_divergence_stops_one_agent_and_its_update_can_be_reproduced(monkeypatch):
    whole, rows = after(90, (0, 1, 2))
    with monkeypatch.context() as patch:
        poisoned(patch, agent=1, when=20)  # the second update after step 69
        fleet = training((0, 1, 2))
        ticks = list(fleet.run())
    assert [(info.step, info.diverged) for info in ticks if info.diverged] == [(71, [1])]
    assert fleet.diverged == {1: 70}
    for healthy in (0, 2):
        assert torch.equal(fleet.fleet.state.weights[healthy], whole.fleet.state.weights[healthy])
        assert torch.equal(fleet.fleet.replay.priority[healthy], whole.fleet.replay.priority[healthy])
        assert [info.rows and info.rows[healthy] for info in ticks] == [row and row[healthy] for row in rows]
    assert fleet.fleet.state.weights[1].isinf().sum() == 1  # as it was before the update that failed

    saved = snapshot.diverged_update(fleet, 1)
    again = training([1])
    assert not update_again(again, saved)["loss"].isfinite().all()
    assert again.fleet.state.diverged.tolist() == [True]
    saved.tensors["weights"][100] = 0  # without the cause it does not diverge, so it was the cause
    assert update_again(training([1]), saved)["loss"].isfinite().all()


@pytest.mark.slow
def test_a_diverged_run_has_no_score_and_the_others_have_theirs(tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, agent=0, when=5)
    assert main(arguments("catch", [0, 1], tmp_path, 80)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "seed 0 diverged: a loss or gradient was not finite in the updates after step 63" in said
    bad, good = (run_files.folder(tmp_path, "spr", "catch", seed) for seed in (0, 1))
    assert {path.name for path in bad.iterdir()} >= {"diverged.json", "diverged.safetensors"}
    assert not (bad / "result.json").exists()
    assert not (bad / "agent.safetensors").exists()
    assert "NaN" not in (bad / "metrics.jsonl").read_text()
    assert json.loads((good / "result.json").read_text())["episodes"]
    assert json.loads((bad / "diverged.json").read_text())["step"] == 63
    monkeypatch.undo()
    assert main([*arguments("catch", [0, 1], tmp_path, 80), "--resume"]) == 1
    assert "diverged (--overwrite starts again), skipped: catch, seed 0" in capsys.readouterr().out
