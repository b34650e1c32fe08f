"""Files are written whole, in their own place, and what a killed process leaves is cleared away; nothing is obeyed."""

import json
import os
import subprocess
import sys

import pytest
from conftest import QUICK_RUN, rewrite
from rich.table import Table
from rich.text import Text

from spr.cli import main
from spr.common import atomic_files
from spr.common.errors import UserError, visible
from spr.experiments import progress
from spr.experiments.progress import Terminal
from spr.runs import metrics_files, run_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    assert main(["train", "catch", *QUICK_RUN, "--out", str(out)]) == 0
    return out / "spr" / "catch" / "seed-0"


@pytest.fixture
def run(trained, tmp_path):
    folder = tmp_path / "spr" / "catch" / "seed-0"
    folder.mkdir(parents=True)
    for file in trained.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_link_is_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("file", "file.part"):
        (tmp_path / name).symlink_to(precious)
    atomic_files.replace(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert precious.read_text() == "mine"
    (tmp_path / "log").symlink_to(precious)
    for fresh in (True, False):
        with pytest.raises(UserError, match="log is a link, and what is written would go elsewhere: remove it"):
            atomic_files.growing(tmp_path / "log", fresh)
    assert precious.read_text() == "mine"


def test_what_is_written_beside_is_in_the_same_folder_under_a_name_of_its_own(tmp_path):
    with atomic_files.replacing(tmp_path / "file") as one, atomic_files.replacing(tmp_path / "file") as other:
        assert {os.path.dirname(one.name), os.path.dirname(other.name)} == {str(tmp_path)}
        assert one.name != other.name
        assert [atomic_files.named_beside(name) for name in names(tmp_path)] == ["file", "file"]
        one.write(b"one")
        other.write(b"other")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"one"  # whole: that of the one who was last to finish


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), ValueError()])
def test_what_can_not_be_finished_leaves_the_old_file_and_nothing_else(error, tmp_path):
    atomic_files.replace(tmp_path / "file", b"old")

    def fail():
        with atomic_files.replacing(tmp_path / "file") as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_the_file_and_then_its_folder_reach_the_disk(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, atomic_files.Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(atomic_files.Path, "replace", lambda *paths: (done.append("renamed"), rename(*paths)))
    atomic_files.replace(tmp_path / "file", b"new")
    assert done[0].startswith(str(tmp_path / "file."))
    assert done[1:] == ["renamed", str(tmp_path)]


def test_leftovers_of_a_killed_process_are_removed_by_the_next_command_on_the_run(run, tmp_path, capsys):
    before = names(run)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / "metrics.jsonl.part").symlink_to(precious)
    (run / "checkpoint-0000000040.safetensors.0badcafe.part").write_bytes(b"half")
    (run / "config.json.part").write_bytes(b"half")  # as up to 0.12
    (run / "mine.iso.part").write_bytes(b"a stranger's")
    assert main(["train", "catch", *QUICK_RUN, "--out", str(tmp_path), "--resume"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert names(run) == sorted([*before, "mine.iso.part"])
    assert precious.read_text() == "mine"


def test_a_planted_link_in_a_run_is_never_written_through(run, tmp_path, capsys):
    """Neither by the lines of a run that begins again, nor by a run that goes on."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in names(run):
        (run / name).unlink()
        (run / name).symlink_to(precious)
        (run / f"{name}.part").symlink_to(precious)
    assert main(["train", "catch", *QUICK_RUN, "--out", str(tmp_path), "--overwrite"]) == 0
    assert precious.read_text() == "mine"
    assert not any(path.is_symlink() for path in run.iterdir())
    lock = run.parent / ".seed-0.lock"
    lock.symlink_to(precious)
    capsys.readouterr()
    assert main(["train", "catch", *QUICK_RUN, "--out", str(tmp_path), "--resume"]) == 2
    assert ".seed-0.lock is a link" in capsys.readouterr().err
    assert precious.read_text() == "mine"


def deep(_):
    return b"[" * 100_000


DAMAGES = {
    "torn": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "binary": lambda _: bytes(range(256)),
    "deep": deep,
    "list": lambda _: b"[]",
    "number": lambda _: b"1" + b"0" * 400,
    "surrogate": lambda _: rb'{"preset": "\ud800", "game": "\ud800", "seed": 0, "config": {}, "environment": {}}',
    "unsealed": lambda data: json.dumps(json.loads(data) | {"sha256": "0"}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_commands_on_a_damaged_folder_end_with_one_line_and_code_2(name, damage, run, tmp_path, capsys):
    (run / name).write_bytes(DAMAGES[damage]((run / name).read_bytes()))
    train = ["catch", *QUICK_RUN, "--out", str(tmp_path)]
    commands = {
        "evaluate": ["evaluate", str(run)],
        "watch": ["watch", str(run), "--out", str(tmp_path / "film.mp4")],
        "export": ["export", str(run), str(tmp_path / "card")],
        "export to a file": ["export", str(run), str(tmp_path / "agent.safetensors")],
        "resume": ["train", *train, "--resume"],
        "sweep": ["sweep", "--games", *train, "--runs", "1"],
        "report": ["report", str(run), "--out", str(tmp_path / "report")],
    }
    unread = {"config.json": ("resume", "sweep", "report"), "result.json": ("evaluate", "watch")}  # by these commands
    for command in [command for command in commands if command not in unread[name]]:
        assert main(commands[command]) == 2, command
        said = capsys.readouterr().err
        assert said.startswith("spr: ")
        assert said.count("\n") == 1
        assert said.removesuffix("\n").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spr"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run, tmp_path, capsys):
    for name in ("config.json", "result.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
    assert main(["evaluate", str(run)]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 2
    assert "it is no plain file" in capsys.readouterr().err


def test_an_unfinished_run_goes_on_without_lines_that_are_damaged(run, tmp_path, capsys):
    good = (run / "metrics.jsonl").read_bytes()
    lines = good.splitlines(keepends=True)
    for name in ("metrics.jsonl", "episodes.jsonl", "times.jsonl"):
        (run / name).write_bytes(
            b"\xff\n[1]\n{}\n" + deep(0) + b"\n" + b'{"step": "7"}\n{"step": 1' + b"0" * 400 + b"}\n"
        )
    described = run_folder.describe(run)
    metrics_files.rewind(described.path, 45)
    assert metrics_files.logged(run) == ([], [])
    assert metrics_files.last_step(run) is None
    (run / "metrics.jsonl").write_bytes(lines[0] + b"garbage\n" + lines[1] + lines[2][:20])
    metrics_files.rewind(described.path, 45)
    assert (run / "metrics.jsonl").read_bytes() == lines[0] + lines[1]
    capsys.readouterr()
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert f"note: {run}: its learning curve lacks 43 lines of metrics.jsonl" in said
    (run / "metrics.jsonl").write_bytes(good.replace(b'"games": 0', b'"games": 1', 1))
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert "its metrics.jsonl is not as the run left it: its learning curve may be wrong" in capsys.readouterr().out


HOSTILE = "a\x1b[2J\r\n\tb\x07\x9b31m\u202ec\u2066\udcff\u2028[bold]d"
SHOWN = r"a\x1b[2J\r\n\tb\x07\x9b31m\u202ec\u2066\udcff\u2028[bold]d"


def test_controls_are_written_out():
    assert visible(HOSTILE) == SHOWN
    assert visible("pong é 日本 \\x1b") == "pong é 日本 \\x1b"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_names_and_obeys_nothing_in_them(terminal, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.delenv("NO_COLOR" if terminal else "FORCE_COLOR", raising=False)
    console = Terminal()
    table = Table(box=None)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    with progress.Bar(console, HOSTILE, 10, "steps") as bar:
        bar.show(10, HOSTILE)
        console.print(HOSTILE)
        console.print(table)
    said = capsys.readouterr().out
    for obeyed in ("\x1b[2J", "\x07", "\x9b", "\u202e", "\u2066", "\u2028", "\udcff"):
        assert obeyed not in said
    assert said.count(r"a\x1b[2") >= 5
    assert said.count("[bold]d") >= 3
    said.encode()


def test_an_error_that_quotes_a_file_is_one_line_without_escapes(run, tmp_path, capsys):
    rewrite(run / "config.json", environment={"name": "catch", "arguments": {"\x1b[31m\n": 1}})
    assert main(["evaluate", str(run)]) == 2
    rewrite(run / "config.json", environment={"name": "catch"}, game="module:\u202egame")
    assert main(["evaluate", str(run)]) == 2
    rewrite(run / "config.json", game="\x1b]0;title\x07")
    assert main(["evaluate", str(run)]) == 2
    hostile = tmp_path / os.fsdecode(b"\x1b[31m\n\xff")
    hostile.mkdir()
    assert main(["evaluate", str(hostile)]) == 2
    (hostile / "result.json").write_text("{")
    assert main(["report", str(hostile), "--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 5
    assert all(line.isprintable() for line in said.split("\n"))


def test_names_that_a_terminal_has_no_letters_for_are_written_out(tmp_path):
    (tmp_path / "é").mkdir()
    (tmp_path / "é" / "result.json").write_text("{")
    command = [sys.executable, "-m", "spr", "report", str(tmp_path / "é"), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"Traceback" not in ended.stderr
