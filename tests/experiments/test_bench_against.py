"""Comparing with an earlier version: both run the same work, and what can't be compared is refused."""

import json

import pytest

from spr.cli import main
from spr.experiments import bench_against
from spr.experiments.bench_against import Case, Comparison


@pytest.mark.slow
def test_a_version_is_compared_with_itself(monkeypatch, capsys):
    monkeypatch.setattr(
        bench_against, "cases", lambda precisions: [Case("rainbow", "catch", precision=precisions[0], times=1, warm=1)]
    )
    assert main(["bench", "--against", "HEAD", "--rounds", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["case"], row["what"], len(row["ratios"])) == ("rainbow on catch, 1 agent, fp32", "update", 3)
    assert min(row["before"], row["now"], *row["ratios"]) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--against", "no-such-commit"], "--against takes a commit or tag of this package's git repository: fatal"),
        (["--against", "HEAD", "--device", "cuda"], "--against compares versions on a CPU"),
        (["--against", "HEAD", "--rounds", "1"], "--rounds takes a number of at least 2"),
    ],
)
def test_what_can_not_be_compared_is_refused(options, words, capsys):
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


def test_ratios_are_those_of_neighbouring_rounds():
    result = Comparison(Case("spr"), 2.0, 1.0, [0.5, 0.25, 0.5, 1.0])
    assert (result.ratio, result.spread) == (0.5, (0.3125, 0.875))


def test_cases_name_what_they_are():
    titles = [case.title for case in bench_against.cases(["fp32"])]
    assert len(titles) == len(bench_against.cases(["fp32"]))
    assert "spr on pong, 4 agents, fp32" in titles
    assert titles[-1] == "spr on pong, 1 agent, fp32, beside 2 busy processes"
