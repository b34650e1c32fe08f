"""Rows as often as asked, a record per episode, and loggers that have every run of a fleet as a run of its own."""

import csv
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import TINY, as_options, carry_out, make_job

from spr.cli import COMMANDS, main
from spr.cli_parser import make_parser
from spr.common.errors import UserError
from spr.config.presets import preset_config
from spr.experiments import events, loggers
from spr.experiments.events import to_all, write_metrics
from spr.experiments.job_runner import INTERRUPTED
from spr.runs import compatibility, metrics_files, run_files, run_folder
from spr.training import checkpoint
from spr.training.loop import Episode, EpisodeTracker

CHANGES = TINY | {"schedule.learning_starts": 88, "evaluation.episodes": 1}
CONFIG = preset_config("spr").override(CHANGES | {"schedule.steps": 95})
GAME = 30  # steps: ten balls that fall three cells each


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(run):
    """Everything in a run's event files: tag -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - slow

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def mirrored(run):
    """The same from the run's own files."""
    found = {}
    groups = {"train": lines(run / "metrics.jsonl"), "episode": lines(run / "episodes.jsonl")}
    groups["evaluation"] = [{"step": 95, "score": json.loads((run / "result.json").read_text())["score"]}]
    for group, rows in groups.items():
        for row in rows:
            for name, value in row.items():
                if name != "step" and value is not None:
                    found.setdefault(f"{group}/{name}", []).append((row["step"], float(np.float32(value))))
    return found


def job(out, log_every=10):
    return make_job(out, (0, 1), config=CONFIG, log_every=log_every)


def train(out, stop_after=None, **how):
    """Train a fleet of two, with event files and tables; until a step, if one is given."""
    steps = []

    def watch(event):
        if isinstance(event, events.Stepped):
            steps.append(event.info.step)

    with loggers.make(["tensorboard", "csv"], out) as logger:
        return carry_out(job(out), to_all(watch, write_metrics, logger), lambda: stop_after in steps, **how)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A fleet of two that was never stopped."""
    out = tmp_path_factory.mktemp("whole")
    assert train(out) == 0
    return out


def folders(out):
    return [run_files.folder(out, "spr", "catch", seed) for seed in (0, 1)]


def test_a_record_per_episode_and_rows_as_often_as_asked(whole):
    for run in folders(whole):
        rows, episodes = lines(run / "metrics.jsonl"), lines(run / "episodes.jsonl")
        assert [row["step"] for row in rows] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
        assert [(one["step"], one["length"]) for one in episodes] == [(GAME, GAME), (2 * GAME, GAME), (3 * GAME, GAME)]
        for row in rows:
            scores = [one["score"] for one in episodes if one["step"] <= row["step"]]
            assert row["games"] == len(scores)
            assert row["score"] == (sum(scores) / len(scores) if scores else None)
        assert json.loads((run / "config.json").read_text())["log_every"] == 10
    first, second = (lines(run / "episodes.jsonl") for run in folders(whole))
    assert first != second


def test_an_episodes_score_is_the_sum_of_its_raw_rewards_and_one_cut_off_is_none():
    games = EpisodeTracker(2, 3)

    def count(reward, over):
        return games.count(np.zeros(2, np.int64), np.array(reward, np.float32), np.array(over))

    assert count([5, 1], [False, False]) == []
    assert count([-2, 7], [False, True]) == [Episode(1, 8.0, 2)]
    assert count([4, 1], [True, False]) == [Episode(0, 7.0, 3)]
    games.abandon()
    assert count([1, 1], [True, True]) == [Episode(0, 1.0, 1), Episode(1, 1.0, 1)]


def test_event_files_hold_what_each_runs_own_files_hold(whole):
    for run in folders(whole):
        found = scalars(run)
        assert found == mirrored(run)
        assert {"train/score", "train/rl", "train/spr", "episode/score", "episode/length", "evaluation/score"} <= set(
            found
        )


def test_tables_hold_what_each_runs_own_files_hold(whole):
    """Columns that come late are there from the first row on; what a line does not say is an empty cell."""
    for run in folders(whole):
        for name in ("metrics", "episodes"):
            with (run / f"{name}.csv").open(newline="") as file:
                table = [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]
            said = lines(run / f"{name}.jsonl")
            assert table == [{key: value for key, value in row.items() if value is not None} for row in said]


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_to_the_same_bytes_and_event_files(whole, tmp_path):
    assert train(tmp_path, stop_after=65) == INTERRUPTED
    for run in folders(tmp_path):
        assert [one["step"] for one in lines(run / "episodes.jsonl")] == [GAME, 2 * GAME]
        checkpoint.path_of(run, 65).unlink()  # as if it had been killed: its files are ahead of its last checkpoint
        with (run / "episodes.jsonl").open("a") as file:
            file.write('{"step": 9')
    old = [next((run / "tensorboard").iterdir()) for run in folders(tmp_path)]
    copies = [file.read_bytes() for file in old]
    assert train(tmp_path, resume=True) == 0
    for one, two in zip(folders(whole), folders(tmp_path), strict=True):
        for name in ("metrics.jsonl", "episodes.jsonl", "config.json", "metrics.csv", "episodes.csv"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
        assert len(list((two / "tensorboard").iterdir())) == 1
        assert scalars(two) == scalars(one)
    for run, file, copy in zip(folders(whole), old, copies, strict=True):
        file.write_bytes(copy)  # as where another machine's files are gathered
        assert scalars(file.parents[1]) == scalars(run)


def test_an_unfinished_run_with_other_rows_is_refused_and_a_finished_one_counts(whole, tmp_path):
    (member, _), other = job(whole).request.members, job(whole, log_every=None)
    assert other.finished(member)
    run = other.run(member, {})._replace(path=tmp_path / "run")
    run_folder.create([run])
    assert compatibility.begun(run)
    with pytest.raises(UserError, match="holds an unfinished run with log_every 1, not 10"):
        compatibility.begun(run._replace(log_every=10))
    wanted = compatibility.ExpectedRun("spr", "catch", 0, CONFIG, "fp32", exactly=False, log_every=1)
    assert not compatibility.finished_as(run.path, wanted)
    # A file of an earlier version does not name it: it was a hundredth of the run.
    file = run.path / "config.json"
    known = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("log_every", "sha256")}
    file.write_text(json.dumps(known))
    assert not compatibility.finished_as(run.path, wanted)
    with pytest.raises(UserError, match="holds an unfinished run with log_every 1, not 10"):
        compatibility.finished_as(run.path, wanted._replace(log_every=10))


def test_a_runs_folder_may_hold_what_loggers_write(whole, tmp_path):
    run = folders(whole)[0]
    run_files.refuse_taken([run], overwrite=True)
    kept = [path.relative_to(run).parts[0] for path in run_files.results(run)]
    assert "tensorboard" in kept  # comes home from another machine
    assert kept[-1] == "result.json"
    made = job(tmp_path).run(job(tmp_path).request.members[0], {})
    (made.path / "tensorboard").mkdir(parents=True)
    (made.path / "wandb.json").write_text("{}")
    run_folder.create([made])
    assert [path.name for path in made.path.iterdir()] == ["config.json"]
    with pytest.raises(UserError, match="other than 'logs' and 'wandb'"):
        run_files.check_name("wandb")


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self, _):
        self.values, self.closed = [], None

    def write(self, step, values):
        self.values.append((step, dict(values)))

    def close(self, scored):
        self.closed = scored


def test_a_run_that_diverged_or_was_stopped_is_closed_without_a_score(tmp_path):
    made = job(tmp_path)
    diverged, scored = (made.run(member, {}) for member in made.request.members)
    stopped = scored._replace(path=tmp_path / "stopped")
    opened = []

    def opener(run):
        opened.append(Kept(run))
        return opened[-1]

    with loggers.Loggers([opener]) as logger:
        logger(events.TrainingBegins(95, [diverged, scored, stopped]))
        logger(events.Metrics(diverged, {"step": 5, "score": None, "rl": math.pi}, 1.0))
        logger(events.Diverged(diverged, "it diverged"))
        logger(events.Metrics(diverged, {"step": 6, "rl": math.nan}, 1.0))
        logger(events.Scored(scored, {"steps": 95, "score": 7.0}))
    assert [(one.values, one.closed) for one in opened] == [
        ([(5, {"train/rl": math.pi})], False),
        ([(95, {"evaluation/score": 7.0})], True),
        ([], False),
    ]


@pytest.mark.parametrize("command", [["train", "catch"], ["sweep", "--games", "catch"]])
@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        (["--log", "tensorbord"], None, "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        (["--log", "wandb", "tensorboard"], "tensorboard", "needs the package tensorboard: pip install tensorboard"),
        (["--log", "wandb"], "wandb", "--log wandb needs the package wandb: pip install wandb"),
        (["--log-every", "0"], None, "log-every takes a number of at least 1"),
    ],
)
def test_what_cannot_be_logged_is_refused_in_one_line(
    command, options, missing, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    assert main([*command, *options]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_hands_its_logging_on(tmp_path):
    usual = make_job(tmp_path, (0, 1), ("catch", "pong"))
    asked = make_job(tmp_path, (0, 1), ("catch", "pong"), log_every=7, log=("tensorboard", "wandb"))
    for made, log, every in ((usual, [], None), (asked, ["tensorboard", "wandb"], 7)):
        args = make_parser(COMMANDS).parse_args(made.command())
        assert (args.games, args.seeds, args.log, args.log_every) == (["catch", "pong"], ["0", "1"], log, every)


def spr(out, *more, **environment):
    """Start a command in a process that knows no key, has no terminal and would find no server."""
    unknown = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {"HOME": str(out.parent), "NETRC": str(out.parent / "none"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    changes = as_options(CHANGES | {"schedule.learning_starts": 60})
    python = [sys.executable, "-c", "import sys; from spr.cli import main; sys.exit(main())"]
    order = ["train", "catch", "--seeds", "0", "1", "--steps", "95", "--log-every", "10", "--device", "cpu"]
    return subprocess.Popen(
        [*python, *order, "--log", "wandb", "--out", str(out), *changes, *more],
        env=unknown | home | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wandb_history(file):
    """What is in a file of wandb's: a log in the format of LevelDB's, with a record of theirs in each entry."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - slow

    data, at, entry, run, rows = file.read_bytes(), 7, b"", None, []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(entry)
            entry = b""
            if record.HasField("run"):
                run = record.run.display_name
            if record.HasField("history"):
                values = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
                rows.append((values["_step"], values))
    return run, rows


@pytest.mark.slow
def test_wandb_has_a_run_per_agent_without_asking_and_without_a_server_and_it_goes_on(tmp_path):
    out = tmp_path / "runs"
    first = spr(out)
    while first.poll() is None and (metrics_files.last_step(folders(out)[1]) or 0) < 60:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=300)
    assert (first.returncode, said) == (INTERRUPTED, "")
    names = [json.loads((run / "wandb.json").read_text())["id"] for run in folders(out)]
    assert len({path.name.split("-")[-1] for path in (out / "wandb").glob("offline-run-*")} | set(names)) == 2
    second = spr(out, "--resume")
    _, said = second.communicate(timeout=300)
    assert (second.returncode, said) == (0, "")
    for run, name in zip(folders(out), names, strict=True):
        (file,) = (out / "wandb").glob(f"offline-run-*-{name}/*.wandb")
        title, rows = wandb_history(file)
        assert title == f"spr/catch/{run.name}"
        found = {}
        for step, values in rows:
            for tag, value in values.items():
                if not tag.startswith("_"):
                    found.setdefault(tag, []).append((step, float(np.float32(value))))
        assert found == mirrored(run)


@pytest.mark.slow
def test_a_mode_that_wandb_does_not_have_is_refused_in_one_line(tmp_path):
    refused = spr(tmp_path / "runs", WANDB_MODE="bogus")
    _, said = refused.communicate(timeout=300)
    assert refused.returncode == 2
    assert said.startswith("spr: wandb can't be used: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_wandb_with_a_server_but_no_key_is_refused(tmp_path):
    refused = spr(tmp_path / "runs", WANDB_MODE="online")
    _, said = refused.communicate(timeout=300)
    assert refused.returncode == 2
    assert said == (
        "spr: WANDB_MODE=online needs an API key, and there is none: 'wandb login' stores one, and WANDB_MODE=offline "
        "needs none\n"
    )
    assert not (tmp_path / "runs").exists()
