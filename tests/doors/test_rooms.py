"""The house is as its plan says: rooms import only what pyproject.toml's [tool.rooms] allows, and stay small."""

import ast
import re
import tomllib

import pytest
from conftest import ROOT

SOURCE = ROOT / "src" / "spr"
ALLOWED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rooms"]
OLD_PATHS = "common/old_paths.py"  # knows modules of every room by name, and imports them only when it is asked to
MOST_LINES = 400
DOORS = 8


def named(tree):
    """Every module of ours that a file names: by import, wherever it stands, or in a string that is nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
            assert node.level == 0, "imports are absolute"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((found, node.lineno) for found in re.findall(r"\bspr(?:\.\w+)+", docless(node, tree)))


def docless(node, tree):
    """A string, unless it is a docstring."""
    bodies = [part.body for part in ast.walk(tree) if isinstance(getattr(part, "body", None), list)]
    return (
        "" if any(body and isinstance(body[0], ast.Expr) and body[0].value is node for body in bodies) else node.value
    )


def violations(path, text):
    """What a file names of rooms that it may not know."""
    room = path.split("/")[0] if "/" in path else None
    if room is None or path == OLD_PATHS:
        return []
    assert room in ALLOWED, f"{room} is not in [tool.rooms]"
    may = {room, *ALLOWED[room], "data"}
    return [
        f"{path}:{line} names {name}: {room} may import {', '.join(ALLOWED[room]) or 'nothing'}"
        for name, line in named(ast.parse(text))
        if name.startswith("spr.") and name.split(".")[1] in {*ALLOWED, *doors()} - may
    ]


def doors():
    return {path.stem for path in SOURCE.glob("*.py")}


def test_every_room_imports_only_from_rooms_below_it():
    files = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert [fault for path, text in files.items() for fault in violations(path, text)] == []


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("common/errors.py", "from spr.config.config import Config", "spr.config.config.Config"),
        ("agent/replay.py", "def f():\n    from spr.training import learner", "spr.training.learner"),
        ("envs/atari.py", 'import_module("spr.runs.run_folder")', "spr.runs.run_folder"),
        ("ops/functional.py", 'run([sys.executable, "-c", "from spr.cli import main; main()"])', "spr.cli"),
        ("report/tables.py", "import spr.evaluation.film", "spr.evaluation.film"),
        ("runs/export.py", "from spr import api", "spr.api"),
    ],
)
def test_a_planted_violation_is_found(path, text, name):
    (fault,) = violations(path, text)
    assert f"{path}:" in fault
    assert f"names {name}" in fault


def test_rooms_are_in_order_and_each_says_what_it_owns():
    order = list(ALLOWED)
    assert sorted(order) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    assert all(order.index(other) < order.index(room) for room in order for other in ALLOWED[room])
    for room in order:
        (sentence,) = (ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or "").splitlines()
        assert sentence.startswith("Owns "), room


def test_doors_are_few_and_modules_are_small():
    assert len(doors()) <= DOORS, doors()
    lines = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_a_classs_name_means_one_thing():
    named = [
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in named if named.count(name) > 1} == set()


def test_tests_mirror_the_rooms():
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} == {*ALLOWED, "doors"}
