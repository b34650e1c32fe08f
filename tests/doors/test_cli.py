"""The commands as a person uses them: a whole tiny run, and every way to ask for nonsense."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
import torch
from conftest import HEARING, LITTLE_FRAMES, as_options, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spr import doctor
from spr.cli import main
from spr.common.errors import UserError
from spr.common.hardware import choose_device
from spr.config.config import Config
from spr.config.presets import preset_config
from spr.evaluation.batched_policy import Agents
from spr.evaluation.scheduler import EvaluationProgress
from spr.experiments import benchmark
from spr.runs import run_folder

SMALL = {"network.hidden": 8, "replay.batch_size": 4, "replay.n_step": 3, "learner.depth": 1} | LITTLE_FRAMES
TINY = as_options(SMALL | {"schedule.learning_starts": 40, "evaluation.episodes": 3})


def tiny(out, *more, game="catch", steps="70"):
    return main(["train", game, "--steps", steps, "--device", "cpu", "--out", str(out), *TINY, *more])


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    assert tiny(out) == 0
    return out


@pytest.fixture
def finished(one_run, tmp_path):
    """The folder of a finished run, of which every test has a copy of its own below tmp_path."""
    shutil.copytree(one_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "spr/catch/seed-0"


def test_a_whole_run_from_training_to_evaluation(tmp_path, capsys):
    assert tiny(tmp_path, "--seeds", "4", "9") == 0
    shown = capsys.readouterr().out
    assert "random agent" in shown
    for seed in (4, 9):
        folder = tmp_path / "spr" / "catch" / f"seed-{seed}"
        assert sorted(p.name for p in folder.iterdir()) == [
            "agent.safetensors",
            "config.json",
            "episodes.jsonl",
            "metrics.jsonl",
            "result.json",
            "times.jsonl",
        ]
        result = json.loads((folder / "result.json").read_text())
        assert result["preset"] == "spr"
        assert result["seed"] == seed
        assert result["steps"] == 70
        assert len(result["episodes"]) == 3
        assert result["score"] == pytest.approx(sum(result["episodes"]) / 3)
        assert result["human_normalised"] is None
        assert result["protocol"]["evaluation_episodes"] == 3
        assert result["config"]["network"]["hidden"] == 8
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, 71))
        assert "rl" not in rows[39]
        assert {"rl", "spr", "cosine", "spread", "score", "games", "norm_agent"} <= rows[-1].keys()

    folder = tmp_path / "spr" / "catch" / "seed-4"
    assert main(["evaluate", str(folder), "--json", "--device", "cpu"]) == 0
    again = json.loads(capsys.readouterr().out)
    # The same games with the same weights give the same scores.
    assert again["episodes"] == json.loads((folder / "result.json").read_text())["episodes"]
    assert main(["evaluate", str(folder), "--episodes", "2", "--seed", "1", "--device", "cpu"]) == 0
    assert "over 2 games" in capsys.readouterr().out


@pytest.mark.slow
def test_an_agent_trains_the_same_alone_and_in_a_fleet(tmp_path):
    """The whole loop: environment, actions, replay and draws of seed 1 do not depend on its neighbours."""
    assert tiny(tmp_path / "fleet", "--seeds", "0", "1") == 0
    assert tiny(tmp_path / "alone", "--seeds", "1") == 0
    fleet, alone = (
        json.loads((tmp_path / where / "spr/catch/seed-1/metrics.jsonl").read_text().splitlines()[-1])
        for where in ("fleet", "alone")
    )
    for name in ("rl", "spr", "score", "games", "value"):
        assert fleet[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_a_real_game_is_scored_raw_and_learnt_clipped(tmp_path, capsys):
    assert tiny(tmp_path, "--set", "evaluation.episodes=1", game="ms_pacman") == 0
    result = json.loads((tmp_path / "spr/ms_pacman/seed-0/result.json").read_text())
    assert result["protocol"]["name"] == "atari"  # 70 steps and one game are not the benchmark
    assert result["score"] >= 60
    assert result["human_normalised"] == pytest.approx((result["score"] - 307.3) / (6951.6 - 307.3))
    assert "human-normalised" in capsys.readouterr().out


class Traffic(gymnasium.Env):
    """A colour game of 64x64 pixels: go when the light is green, and stop when it is red."""

    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return self.image(), {}

    def image(self):
        self.light = int(self.np_random.integers(2))
        picture = np.zeros((64, 64, 3), np.uint8)
        picture[20:44, 20:44, self.light] = 255
        return picture

    def step(self, action):
        reward = float(action == self.light)
        self.time += 1
        return self.image(), reward, self.time == 10, False, {}


@pytest.mark.slow
def test_a_colour_game_of_another_size_trains_evaluates_and_is_stamped(tmp_path, capsys):
    gymnasium.register("Traffic-v0", Traffic)
    colour = as_options({"observation.height": 64, "observation.width": 64, "observation.channels": 3})
    assert tiny(tmp_path, *colour, game="Traffic-v0") == 0
    folder = tmp_path / "spr" / "Traffic-v0" / "seed-0"
    result = json.loads((folder / "result.json").read_text())
    assert result["protocol"]["resize"] == "area to 64x64 colour"
    weights = load_file(folder / "agent.safetensors")
    assert weights["encoder.conv1.weight"].shape == (32, 12, 8, 8)
    assert weights["head.hidden.weight"].shape == (16, 4 * 4 * 64)
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == result["episodes"]


@pytest.mark.parametrize(
    ("game", "changes", "name"),
    [
        ("pong", {"observation.height": 96}, "atari"),
        ("pong", {}, "atari-100k"),
        ("pong", {"learner.depth": 3}, "atari-100k"),  # another method, judged alike
        ("pong", {"evaluation.max_steps": 200}, "atari"),  # games cut short
        ("pong", {"schedule.steps": 99_999}, "atari"),
        ("pong", {"evaluation.episodes": 10}, "atari"),
        ("pong", {"evaluation.epsilon": 0.05}, "atari"),
        ("asteroids", {}, "atari"),  # not one of the 26
    ],
)
def test_only_the_benchmark_bears_its_name(game, changes, name, tmp_path):
    config = Config().override(changes)
    run = run_folder.Run(tmp_path, "spr", game, 0, config, {"name": "atari", "version": 1})
    stamped = run_folder.protocol(run)
    assert stamped["name"] == name
    assert stamped["training_steps"] == config.schedule.steps
    assert stamped.get("evaluation_max_steps") == changes.get("evaluation.max_steps")
    assert stamped["learning_reward"] == "clipped to [-1, 1]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "pnog"], "unknown game 'pnog'; did you mean 'pong'?"),
        (["train", "catch", "--preset", "sprr"], "unknown preset 'sprr'; did you mean 'spr'?"),
        (["train", "catch", "--sedes", "1"], "unknown option '--sedes'; did you mean '--seeds'?"),
        (["train", "catch", "--device", "tpu"], "unknown device 'tpu'"),
        (["train", "catch", "--steps", "0"], "schedule.steps must be between 1"),
        (["train", "catch", "--steps", "-3"], "schedule.steps must be between 1"),
        (["train", "catch", "--steps", "many"], "invalid int value: 'many'"),
        (["train", "catch", "--seeds", "1", "2", "1"], "seed 1 is given twice"),
        (["train", "catch", "--seeds", "-1"], "seeds are whole numbers and ranges, such as 0 1 5-9, not '-1'"),
        (["train", "catch", "--seeds", "9-5"], "the smaller one comes first"),
        (["train", "catch", "--seeds", "0-99999999999"], "more seeds than a command takes: 10,000 at the most"),
        (["train", "catch", "--seeds", "9999999999"], "seeds must be between 0"),
        (["train", "catch", "--set", "learner.dept=3"], "did you mean 'learner.depth'?"),
        (["train", "catch", "--set", "learner.depth=deep"], "learner.depth takes a whole number"),
        (["train", "CartPole-v1"], "images are needed"),
        (["train", "Pendulum-v1"], "actions of type Box"),
        (["train", "catch", "--set", "replay.capacity=99000000", "--steps", "99000000"], "GiB are free"),
        (["train"], "required: GAME"),
        (["trian", "catch"], "invalid choice: 'trian'"),
        ([], "required: COMMAND"),
        (["presets", "sp"], "unknown preset 'sp'"),
        (["evaluate", "nowhere"], "nowhere is neither a run's folder"),
        (["bench", "--agents", "0"], "--agents takes numbers of at least 1"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("spr: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "catch", "--device", "cuda"]) == 2
    assert "no CUDA GPU can be used here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_touched_unless_asked(finished, tmp_path, capsys):
    result = finished / "result.json"
    before = result.read_bytes()
    assert tiny(tmp_path, "--seeds", "1", "0") == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert result.read_bytes() == before
    assert not (tmp_path / "spr/catch/seed-1").exists()
    assert tiny(tmp_path, "--overwrite", steps="71") == 0
    assert json.loads(result.read_bytes())["steps"] == 71


def test_a_strangers_file_is_left_alone_and_does_not_block(tmp_path):
    foreign = tmp_path / "spr/catch/seed-0/thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("precious")
    (foreign.parent / "notes").mkdir()
    assert tiny(tmp_path, steps="41") == 0
    assert tiny(tmp_path, "--overwrite") == 0
    assert tiny(tmp_path, "--resume") == 0
    assert foreign.read_text() == "precious"
    assert (foreign.parent / "notes").is_dir()


def test_a_place_that_cannot_be_written_is_refused(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert tiny(blocked) == 2
    said = capsys.readouterr().err
    assert "can't write to" in said
    assert said.count("\n") == 1


def test_a_fleet_is_created_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    write = run_folder._write_json

    def full_disk(path, data):
        if path.parent.name == "seed-1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(run_folder, "_write_json", full_disk)
    assert tiny(tmp_path, "--seeds", "0", "1") == 1  # no fault of what was asked for
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_evaluating_a_damaged_run_is_refused(finished, capsys):
    folder = finished
    weights = folder / "agent.safetensors"
    whole = weights.read_bytes()
    capsys.readouterr()
    for damage in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        weights.write_bytes(damage)
        assert main(["evaluate", str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    weights.unlink()
    assert main(["evaluate", str(folder)]) == 2
    assert "its agent was not saved" in capsys.readouterr().err
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{}")
    assert main(["evaluate", str(folder)]) == 2


def said_at_the_end(process):
    """What a process that is to end by itself, within a minute, has written."""
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_leaves_an_agent_that_can_be_played(number, tmp_path):
    command = [*HEARING, "-c", "import sys; from spr.cli import main; sys.exit(main(sys.argv[1:]))"]
    train = ["train", "catch", "--steps", "9000", "--device", "cpu", "--out", str(tmp_path), *TINY]
    process = subprocess.Popen([*command, *train], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "spr/catch/seed-0/metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.05)
    os.kill(process.pid, number)
    os.kill(process.pid, number)  # as `timeout` does: once to the process and once to its group
    out, err = said_at_the_end(process)
    assert process.returncode == 130
    assert err == ""
    assert "stopped after" in out
    folder = metrics.parent
    names = {p.name.split("-")[0] for p in folder.iterdir()}
    logged = {"metrics.jsonl", "times.jsonl", "episodes.jsonl"}
    assert names == {"agent.safetensors", "config.json", "checkpoint"} | logged
    assert main(["evaluate", str(folder), "--episodes", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_film_that_is_stopped_leaves_nothing_half_written(number, finished, tmp_path):
    film = tmp_path / "film.mp4"
    watch = [*HEARING, "-m", "spr", "watch", str(finished), "--out", str(film), "--steps", "5000"]
    process = subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("film.mp4.*.part")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = said_at_the_end(process)
    assert process.returncode == 130
    assert err == "spr: stopped at once\n"
    assert list(tmp_path.glob("film*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy._core", "torch._C", "gymnasium", "rich"])
def test_a_command_that_is_stopped_while_libraries_load_shows_no_traceback(library):
    command = [*HEARING, "-X", "importtime", "-m", "spr", "games"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any(f" {library}" in line for line in process.stderr)  # it has loaded so much
    process.send_signal(signal.SIGINT)
    _, err = said_at_the_end(process)
    assert "Traceback" not in err
    assert process.returncode in (130, -signal.SIGINT)


def test_a_second_change_needs_its_own_set(tmp_path, capsys):
    assert main(["train", "catch", "--out", str(tmp_path), "--set", "learner.depth=2", "network.hidden=8"]) == 2
    said = capsys.readouterr().err
    assert said == "spr: 'network.hidden=8' needs an option before it: each --set and each --env-arg takes one\n"


def test_contradictory_options_are_refused(tmp_path, capsys):
    steps = ["train", "catch", "--steps", "300", "--set", "schedule.steps=400", "--out", str(tmp_path / "runs")]
    assert main(steps) == 2
    assert capsys.readouterr().err == "spr: --steps 300 and --set schedule.steps=400: choose one\n"
    assert main(["sweep", "--games", "catch", *steps[2:], "--dry-run"]) == 2
    assert capsys.readouterr().err == "spr: --steps 300 and --set schedule.steps=400: choose one\n"
    plan = ["sweep", "--presets", "spr", "--games", "catch", "--address", "here:1", "--out", str(tmp_path / "runs")]
    assert main([*plan, "--dry-run"]) == 2
    assert "--address is for --engine ray" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_help_explains_every_option(capsys):
    for command in ("train", "sweep", "evaluate", "watch", "games", "presets", "bench", "export", "report", "doctor"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
    shown = capsys.readouterr().out
    options = "--preset --seeds --steps --device --out --overwrite --set --episodes --seed --json --agents --game"
    options += " --resume --checkpoint-every --precision --live --fps --log --log-every --plugin --env-arg --runs"
    assert all(option in shown for option in options.split())


def test_presets_lists_and_explains(capsys):
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("spr", "spr_noaug", "rainbow", "rainbow_noaug", "0.415"))
    assert main(["presets", "spr_noaug"]) == 0
    shown = capsys.readouterr().out
    assert "learner.ema_decay" in shown
    assert "0.99" in shown


def test_doctor_finds_the_roms_and_what_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("wandb", "imageio_ffmpeg") else "there")
    assert main(["doctor"]) == 0  # an extra may be missing
    shown = capsys.readouterr().out
    assert "all 26 games" in shown
    assert "GiB free" in shown
    assert re.search(r"ok +extra report +there", shown)
    assert re.search(r"-- +extra video +not installed: pip install imageio-ffmpeg", shown)
    assert re.search(r"-- +extra log +not installed: pip install wandb", shown)


@pytest.mark.slow
def test_bench_gives_json(capsys):
    command = ["bench", "--game", "catch", "--preset", "rainbow", "--device", "cpu", "--json", "--evaluation"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["agents"] == 1
    assert row["update_ms"] > 0
    assert row["kernels_per_update"] is None  # there are none on a CPU
    assert row["step_ms"] > 0
    assert row["evaluation_steps_per_second"] > 0

    updates = preset_config("rainbow").schedule.updates_per_step * row["update_ms"] / row["step_ms"]
    assert row["share_update"] == pytest.approx(min(1, updates))
    acting = row["act_ms"] / row["step_ms"]
    assert row["share_environment"] == pytest.approx(max(0, 1 - updates - acting))


def test_an_evaluation_is_timed_by_the_steps_that_it_plays_once_all_emulators_are_busy(monkeypatch):
    """By hand: a second for each hundred steps at first, then a quarter of one."""
    clock, steps = 0.0, 0

    def played(*_):
        nonlocal clock, steps
        while True:
            clock += 1.0 if clock < benchmark._WARM else 0.25
            steps += 100
            yield EvaluationProgress([], [], 0, steps)

    monkeypatch.setattr(benchmark, "play", played)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock)
    agents = Agents(["pong"], {}, [0])
    assert benchmark.evaluation_rate(preset_config("spr"), agents) == pytest.approx(400)

    def soon_over(*_):
        nonlocal clock
        clock = 1.0
        yield EvaluationProgress([], [], 0, 0)
        clock = 3.0
        yield EvaluationProgress([], [], 1, 100)

    monkeypatch.setattr(benchmark, "play", soon_over)
    assert benchmark.evaluation_rate(preset_config("spr"), agents) == pytest.approx(50)


@pytest.mark.slow
def test_an_exported_agent_is_one_file_that_plays_the_same(finished, tmp_path, capsys):
    folder, file = finished, tmp_path / "agent.safetensors"
    assert main(["export", str(folder), str(file)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(file), "--json", "--device", "cpu"]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(capsys.readouterr().out)["episodes"] == result["episodes"]
    with safe_open(file, "pt") as agent:
        told = json.loads(agent.metadata()["spr"])
    assert told["episodes"] == result["episodes"]
    assert told["config"] == result["config"]
    assert main(["export", str(folder), str(file)]) == 2
    assert "is there already" in capsys.readouterr().err
    (folder / "result.json").write_text((folder / "result.json").read_text()[:100])
    assert main(["export", str(folder), str(tmp_path / "another.safetensors")]) == 2
    assert "result.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"head.hidden.bias": torch.zeros(7)},
            "'head.hidden.bias' is not what its configuration asks for",
        ),
        (lambda w: w | {"extra": torch.zeros(7)}, "'extra' is not what its configuration asks for"),
        (lambda w: {n: t for n, t in w.items() if n != "encoder.conv2.weight"}, "'encoder.conv2.weight' is not what"),
        (lambda w: {n: t.double() for n, t in w.items()}, "is not what its configuration asks for"),
        (lambda w: w | {"head.advantage.bias": torch.zeros(51 * 5000)}, "5,000 actions is not believable"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(change, message, finished, capsys):
    weights = load_file(finished / "agent.safetensors")
    save_file(change(weights), finished / "agent.safetensors")
    assert main(["evaluate", str(finished)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_agent_of_another_game_is_refused(finished, capsys):
    file = finished / "config.json"
    rewrite(file, game="breakout")
    assert main(["evaluate", str(file.parent), "--episodes", "1"]) == 2
    assert "3 actions, but breakout has 4" in capsys.readouterr().err


def test_games_are_listed_with_those_of_plug_ins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_listed_game.py").write_text("import spr\n@spr.register_env('my_listed')\ndef make(): pass\n")
    monkeypatch.setattr("spr.envs.registry._own", {})
    assert main(["games", "--plugin", "my_listed_game"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Atari 100k ('all'), 26: alien, amidar", "other Atari games, 82: adventure", "plug-ins, 1: my_listed"):
        assert part in shown


def test_presets_fold_the_points_of_figures(capsys):
    assert main(["presets"]) == 0
    folded = capsys.readouterr().out
    assert "spr_k3" not in folded
    assert "8 points of the figure 'depth', such as spr_k1" in folded
    assert main(["presets", "--all"]) == 0
    assert "spr_k3" in capsys.readouterr().out


def test_one_of_several_gpus_is_named_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    for name, words in (
        ("cuda:2", "the GPUs here are cuda:0 to cuda:1"),
        ("cpu:0", "unknown device"),
        ("cuda:x", "cuda:N"),
    ):
        with pytest.raises(UserError, match=words):
            choose_device(name)


def test_square_brackets_and_emoji_codes_in_paths_are_printed_as_they_are(tmp_path, capsys):
    out = tmp_path / "[red]my[/red] :smile: runs"
    assert tiny(out) == 0
    assert f"stored under {out}" in capsys.readouterr().out


def test_parts_that_need_more_than_the_core_say_what_to_install(monkeypatch, capsys, tmp_path):
    for command, package, all_of_them in (
        ("report", "matplotlib", "matplotlib jinja2"),
        ("watch", "matplotlib", "imageio-ffmpeg matplotlib pillow"),
    ):
        for name in [name for name in sys.modules if name.split(".")[0] in (package, "spr")]:
            if name.startswith(("spr.evaluation.film", "spr.evaluation.canvas", "spr.report", package)):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        assert main([command, str(tmp_path)]) == 2
        assert capsys.readouterr().err.endswith(f"needs the package {package}: pip install {all_of_them}\n")
        monkeypatch.undo()


@pytest.mark.slow
def test_a_file_can_not_ask_for_a_million_games_nor_for_one_without_end(tmp_path, capsys, monkeypatch):
    assert tiny(tmp_path, "--set", "evaluation.max_steps=5") == 0
    assert "3 (3 cut off)" in capsys.readouterr().out
    run = tmp_path / "spr/catch/seed-0"
    result = json.loads((run / "result.json").read_text())
    assert (result["episode_steps"], result["episodes_cut"]) == ([5, 5, 5], 3)
    monkeypatch.setattr("spr.cli._MOST_GAMES", 2)
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 2
    assert "asks for 3 games: say with --episodes how many you want" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    assert "3 of 3 games cut off after 5 steps" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", str(run), "--episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episode_steps"] == [5, 5, 5]
