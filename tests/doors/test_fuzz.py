"""Damaged files of every kind: each is refused in a line, named as left out, or says the same (see fuzz.py)."""

import json
import random

import fuzz
import pytest

from spr.cli import main
from spr.report import build

MUTATIONS = 25  # of each; `tests/doors/fuzz.py` makes more


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return fuzz.whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", fuzz.SUBJECTS)
def test_what_is_damaged_is_refused_or_the_same(made, name):
    found = fuzz.fuzz(made, name, MUTATIONS)
    assert sum(found.values()) == MUTATIONS
    if fuzz.SUBJECTS[name].certain:
        assert found[fuzz.REFUSED] > 0.8 * MUTATIONS


def test_a_report_is_made_whatever_lies_beside_a_good_run(made, tmp_path, capsys):
    """Results of 0.12, which have no checksum: damaged ones that still make sense are drawn, others are named."""
    good = fuzz.unsealed((made.folder / fuzz.RESULT).read_bytes())
    metrics = (made.folder / "run" / "metrics.jsonl").read_bytes()
    for number in range(100):
        rng = random.Random(number)
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        result = json.dumps(json.loads(good) | {"seed": number}).encode()
        (folder / "result.json").write_bytes(result if number % 10 == 0 else fuzz.damaged(result, rng))
        (folder / "metrics.jsonl").write_bytes(metrics if number % 3 == 0 else fuzz.damaged(metrics, rng))
    made_of = build.write([tmp_path / "runs"], tmp_path / "out", draws=20)
    shown = (tmp_path / "out" / "runs.csv").read_text().count("\n") - 1
    assert shown >= 10
    assert len(made_of.left_out) == 100 - shown
    assert sum("learning curve" in line for line in made_of.notes) > 5
    assert all(line.isprintable() for line in [*made_of.left_out, *made_of.notes])
    assert "With lines of metrics.jsonl lost or changed" in (tmp_path / "out" / "index.html").read_text()
    assert capsys.readouterr().err == ""


def test_whole_files_are_used(made, tmp_path, capsys):
    """What all others are compared with."""
    run = str(made.folder / "run")
    assert main(["evaluate", run]) == 0
    assert main(["export", run, str(tmp_path / "card")]) == 0
    assert main(["evaluate", str(tmp_path / "card")]) == 0
    assert main(["report", run, "--out", str(tmp_path / "report")]) == 0
    assert "left out" not in capsys.readouterr().out
