"""A sweep's plan, costs and overview; engines that fail, stop, lose workers and still end with the same bytes."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CPU, HEARING, ROOT, TINY, make_job, wait_for
from rich.console import Console

from spr.cli import main
from spr.common.errors import UserError
from spr.config.config import parse_override
from spr.config.presets import preset_config
from spr.experiments import ray_engine
from spr.experiments.sweep import claimed, local
from spr.experiments.sweep_overview import JobEvent, Overview, outcome
from spr.experiments.sweep_plan import CostModel, plan, unfinished
from spr.experiments.train_request import TrainJob
from spr.runs import run_files
from spr.training.fleet import largest_fleet

SMALL = tuple(f"{name}={value}" for name, value in (TINY | {"schedule.steps": 150, "evaluation.episodes": 3}).items())
CHANGES = [part for text in SMALL for part in ("--set", text)]


def job(out, preset="spr", games=("catch",), seeds=(0,), changes=SMALL, **more):
    """A small fleet's job."""
    config = preset_config(preset).override(dict(map(parse_override, changes)))
    return make_job(out, seeds, games, preset, config, **more)


def divided(out, presets, games, seeds, largest, together=1):
    """The plan of a small sweep."""
    return plan(presets, job(out, presets[0], games, seeds), largest, together)


def spr(*arguments):
    """`spr` with one thread, as a command of its own."""
    return subprocess.Popen(
        [*HEARING, "-m", "spr", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trainings(out):
    """The processes that train into a folder, by the folders of their runs: (process, its parent)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if "train" in words and str(out) in words:
                preset, seed = (words[words.index(option) + 1] for option in ("--preset", "--seeds"))
                folder = run_files.folder(out, preset, "catch", int(seed))
                found[folder] = int(path.name), parent(path.name)
        except OSError:
            continue  # gone meanwhile
    return found


def parent(process):
    return int(Path(f"/proc/{process}/status").read_text().split("PPid:")[1].split()[0])


def parents(process):
    """A process's parent, its parent's, and so on."""
    found = []
    while process > 1:
        found.append(process := parent(process))
    return found


def descendants(process):
    """What a process has started, with all that they have."""
    everything = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = []
    for other in everything:
        with contextlib.suppress(OSError):  # gone meanwhile
            if process in parents(other):
                found.append(other)
    return found


def results(out):
    """What has to be equal between two sweeps: everything but times."""
    found = {}
    for path in sorted(Path(out).rglob("result.json")):
        name = str(path.parent.relative_to(out))
        result = json.loads(path.read_text())
        found[name] = [
            (path.parent / "agent.safetensors").read_bytes(),
            (path.parent / "metrics.jsonl").read_bytes(),
            # The checksum is over times too.
            {key: value for key, value in result.items() if not key.endswith("seconds") and key != "sha256"},
        ]
    return found


def assert_equal_results(one, two, count):
    first, second = results(one), results(two)
    assert len(first) == count
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == second[name], name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep of two fleets, never disturbed."""
    out = tmp_path_factory.mktemp("whole")
    command = spr("sweep", "--games", "catch", "--runs", 2, "--agents", 1, "--out", out,
                  "--checkpoint-every", 25, *CHANGES)  # fmt: skip
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 0, said
    return out, said


def test_games_and_seeds_are_divided_evenly_into_fleets_that_fit(tmp_path):
    made = divided(tmp_path, ["spr", "der"], ["catch", "pong", "breakout"], range(5), 4)
    assert [str(job.request) for job in made[:5]] == [
        "spr on catch, seeds 0-2",  # a fleet of its own: only games of Atari share one
        "spr on catch, seeds 3 4",
        "spr on pong, breakout, seeds 0 1",
        "spr on pong, breakout, seeds 2 3",
        "spr on pong, breakout, seed 4",
    ]
    everyone = [(job.request.preset, *member) for job in made for member in job.request.members]
    assert len(set(everyone)) == len(everyone) == 30
    assert max(len(job.request.members) for job in made) == 4


def test_more_games_than_fit_are_several_fleets(tmp_path):
    games = ["pong", "breakout", "alien", "qbert", "hero"]
    made = divided(tmp_path, ["spr"], games, range(2), 2)
    assert [job.request.games for job in made] == [("pong", "breakout")] * 2 + [("alien", "qbert")] * 2 + [("hero",)]
    assert [job.request.seeds for job in made] == [(0,), (1,), (0,), (1,), (0, 1)]
    assert made[0] != made[1]
    logs = {job.log_file() for job in made}
    assert len(logs) == 5


def test_the_next_fleet_trains_while_one_is_judged(tmp_path, monkeypatch):
    """On a GPU: what is evaluated there needs the CPU only."""
    jobs = [replace(job(tmp_path, seeds=(seed,)), device=torch.device("cuda"), precision="bf16") for seed in range(3)]
    shares = {jobs[0]: 0.5, jobs[1]: 0.5, jobs[2]: 0.5}
    ends = dict.fromkeys(jobs)

    class Fake:
        def __init__(self, arguments, *_):
            self.job = next(
                job for job in jobs if str(job.request.seeds[0]) == arguments[arguments.index("--seeds") + 1]
            )

        def ended(self):
            return ends[self.job]

        def event(self, job):
            return JobEvent(job, "done")

        def kill(self):
            pass

    free = [2**40]
    monkeypatch.setattr("spr.experiments.sweep.free_memory", lambda _: free[0])
    monkeypatch.setattr("spr.experiments.sweep.Command", Fake)
    monkeypatch.setattr("spr.experiments.sweep._LOOK", 0)
    monkeypatch.setattr(TrainJob, "steps_done", lambda mine: shares[mine])
    never = type("Never", (), {"check": lambda _: False})()
    events = local(1)(jobs, never)
    assert next(events) == JobEvent(jobs[0], "running")
    assert [next(events) for _ in range(3)] == [None] * 3  # one trains at a time
    shares[jobs[0]], free[0] = 1, 0
    assert [next(events) for _ in range(3)] == [None] * 3  # until the memory of the first is free
    free[0] = 2**40
    assert [event for event in (next(events) for _ in range(3)) if event] == [JobEvent(jobs[1], "running")]
    shares[jobs[1]] = 1
    assert [next(events) for _ in range(3)] == [None] * 3  # and one is judged
    ends[jobs[0]] = 0
    assert [event for event in (next(events) for _ in range(4)) if event] == [
        JobEvent(jobs[0], "done"),
        JobEvent(jobs[2], "running"),
    ]


def test_no_more_agents_than_memory(monkeypatch, tmp_path):
    config = job(tmp_path).request.config("catch")
    one = 2**30 * 2
    monkeypatch.setattr("spr.training.fleet.free_memory", lambda _: one)
    monkeypatch.setattr("spr.training.fleet.fleet_memory", lambda _c, agents, _d: agents * 600 * 2**20)
    assert largest_fleet(config, CPU, 1) == 3
    for together, sizes in ((1, [3, 3, 2, 2]), (2, [1] * 10), (None, [10])):  # a cluster's nodes are not this machine
        made = divided(tmp_path, ["spr"], ["catch"], range(10), 10, together)
        assert [len(job.request.seeds) for job in made] == sizes
    monkeypatch.setattr("spr.training.fleet.fleet_memory", lambda _c, agents, _d: agents * 2**40)
    with pytest.raises(UserError, match="one agent takes about 1024"):
        largest_fleet(config, CPU, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--games", "catch", "--presets", "sprr"], "unknown preset 'sprr'"),
        (["--games", "pongg"], "pongg"),
        (["--games", "catch", "catch"], "given twice"),
        (["--games", "catch", "--presets", "spr", "spr"], "given twice"),
        (["--games", "catch", "--set", "learner.dept=3"], "learner.dept"),
        (["--games", "catch", "--runs", "0"], "--runs takes a number of at least 1"),
        (["--games", "catch", "--runs", "2", "--seeds", "0"], "both say which seeds"),
        (["--games", "catch", "--together", "0"], "--together"),
        (["--games", "catch", "--engine", "slurm"], "slurm"),
        (["--games", "catch", "--engine", "ray", "--device", "tpu"], "unknown device 'tpu'"),
        ([], "--games"),
    ],
)
def test_bad_sweeps_are_refused_in_one_line_before_anything_is_written(arguments, complaint, tmp_path, capsys):
    assert main(["sweep", "--out", str(tmp_path / "runs"), *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def finished(out, preset, game, seed, **more):
    folder = run_files.folder(Path(out), preset, game, seed)
    folder.mkdir(parents=True)
    result = {
        "preset": preset,
        "game": game,
        "seed": seed,
        "score": 5.0,
        "precision": "fp32",
        "device": "cpu, 2 threads",
        "steps": 100,
        "train_seconds": 20.0,
        "eval_seconds": 8.0,
        "protocol": {},
        "version": "0",
    }
    result |= {"config": job(out, preset, (game,)).request.config(game).to_dict()}
    (folder / "result.json").write_text(json.dumps(result | {"agents_together": 2, "episodes": [5.0] * 50} | more))


def test_costs_follow_what_finished_runs_took(tmp_path, monkeypatch):
    monkeypatch.setattr("spr.experiments.sweep_plan.device_name", lambda _: "cpu, 2 threads")
    jobs = [job(tmp_path, seeds=seeds) for seeds in ((0, 1), (2, 3))]
    monkeypatch.setattr("spr.experiments.sweep_plan.reference_table", lambda _: ())
    assert CostModel(jobs, CPU).cost(jobs[1]).seconds is None
    finished(tmp_path, "spr", "catch", 0)
    finished(tmp_path, "spr", "catch", 1, device="another")  # takes no part
    # 0.2 s per step of two agents, 150 steps; 8 s for two agents' 50 games: 8 s per agent's 100, of which 3 are played.
    assert CostModel(jobs, CPU).cost(jobs[1]).seconds == pytest.approx(30 + 2 * 8 * 0.03)
    assert CostModel(jobs, CPU).cost(job(tmp_path, seeds=(2, 3, 4, 5))).seconds == pytest.approx(60 + 0.96)
    assert unfinished(jobs) == [jobs[1]]
    assert unfinished([job(tmp_path, seeds=(1, 2))]) == [job(tmp_path, seeds=(2,))]


def test_a_known_gpus_rates_are_used_before_anything_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr("spr.experiments.sweep_plan.device_name", lambda _: "NVIDIA H200")
    model = CostModel([], CPU)

    def cost(preset, seeds):
        return model.cost(job(tmp_path, preset, ("pong",), seeds, changes=())).seconds

    assert cost("spr", range(10)) == pytest.approx(419.7 + 95)
    assert cost("spr", (0, 1)) == pytest.approx(100 * (1.795 + (2.552 - 1.795) / 3) + 19)
    assert cost("spr", range(128)) == pytest.approx(1900.6 * 2 + 1216)
    # DER makes one update per step where SPR makes two; rows of a preset's own come first.
    assert cost("der", (0,)) == pytest.approx(179.5 / 2 + 9.5)
    assert cost("bbf", (0,)) == pytest.approx(833.0 + 147)


@pytest.mark.slow
def test_the_dry_run_writes_nothing(tmp_path, capsys):
    out = tmp_path / "runs"
    assert main(["sweep", "--games", "all", "--presets", "spr", "rainbow", "--out", str(out), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "520 runs" in said
    assert not out.exists()


def test_what_is_expected_of_a_cpu_does_not_depend_on_its_threads(tmp_path):
    before = torch.get_num_threads()
    costs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        costs.append(CostModel([], CPU).cost(job(tmp_path)).seconds)
    torch.set_num_threads(before)
    assert costs[0] == costs[1] is not None


def test_the_overview_counts_and_foretells(tmp_path):
    jobs = [job(tmp_path, seeds=(seed,)) for seed in range(4)]
    console = Console(file=(tmp_path / "said").open("w"), width=200)
    costs = [type("C", (), {"seconds": 10.0})() for _ in jobs]
    view = Overview(console, jobs, costs)
    assert view.line() == "0 done, 0 running, 4 waiting, 0 failed, about 0:00:40 left"
    view.show(JobEvent(jobs[0], "running"))
    view.show(JobEvent(jobs[1], "running"))
    assert view.line() in (f"0 done, 2 running, 2 waiting, 0 failed, about 0:00:{s} left" for s in (19, 20))
    view._began = dict.fromkeys(view._began, time.monotonic() - 1_000)
    view._cost = dict.fromkeys(view._cost, 0.0)
    assert view.line() == "0 done, 2 running, 2 waiting, 0 failed, longer than expected"  # nobody promises 0:00:00
    view.show(JobEvent(jobs[1], "failed", "a reason"))
    assert view.line().startswith("0 done, 1 running, 2 waiting, 1 failed")
    console.file.flush()
    assert "failed: spr on catch, seed 1: a reason; 0 done" in (tmp_path / "said").read_text()


def test_the_last_table_says_what_is_missing(tmp_path):
    jobs = [job(tmp_path, preset, seeds=(0, 1)) for preset in ("spr", "der")]
    finished(tmp_path, "spr", "catch", 0)
    console = Console(file=(tmp_path / "said").open("w"), width=100)
    console.print(outcome(jobs))
    console.file.flush()
    assert "5.00 (1 of 2)  - (0 of 2)" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_a_failed_fleet_is_listed_and_does_not_stop_the_others(whole, tmp_path):
    """One of the folders holds half a run: that fleet fails, the other is trained."""
    taken = run_files.folder(tmp_path, "spr", "catch", 0)
    taken.mkdir(parents=True)
    (taken / "checkpoint-0000000050.safetensors").write_text("mine")
    command = spr("sweep", "--games", "catch", "--runs", 2, "--agents", 1, "--out", tmp_path, *CHANGES)
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 1, said
    assert "failed: spr on catch, seed 0: " in said
    assert "its config.json is gone" in said
    assert "(1 of 2)" in said
    assert (taken / "checkpoint-0000000050.safetensors").read_text() == "mine"
    assert results(tmp_path)["spr/catch/seed-1"] == results(whole[0])["spr/catch/seed-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "differs"),
    [
        (["--set", "learner.depth=1"], "learner.depth 2, not 1"),
        (["--set", "schedule.steps=160"], "schedule.steps 150, not 160"),
        (["--set", "evaluation.episodes=4"], "evaluation.episodes 3, not 4"),
    ],
)
def test_a_finished_run_counts_only_for_what_it_was_made_with(whole, more, differs, capsys):
    """An ablation loop into one folder would otherwise print one variant's score for all of them."""
    out, _ = whole
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    sweep = ["sweep", "--games", "catch", "--runs", "2", "--out", str(out), *CHANGES, *more]
    train = ["train", "catch", "--seeds", "0", "1", "--out", str(out), "--resume", *CHANGES, *more]
    for command in (sweep, [*sweep, "--dry-run"], train):
        assert main(command) == 2
        said = capsys.readouterr()
        assert f"holds a finished run with {differs}" in said.err
        assert "--name" in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
    assert files == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_precision_that_is_asked_for_has_to_be_the_finished_runs(tmp_path, capsys):
    finished(tmp_path, "spr", "catch", 0, precision="bf16")
    train = ["train", "catch", "--device", "cpu", "--resume", "--out", str(tmp_path), *CHANGES]
    assert main([*train, "--precision", "fp32"]) == 2
    assert "holds a finished run with precision bf16, not fp32" in capsys.readouterr().err
    assert main(train) == 0
    assert "finished already" in capsys.readouterr().out


def test_a_damaged_result_is_named_and_not_counted(tmp_path, capsys):
    finished(tmp_path, "spr", "catch", 0)
    path = run_files.folder(tmp_path, "spr", "catch", 0) / "result.json"
    path.write_text(path.read_text()[:-20])
    for command in (["sweep", "--games", "catch", "--runs", "1"], ["train", "catch", "--resume"]):
        assert main([*command, "--out", str(tmp_path), *CHANGES]) == 2
        assert "result.json can't be used: it is torn or damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_variants_with_names_live_side_by_side(whole, tmp_path, capsys):
    out = tmp_path / "runs"
    shutil.copytree(whole[0], out)
    shallow = ["--set", "learner.depth=1", "--name", "depth-1"]
    assert main(["sweep", "--games", "catch", "--runs", "1", "--out", str(out), *CHANGES, *shallow]) == 0
    made = json.loads((out / "depth-1" / "catch" / "seed-0" / "result.json").read_text())
    assert (made["preset"], made["config"]["learner"]["depth"]) == ("spr", 1)
    assert (out / "logs" / "depth-1" / "catch" / "seeds-0.txt").is_file()
    assert results(out)["spr/catch/seed-0"] == results(whole[0])["spr/catch/seed-0"]
    capsys.readouterr()
    assert main(["train", "catch", "--out", str(out), "--resume", *CHANGES, *shallow]) == 0
    assert "finished already" in capsys.readouterr().out
    assert main(["report", str(out), "--out", str(tmp_path / "report")]) == 0
    assert "depth-1,spr,learner.depth,1,5\n" in (tmp_path / "report" / "methods.csv").read_text()


@pytest.mark.parametrize("name", ["../elsewhere", "", "a/b", ".hidden", "logs", "two words"])
def test_names_that_are_no_folders_name_are_refused(name, tmp_path, capsys):
    for command in (["train", "catch"], ["sweep", "--games", "catch"]):
        assert main([*command, "--out", str(tmp_path / "runs"), "--name", name]) == 2
        assert "--name" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_name_is_for_one_method(tmp_path, capsys):
    assert main(["sweep", "--games", "catch", "--presets", "spr", "der", "--name", "x", "--out", str(tmp_path)]) == 2
    assert "--name" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_sweep_skips_everything(whole):
    out, said = whole
    assert "2 done, 0 running, 0 waiting, 0 failed" in said
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    command = spr("sweep", "--games", "catch", "--runs", 2, "--out", out, *CHANGES)
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 0, said
    assert "1 of 1 fleets are finished already" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "how"), [("local", signal.SIGINT), ("local", signal.SIGKILL), ("ray", signal.SIGINT)]
)
def test_a_sweep_that_is_stopped_goes_on_to_the_same_bytes(engine, how, whole, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray")
    own = ("--address", "local") if engine == "ray" else ()  # not the cluster of a test that runs beside this one
    arguments = ("sweep", "--games", "catch", "--runs", 2, "--agents", 1,
                 "--together", 2, "--out", tmp_path, "--checkpoint-every", 25, *CHANGES)  # fmt: skip
    command = spr(*arguments, "--engine", engine, *own)
    wait_for(lambda: list(tmp_path.rglob("checkpoint-*.safetensors")))
    command.send_signal(how)
    said, _ = command.communicate(timeout=60)
    if how == signal.SIGINT:
        assert command.returncode == 130, said
        assert "the same command continues" in said
        assert not trainings(tmp_path)
    wait_for(lambda: not trainings(tmp_path))  # those whose sweep was killed notice, save and stop
    assert len(results(tmp_path)) < 2
    command = spr(*arguments)
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 0, said
    assert_equal_results(whole[0], tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGKILL])
def test_a_second_sweep_is_told_who_has_the_runs_and_a_killed_one_holds_nobody_up(how, whole, tmp_path):
    """One is refused, one that shares no run works beside, and the next one waits for what the killed one left."""
    seeds, more = ("--agents", 1, "--together", 2), ("--out", tmp_path, "--checkpoint-every", 25, *CHANGES)
    first = spr("sweep", "--games", "catch", "--runs", 2, *seeds, *more)
    wait_for(lambda: list(tmp_path.rglob("checkpoint-*.safetensors")) and len(trainings(tmp_path)) == 2)
    at_work = [process for process, _ in trainings(tmp_path).values()]
    for process in at_work:
        os.kill(process, signal.SIGSTOP)  # else they may be done before the next command has begun
    second = spr("sweep", "--games", "catch", "--seeds", "1-5", *seeds, *more)
    said, _ = second.communicate(timeout=60)
    for process in at_work:
        os.kill(process, signal.SIGCONT)
    assert second.returncode == 2, said
    assert said.count("\n") == 1
    who = f"process {first.pid} on {socket.gethostname()}, since 2"
    assert f"another sweep of {tmp_path} works on spr/catch/seed-1: {who}" in said
    assert first.poll() is None
    first.send_signal(how)
    first.communicate(timeout=60)
    if how == signal.SIGHUP:
        assert first.returncode == 130
        assert not trainings(tmp_path)
    left = list((tmp_path / "logs").glob(".sweep-*"))
    assert len(left) == (how == signal.SIGKILL)
    again = spr("sweep", "--games", "catch", "--runs", 2, *seeds, *more)  # at once
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "2 done, 0 running, 0 waiting, 0 failed" in said
    assert not list(tmp_path.rglob(".*.lock"))
    assert_equal_results(whole[0], tmp_path, 2)


def test_sweeps_that_share_no_run_go_together_and_dead_ones_are_forgotten(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    dead = logs / ".sweep-elsewhere-1.lock"
    dead.write_text(json.dumps({"process": 1, "host": "elsewhere", "since": "then", "runs": ["spr/catch/seed-0"]}))
    mine, other = job(tmp_path, seeds=(0, 1)), job(tmp_path, seeds=(2,))
    with claimed([mine]):
        assert not dead.exists()
        (path,) = logs.iterdir()
        path.rename(dead)  # as if another process had made it: this one's are named by its number
        with claimed([other]):
            pass
        with pytest.raises(UserError, match=r"works on spr/catch/seed-0 and 1 more: process \d+ on"):
            claimed([mine, other]).__enter__()
        assert mine.log_file() != other.log_file()
        dead.rename(path)
    assert list(logs.iterdir()) == []


def test_a_job_whose_run_somebody_works_on_waits_and_the_others_go_on(tmp_path, monkeypatch):
    jobs = [job(tmp_path, seeds=(seed,)) for seed in range(2)]

    class Fake:
        def __init__(self, *_):
            pass

        def ended(self):
            return 0

        def event(self, job):
            return JobEvent(job, "done")

        def kill(self):
            pass

    monkeypatch.setattr("spr.experiments.sweep.Command", Fake)
    monkeypatch.setattr("spr.experiments.sweep._LOOK", 0)
    never = type("Never", (), {"check": lambda _: False})()
    events = local(1)(jobs, never)
    with run_files.locked([jobs[0].request.folder(jobs[0].request.members[0])]):
        told = [event for event in (next(events) for _ in range(8)) if event]
        assert [(event.job, event.state) for event in told] == [
            (jobs[0], "waiting"),
            (jobs[1], "running"),
            (jobs[1], "done"),
        ]
        assert f"seed-0 is being worked on by process {os.getpid()} on" in told[0].reason
    assert [event for event in events if event] == [JobEvent(jobs[0], "running"), JobEvent(jobs[0], "done")]


@pytest.mark.parametrize("stays", [True, False])
def test_a_job_whose_log_can_not_be_written_or_is_gone_fails_alone(stays, tmp_path):
    mine = job(tmp_path / "out")
    mine = replace(mine, request=replace(mine.request, changes=(*mine.request.changes, ("learner.nothing", 1))))
    if stays:
        (tmp_path / "out" / "logs").mkdir(parents=True)
        (tmp_path / "out" / "logs" / "spr").write_text("no folder")
    never = type("Never", (), {"check": lambda _: False})()
    told = []
    for event in local(1)([mine], never):
        told += [event] if event else []
        if event and event.state == "running":
            shutil.rmtree(tmp_path / "out")
    assert told[-1].state == "failed"
    assert ("can't write to" if stays else "its log") in told[-1].reason


def test_files_are_brought_home_only_where_they_are_not(tmp_path):
    there, home = tmp_path / "there", tmp_path / "home"
    there.mkdir()
    for name in ("result.json", "config.json", "metrics.jsonl", "checkpoint-50.safetensors"):
        (there / name).write_text(name)
    kept = run_files.results(there)
    assert [path.name for path in kept] == ["config.json", "metrics.jsonl", "result.json"]  # a result comes last
    for path in kept:
        run_files.write_if_changed(home / path.name, path.read_bytes())
    assert sorted(path.name for path in home.iterdir()) == ["config.json", "metrics.jsonl", "result.json"]
    before = (home / "result.json").stat().st_ino
    run_files.write_if_changed(home / "result.json", b"result.json")
    assert (home / "result.json").stat().st_ino == before
    run_files.write_if_changed(home / "result.json", b"another")
    assert (home / "result.json").read_bytes() == b"another"


@pytest.mark.slow
def test_results_of_a_node_with_a_disk_of_its_own_come_home(whole, tmp_path, monkeypatch):
    """What a task returns is all that the driver needs: the folder where it was made is gone by then."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said: list[int] = []
    mine = job(tmp_path)
    folder = mine.request.folder(mine.request.members[0])
    board = type("Board", (), {"begin": type("Begin", (), {"remote": staticmethod(said.append)})})
    environment = ray_engine._environment([mine])
    assert "PYTHONPATH" not in environment
    for named in ({"plugin": ("mine",)}, {"games": ("mine:make",)}):
        one = replace(mine, request=replace(mine.request, **named))
        assert ray_engine._environment([one])["PYTHONPATH"].startswith(str(Path.cwd()))  # what lies here counts
    returned = ray_engine._train(mine, mine.command(), str(mine.log_file()), [str(folder)], environment, (board, 7))
    assert said == [7]  # that it has begun
    for path in tmp_path.iterdir():
        shutil.rmtree(path)

    class Ray:
        exceptions = type("exceptions", (), {"RayError": RuntimeError})

        @staticmethod
        def get(reference):
            return reference

    assert ray_engine._ended(mine, returned, Ray) == JobEvent(mine, "done")
    assert results(tmp_path)["spr/catch/seed-0"] == results(whole[0])["spr/catch/seed-0"]
    assert "stored under" in mine.log_file().read_text()
    assert unfinished([mine]) == []


def test_ray_tells_nobody_about_a_sweep(monkeypatch):
    pytest.importorskip("ray")
    from ray._common.usage.usage_lib import usage_stats_enabled  # noqa: PLC0415 - slow to import

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")  # and back to what it was, at the end
    assert usage_stats_enabled()
    ray_engine.on_ray(1, None)
    assert not usage_stats_enabled()


class Page:
    """The commands of docs/how-to/ray.md for a Ray cluster; for two nodes of one machine, with a home of their own."""

    def __init__(self, home):
        text = (ROOT / "docs" / "how-to" / "ray.md").read_text()
        block = text.split("```\n")[1].splitlines()
        with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:  # ports that are free
            head, client = one.getsockname()[1], two.getsockname()[1]
        block = [line.split("   #")[0].replace("HEAD", "127.0.0.1").replace("6379", str(head)) for line in block]
        _, self.export, self.token, self.first, self.other, self._sweep = block
        # One CPU each, so that each gets a fleet; and no port of a cluster that another test has beside this one.
        self.first += f" --num-cpus 1 --object-store-memory 100000000 --ray-client-server-port {client}"
        self.other += " --num-cpus 1 --object-store-memory 100000000"
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # RAY_TMPDIR keeps this cluster apart from others.
        there = {"HOME": str(home), "RAY_TMPDIR": str(home), "PATH": tools, "OMP_NUM_THREADS": "1"}
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | there
        self._home = home

    def run(self, command, stdout):
        """Give a command to a shell that has the page's variables."""
        script = f"{self.export}\n{command}"
        return subprocess.Popen(
            ["bash", "-ec", script], env=self._environment, stdout=stdout, stderr=subprocess.STDOUT, text=True
        )

    @contextlib.contextmanager
    def node(self, command):
        """A node of the cluster, from when it says that it runs; with what it said."""
        said = self._home / f"{len(list(self._home.glob('*.log')))}.log"
        with said.open("w") as file:
            process = self.run(f"exec {command}", file)
        try:
            wait_for(lambda: "until terminated" in said.read_text() or process.poll() is not None)
            assert process.poll() is None, said.read_text()
            yield process.pid, said.read_text()
        finally:
            process.terminate()
            process.wait(60)

    def sweep(self, out, before="exec"):
        """The page's sweep, with two small fleets and on CPUs."""
        words = self._sweep.split()
        for option, value in (("--games", "catch"), ("--seeds", "0-1"), ("--device", "cpu"), ("--out", str(out))):
            words[words.index(option) + 1] = value
        more = ["--agents", "1", "--checkpoint-every", "25", *CHANGES]
        return self.run(f"{before} {shlex.join([*words, *more])}", subprocess.PIPE)


@pytest.fixture(scope="module")
def page():
    """The page's commands with a head that runs."""
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as home:  # Ray's sockets: short names
        page = Page(Path(home))
        assert page.run(page.token, subprocess.DEVNULL).wait(60) == 0
        assert (Path(home) / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        with page.node(page.first) as (_, said):
            assert "Usage stats collection is disabled" in said
            yield page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("RAY_AUTH_TOKEN=wrong", "Failed to connect to Ray cluster"),
        ("HOME=/nonexistent", "no authentication token was found"),
        ("RAY_AUTH_MODE=disabled", "needs RAY_AUTH_MODE=token and the same token"),
    ],
)
def test_without_its_token_a_cluster_takes_no_sweep(token, reason, page, tmp_path):
    command = page.sweep(tmp_path, before=f"RAY_NUM_REDIS_GET_RETRIES=2 {token}")
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 2, said
    assert reason in said.splitlines()[-1]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_on_two_ray_nodes_with_one_lost_the_results_are_the_local_engines(lost, page, whole, tmp_path):
    """On a cluster that is started as the page says."""
    with page.node(page.other) as (node, _):
        command = page.sweep(tmp_path)

        def saved_there():
            """Workers of the second node whose run has a checkpoint."""
            working = trainings(tmp_path).items()
            return [w for run, (_, w) in working if node in parents(w) and list(run.glob("checkpoint-*.safetensors"))]

        (worker,) = wait_for(saved_there)
        assert b"ray::" in Path(f"/proc/{worker}/cmdline").read_bytes()
        for process in [worker] if lost == "worker" else [node, *descendants(node)]:
            os.kill(process, signal.SIGKILL)
        said, _ = command.communicate(timeout=300)
        assert command.returncode == 0, said
        assert "2 done, 0 running, 0 waiting, 0 failed" in said
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("*.txt")]
    assert sum("replaying the log" in log for log in logs) == 1, logs  # one went on from a checkpoint
    assert_equal_results(whole[0], tmp_path, 2)
