"""Faults of the world: each ends with a line, the right exit code and everything saved, and only what it concerns."""

import errno
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from conftest import CPU, HEARING, TINY, as_options, carry_out, make_job, wait_for

from spr.cli import main
from spr.common import atomic_files, file_locks, hardware
from spr.common.errors import StorageFault
from spr.config.presets import preset_config
from spr.envs.base import BrokenStep
from spr.envs.registry import make
from spr.experiments import events
from spr.experiments.job_runner import JobRunner
from spr.experiments.progress import StopRequest, Terminal
from spr.runs import metrics_files, run_files, run_folder
from spr.training import checkpoint

SMALL = TINY | {"evaluation.episodes": 2, "replay.n_step": 2}
OPTIONS = ["--steps", "80", "--checkpoint-every", "20", "--device", "cpu", *as_options(SMALL)]
WHEN = 66  # steps after which an environment does wrong


class Moody(gymnasium.Env):
    """Games of nine steps; those made with a wrong do it at their 66th step, or when they are judged."""

    observation_space = gymnasium.spaces.Box(0, 1, (24, 24), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    made = 0  # environments
    wrong, who, when = "", None, WHEN

    def __init__(self):
        self.number, self.steps = Moody.made, 0
        Moody.made += 1

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return self.image(), {}

    def image(self):
        return np.full((24, 24), self.time / 10, np.float32)

    def step(self, action):
        self.time += 1
        self.steps += 1
        image, reward = self.image(), float(action == self.time % 3)
        if Moody.wrong and self.steps == Moody.when and Moody.who in (None, self.number):
            image, reward = self.misbehave(image, reward)
        return image, reward, self.time == 9, False, {}

    def misbehave(self, image, reward):
        match Moody.wrong:
            case "exit":
                raise SystemExit(3)
            case "raise":
                raise ValueError("I am\nbroken")
            case "shape":
                return image[:20], reward
            case "nan":
                return image * np.nan, reward
            case "dtype":
                return np.full((24, 24), "x"), reward
            case "reward":
                return image, float("nan")
            case "huge":
                return image, 1e300
        raise AssertionError


SAID = {
    "exit": "called sys.exit(3) (",
    "raise": "raised ValueError: I am broken (",
    "shape": "gave an image of shape (20, 24), not (24, 24);",
    "nan": "gave an image with numbers that are not finite;",
    "dtype": "gave an image of <U1, not float32;",
    "reward": "gave a reward of nan, which no score can be made of;",
    "huge": "gave a reward of 1e+300, which no score can be made of;",
}


@pytest.fixture
def moody(monkeypatch):
    """The environment, which behaves until it is told not to."""
    for name, value in (("made", 0), ("wrong", ""), ("who", None), ("when", WHEN)):
        monkeypatch.setattr(Moody, name, value)
    if "Moody-v0" not in gymnasium.registry:
        gymnasium.register("Moody-v0", Moody, disable_env_checker=True, order_enforce=False)
    return Moody


def folder(out, seed, game="Moody-v0"):
    return run_files.folder(Path(out), "spr", game, seed)


def train(out, *more, game="Moody-v0", seeds=("0",)):
    return main(["train", game, "--seeds", *seeds, "--out", str(out), *OPTIONS, *more])


def job(out, seeds, game="catch", steps=80, **more):
    config = preset_config("spr").override(SMALL | {"schedule.steps": steps})
    return make_job(out, seeds, (game,), config=config, every=20, **more)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("wrong", SAID)
def test_an_environment_that_does_wrong_is_named_and_the_others_step_on(moody, wrong):
    envs = make("Moody-v0", 3, obs=preset_config("spr").override(TINY).observation)
    moody.wrong, moody.who, moody.when = wrong, 1, 2
    envs.reset([0, 1, 2])
    for step in range(1, 8):
        envs.send(np.full(3, step % 3))
        if step == 2:
            with pytest.raises(BrokenStep) as broken:
                envs.recv()
            (said,) = broken.value.faults.values()
            assert said.startswith(f"'Moody-v0' {SAID[wrong].removesuffix(';')}")
            assert "\n" not in said
            out = broken.value.out
            assert out.truncated.tolist() == [False, True, False]
        else:
            out = envs.recv()
        assert out.reward.tolist() == [1.0, 1.0 if step == 1 or (step == 2 and out.reward[1]) else 0.0, 1.0]
        assert (out.frame[[0, 2]] == round(25.5 * step)).all()
        assert not out.frame[1].any() or step == 1
        assert not out.game_over.any()
    moody.wrong = ""
    envs.restart([1], [0])
    envs.send(np.ones(3))
    assert (envs.recv().frame[1] > 0).all()  # it is in again


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["exit", "nan"])
def test_the_agent_of_a_faulty_environment_is_saved_and_the_others_are_as_if_nothing_were(
    moody, wrong, tmp_path, capsys
):
    assert train(tmp_path / "whole", seeds=("0", "1", "2")) == 0
    moody.wrong, moody.who = wrong, moody.made + 1
    assert train(tmp_path / "out", seeds=("0", "1", "2")) == 1
    out, err = capsys.readouterr()
    line = next(line for line in out.splitlines() if line.startswith("Moody-v0, seed 1: "))
    assert SAID[wrong] in line
    assert line.endswith(f"saved after step {WHEN}: --resume continues from there")
    assert err == ""
    assert "Traceback" not in out
    assert out.rstrip().splitlines()[-1] == f"no result: {line}"
    for seed in (0, 2):
        one, two = (folder(tmp_path / where, seed) for where in ("whole", "out"))
        for name in ("agent.safetensors", "metrics.jsonl", "episodes.jsonl"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
        scores = [json.loads((run / "result.json").read_text())["episodes"] for run in (one, two)]
        assert scores[0] == scores[1]
    bad = folder(tmp_path / "out", 1)
    assert checkpoint.steps_of(bad) == [WHEN, 60]
    assert [row["step"] for row in lines(bad / "metrics.jsonl")] == list(range(1, WHEN + 1))
    moody.wrong = ""
    assert train(tmp_path / "out", "--resume", seeds=("0", "1", "2")) == 0
    assert "finished already, skipped: Moody-v0, seeds 0 2" in capsys.readouterr().out
    assert json.loads((bad / "result.json").read_text())["new_games_after_steps"] == [WHEN]
    assert [row["step"] for row in lines(bad / "metrics.jsonl")] == list(range(1, 81))


@pytest.mark.slow
def test_an_environment_that_fails_at_once_leaves_the_others_their_results(moody, tmp_path, capsys):
    moody.wrong, moody.who, moody.when = "raise", 0, 1
    assert train(tmp_path, seeds=("0", "1")) == 1
    assert "Moody-v0, seed 0: 'Moody-v0' raised ValueError" in capsys.readouterr().out
    assert run_files.finished(folder(tmp_path, 1))
    moody.wrong = ""
    assert train(tmp_path, "--resume", seeds=("0", "1")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["exit", "shape"])
def test_an_environment_that_fails_when_it_is_judged_costs_one_result(moody, wrong, tmp_path, capsys, monkeypatch):
    """Of two agents; which of them meets it is decided here by the weights it is judged with."""
    play = JobRunner._play

    def playing(runner, trained):
        moody.wrong = wrong if any(run.seed == 1 for run in trained.runs) else ""
        moody.when = 3
        return play(runner, trained)

    monkeypatch.setattr(JobRunner, "_play", playing)
    assert train(tmp_path, seeds=("0", "1")) == 1
    said = capsys.readouterr()
    line = next(line for line in said.out.splitlines() if line.startswith("Moody-v0, seed 1: "))
    assert SAID[wrong] in line + ";"
    assert line.endswith("its agent is saved: --resume evaluates it again")
    assert said.err == ""
    assert run_files.finished(folder(tmp_path, 0))
    assert not run_files.finished(folder(tmp_path, 1))
    assert main(["evaluate", str(folder(tmp_path, 1))]) == 1
    said = capsys.readouterr().err
    assert SAID[wrong].removesuffix(";") in said
    assert said.count("\n") == 1
    monkeypatch.undo()
    moody.wrong = ""
    assert train(tmp_path, "--resume", seeds=("0", "1")) == 0
    assert run_files.finished(folder(tmp_path, 1))


def test_an_environment_that_exits_when_it_is_made_or_imported_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("leaves.py").write_text("import sys\nsys.exit(7)\n")
    Path("leaver.py").write_text("import sys\ndef env(): sys.exit(7)\n")
    for game, words in (("leaves:env", "can't be imported: SystemExit: 7"), ("leaver:env", "SystemExit in")):
        assert main(["train", game, "--out", "runs"]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert not Path("runs").exists()


def test_an_environment_that_can_not_be_closed_changes_nothing(moody, caplog, monkeypatch):
    envs = make("Moody-v0", 2)
    closed = []

    def close(self):
        closed.append(self)
        raise SystemExit("no")

    monkeypatch.setattr(moody, "close", close)
    envs.close()
    assert len(closed) == 2
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "closing it, 'Moody-v0' called sys.exit(no)"
    ] * 2


def full(monkeypatch, when, names):
    """Let a disk be full from a step on: files of these names can't grow any more."""
    append = metrics_files._append

    def appending(path, row):
        if path.name in names and row["step"] >= when:
            with atomic_files.writing(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        append(path, row)

    monkeypatch.setattr(metrics_files, "_append", appending)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "saved"), [("metrics.jsonl", 60), ("episodes.jsonl", 40)])
def test_a_disk_that_fills_while_lines_are_added_ends_the_run_with_a_line(name, saved, tmp_path, monkeypatch, capsys):
    assert train(tmp_path / "whole", game="catch") == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        full(patch, saved + 1, [name])
        assert train(tmp_path / "out", game="catch") == 1
    said = capsys.readouterr()
    run = folder(tmp_path / "out", 0, "catch")
    assert said.err == (
        f"spr: can't write to {run / name}: No space left on device; "
        f"saved after step {saved}: --resume continues from there\n"
    )
    assert train(tmp_path / "out", "--resume", game="catch") == 0
    for file in ("agent.safetensors", "metrics.jsonl", "episodes.jsonl"):
        assert (run / file).read_bytes() == (folder(tmp_path / "whole", 0, "catch") / file).read_bytes(), file


def test_a_line_that_finds_no_room_leaves_no_part_of_itself(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    metrics_files._append(path, {"step": 1})
    before = path.read_bytes()

    class Small:
        """A file on a disk with room for three more bytes."""

        def __init__(self, file):
            self.file, self.left = file, 3

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left = 0
            return self.file.write(data[:3])

        def __getattr__(self, name):
            return getattr(self.file, name)

    real = atomic_files.growing
    monkeypatch.setattr(atomic_files, "growing", lambda path: Small(real(path)))
    with pytest.raises(StorageFault, match=r"metrics.jsonl: No space left on device"):
        metrics_files._append(path, {"step": 2})
    monkeypatch.undo()
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("when", [events.Stepped, events.Evaluated])
def test_a_deleted_folder_ends_its_run_and_no_other(when, tmp_path):
    """It is not made again: whoever deleted it meant to."""
    mine, said, results = job(tmp_path, (0, 1)), [], []
    gone, other = (mine.request.folder(member) for member in mine.request.members)

    def on_event(event):
        if isinstance(event, when) and (when is events.Evaluated or event.info.step == 65):
            shutil.rmtree(gone, ignore_errors=True)
        events.write_metrics(event)
        said.extend([event.message] if isinstance(event, events.Failed) else [])
        results.extend([event.run.seed] if isinstance(event, events.Scored) else [])

    assert carry_out(mine, on_event) == 1
    assert said == [
        f"catch, seed 0: {gone} was deleted while it was worked on: nothing of it is left, and --resume begins it again"
    ]
    assert results == [1]
    assert run_files.finished(other)
    assert not gone.exists()
    assert carry_out(mine, events.write_metrics, resume=True) == 0
    assert run_files.finished(gone)


@pytest.mark.slow
def test_a_deleted_folder_of_all_runs_ends_the_command(tmp_path):
    mine, said = job(tmp_path / "out", (0, 1)), []

    def on_event(event):
        if isinstance(event, events.Stepped) and event.info.step == 65:
            shutil.rmtree(tmp_path / "out")
        events.write_metrics(event)
        said.extend([event.message] if isinstance(event, events.Failed) else [])

    assert carry_out(mine, on_event) == 1
    assert len(said) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_result_that_finds_no_room_is_made_by_resuming(tmp_path, monkeypatch):
    mine = job(tmp_path, (0,))

    write = run_folder._write_json

    def writing(path, data):
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_write_json", writing)
        with pytest.raises(StorageFault, match="No space left on device; its agent is saved: --resume evaluates it"):
            carry_out(mine, events.write_metrics)
    steps = []

    def on_event(event):
        steps.extend([event.info.step] if isinstance(event, events.Stepped) else [])

    assert carry_out(mine, on_event, resume=True) == 0
    assert steps == []


def test_one_that_failed_before_the_others_goes_on_alone(tmp_path):
    """All have a checkpoint in common: those who went on do not go back to it."""
    order = job(tmp_path, (0, 1, 2), resume=True)

    def leave(member, *steps):
        folder = order.request.folder(member)
        folder.mkdir(parents=True, exist_ok=True)
        for step in steps:
            checkpoint.path_of(folder, step).write_bytes(b"")

    def fleets():
        return [[m.seed for m in fleet] for fleet in JobRunner(order, list, bool)._fleets(order.request.members)]

    leave(order.request.members[0], 60, 66)
    leave(order.request.members[1], 60, 80)
    leave(order.request.members[2], 60, 80)
    assert fleets() == [[0], [1, 2]]
    leave(order.request.members[0], 80)  # killed while checkpoints were written
    checkpoint.path_of(order.request.folder(order.request.members[2]), 80).unlink()
    assert [[m.seed for m in fleet] for fleet in JobRunner(order, list, bool)._fleets(order.request.members)] == [
        [0, 1, 2]
    ]


@pytest.mark.slow
def test_what_a_kill_left_behind_is_removed_by_the_next_command(tmp_path):
    mine = job(tmp_path, (0,))
    (path,) = (mine.request.folder(member) for member in mine.request.members)
    assert carry_out(mine, events.write_metrics) == 0
    kept = {file: file.read_bytes() for file in path.iterdir()}
    lock = path.parent / f".{path.name}.lock"
    torn = (
        "metrics.jsonl.part",
        "result.json.0a1b2c3d.part",
        "agent.safetensors.ffffffff.part",
        "checkpoint-0000000080.safetensors",
    )
    for name in torn:
        (path / name).write_bytes(b"torn")
    lock.write_text("not JSON")
    (path / "mine.part").write_text("a stranger's")
    assert carry_out(mine, events.write_metrics, resume=True) == 0
    assert {file: file.read_bytes() for file in path.iterdir()} == kept | {path / "mine.part": b"a stranger's"}
    assert not lock.exists()


def test_who_holds_a_lock_is_named_and_nobody_is_held_up_by_a_file_alone(tmp_path):
    path = tmp_path / "lock"
    assert file_locks.holder(path) is None
    with file_locks.hold(path, runs=["a"]):
        who = file_locks.holder(path)
        assert who.about == {"runs": ["a"]}
        with pytest.raises(file_locks.HeldError, match=r"^process \d+ on .*, since 2\d\d\d-"), file_locks.hold(path):
            pass
    assert not path.exists()
    path.write_text("[")
    assert file_locks.holder(path) is None
    with file_locks.hold(path):
        assert file_locks.holder(path).process == who.process


def spr(*arguments, **how):
    """`spr` as a command of its own; with a limit, of a process that may not do all that it wants."""
    limit = how.pop("limit", None)

    def begin():
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [*HEARING, "-m", "spr", *map(str, arguments)]
    return subprocess.Popen(words, env=environment, text=True, preexec_fn=begin, **how)  # noqa: PLW1509


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_and_stops(tmp_path):
    """Its process gets SIGHUP, and can say nothing to anybody any more."""
    ours, theirs = pty.openpty()
    words = ("train", "catch", "--steps", "9000", "--device", "cpu", "--out", tmp_path, *as_options(SMALL))
    process = spr(*words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    run = folder(tmp_path, 0, "catch")
    wait_for((run / "metrics.jsonl").exists)
    os.close(ours)  # writing fails from here on
    process.send_signal(signal.SIGHUP)  # as the kernel does where the terminal is the process's own
    assert process.wait(60) == 130
    (step,) = checkpoint.steps_of(run)
    assert run_folder.load_run(run)[0].step == step
    assert not list(tmp_path.rglob(".*.lock"))


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_nothing(tmp_path):
    with Path("/dev/full").open("w") as full:  # a log on a full disk
        process = spr("train", "catch", "--out", tmp_path, *OPTIONS, stdout=full, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "")
    assert run_files.finished(folder(tmp_path, 0, "catch"))
    ours, theirs = os.pipe()
    os.close(ours)
    process = spr("presets", stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert process.communicate(timeout=60)[1] == ""


def test_a_console_that_can_not_be_written_to_falls_silent():
    with Path("/dev/full").open("w") as full:
        console = Terminal(file=full)
        console.print("lost")
        assert console.quiet
        console.print("not even tried")


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.check()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_the_run_with_a_line_and_it_goes_on_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    run = folder(disk, 0, "catch")
    words = ("train", "catch", "--seeds", "0", "--out", disk, *OPTIONS)
    try:
        process = spr(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(lambda: checkpoint.steps_of(run))
        with pytest.raises(OSError, match="No space left"):
            fill(disk / "filler")
        out, said = process.communicate(timeout=120)
        assert process.returncode == 1, out
        (step, *_) = checkpoint.steps_of(run)
        assert "No space left on device" in said
        assert said.endswith(f"saved after step {step}: --resume continues from there\n")
        assert said.count("\n") == 1
        for name in ("metrics.jsonl", "times.jsonl", "episodes.jsonl"):
            assert all("step" in row for row in lines(run / name)) if (run / name).exists() else True
        assert not list(run.glob("*.part"))
        (disk / "filler").unlink()
        process = spr(*words, "--resume", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def groups(root, files):
    """A file system of groups as the kernel shows it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return list(hardware._free_in_cgroups(root / "proc", root / "sys"))


def test_limits_of_groups_count_as_what_is_free(tmp_path):
    two = {
        "proc/self/cgroup": "0::/user/job",
        "sys/user/job/memory.max": 1000,
        "sys/user/job/memory.current": 400,
        "sys/user/job/memory.stat": "anon 1\ninactive_file 50",
        "sys/user/memory.max": "max",
        "sys/user/memory.current": 500,
        "sys/user/memory.stat": "anon 1",
        "sys/memory.stat": "anon 1",  # the root has no limit
    }
    assert groups(tmp_path / "two", two) == [650]
    one = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/seen/from/outside\n0::/",
        "sys/memory/memory.limit_in_bytes": 3000,
        "sys/memory/memory.usage_in_bytes": 2900,
        "sys/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 20",
    }
    assert groups(tmp_path / "one", one) == [120]
    assert groups(tmp_path / "none", {"x": ""}) == []


def test_no_more_is_free_than_limits_leave(monkeypatch):
    plenty = hardware.free_memory(CPU)
    monkeypatch.setattr(hardware, "_free_in_cgroups", lambda *_: iter([10**9, 5]))
    assert hardware.free_memory(CPU) == 5
    monkeypatch.setattr(hardware, "_free_in_cgroups", lambda *_: iter([-7]))
    assert hardware.free_memory(CPU) == 0
    monkeypatch.undo()
    taken = hardware._kilobytes(Path("/proc/self/status"))["VmSize"]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, before[1]))
    try:
        assert 0 < hardware.free_memory(CPU) < 2**28 + 2**20 < plenty
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
def test_a_fleet_that_does_not_fit_into_a_limit_is_refused_before_it_begins(tmp_path):
    process = spr(
        "train", "catch", "--out", tmp_path, "--device", "cpu",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=(resource.RLIMIT_AS, 2**30),
    )  # fmt: skip
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "one agent takes about" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OSError(5, "I/O error")],
)
def test_what_the_machine_can_not_do_is_said_in_a_line(error, tmp_path, monkeypatch, capsys):
    def training(*_, **__):
        raise error

    monkeypatch.setattr("spr.cli.JobRunner.run", training)
    assert train(tmp_path, game="catch") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith("; --resume continues from the last checkpoint\n")
    monkeypatch.setattr("spr.cli.JobRunner.run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what is ours is not hidden
        train(tmp_path, game="catch")
