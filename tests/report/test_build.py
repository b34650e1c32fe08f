"""Reports: what is in the tables and figures, what is left out and said, and the page in a real browser."""

import csv
import html
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from spr.cli import main
from spr.common.errors import UserError
from spr.config.config import Config, from_dict
from spr.config.presets import PRESETS, preset_config
from spr.envs.atari100k import game_names, normalised, reference_scores, reference_table
from spr.report import figures, learning_curves, protocol_sections, tables
from spr.report.build import front, write
from spr.report.plot_style import LACKING
from spr.report.published import IN_PAPER, METHODS
from spr.report.records import BENCHMARK, read, with_equal_games
from spr.report.tables import Method, methods_of, per_game, same_games
from spr.runs import compatibility

REPOSITORY = ROOT
RULES = {"name": "atari-100k", "version": 1, "training_steps": 100_000, "evaluation_episodes": 100}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def result(out, preset="spr", game="pong", seed=0, score=1.0, changes=None, name=None, **more):
    """Write a result by hand; `score` is that of its every episode."""
    config = preset_config(preset if preset != "mine" else "spr", game).override(changes or {})
    judged = {"training_steps": config.schedule.steps, "evaluation_epsilon": config.evaluation.epsilon}
    standard = config.evaluation == Config().evaluation and config.schedule.steps == 100_000
    protocol = RULES | judged | ({} if standard else {"name": "atari"})
    data = {
        "preset": preset,
        "game": game,
        "seed": seed,
        "steps": config.schedule.steps,
        "episodes": [score - 1, score + 1],
        "score": score,
        "human_normalised": normalised(game, score),
        "protocol": protocol,
        "train_seconds": 600.0,
        "eval_seconds": 60.0,
        "agents_together": 2,
        "precision": "bf16",
        "device": "a GPU",
        "version": "0",
        "config": config.to_dict(),
    }
    folder = Path(out) / (name or preset) / game / f"seed-{seed}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(data | more))
    rows = [{"step": step, "score": score * step / 100_000} for step in range(10_000, 110_000, 10_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def whole(out, preset="spr", seeds=2, share=1.0, games=None):
    """A set of runs whose mean scores are a share of the paper's SPR, above random play."""
    for game in games or game_names():
        low, high = reference_scores("random")[game], reference_scores("spr")[game]
        for seed in range(seeds):
            result(out, preset, game, seed, low + (high - low) * (share + 0.1 * (seed - (seeds - 1) / 2)))


MANY = {"learner.depth": 3, "replay.n_step": 5, "network.hidden": 128, "learner.learning_rate": 0.0005}


def catch(out, random_score=2.5, **about):
    """A result of a game that has no published score."""
    rules = RULES | {"name": "catch", "evaluation_epsilon": 0.001}
    return result(out, game="catch", protocol=rules, random_score=random_score, **about)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A report over two complete methods and one that lacks games, and one that lacks runs by another protocol."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("report")
    whole(runs)
    whole(runs, "rainbow", share=0.5)
    whole(runs, "der", share=0.3, games=game_names()[:4])
    for seed in range(2):
        catch(runs, seed=seed, score=8.0 + seed)
    catch(runs, score=9.0, changes=MANY, name="a-name-of-all-the-letters-that-it-may-be")
    return write([runs], out, draws=300), out


@pytest.mark.slow
def test_the_papers_own_scores_give_its_own_aggregates(full):
    """Runs whose means are the paper's per-game scores end in its Table 1."""
    row = next(row for row in rows_of(full[1] / "aggregates.csv") if (row["method"], row["source"]) == ("spr", "ours"))
    assert float(row["mean"]) == pytest.approx(0.703, abs=5e-4)
    assert float(row["median"]) == pytest.approx(0.415, abs=5e-4)
    assert float(row["mean, DQN-normalised"]) == pytest.approx(0.510, abs=5e-4)
    assert float(row["median, DQN-normalised"]) == pytest.approx(0.361, abs=5e-4)
    assert float(row["superhuman games"]) == 7
    assert row["runs"] == "26 games, 2 runs each"
    assert row["runs: note"] == ""
    for name in ("mean", "median", "IQM", "optimality gap"):
        assert float(row[f"{name}: low"]) < float(row[name]) < float(row[f"{name}: high"])
        interval = f"({float(row[f'{name}: low']):.3f} to {float(row[f'{name}: high']):.3f})"
        assert f"{float(row[name]):.3f} {interval}" in (full[1] / "front_page.md").read_text()  # drawn once for both


def test_every_run_is_in_the_table_of_games(full):
    rows = {row["game"]: row for row in rows_of(full[1] / "per_game.csv")}
    assert list(rows) == list(game_names())
    pong = rows["pong"]
    low, high = reference_scores("random")["pong"], reference_scores("spr")["pong"]
    assert float(pong["spr (ours)"]) == pytest.approx(high)
    assert float(pong["spr (ours): low"]) == pytest.approx(low + (high - low) * 0.95)
    assert pong["spr (ours): note"] == "2 runs"
    assert float(pong["SPR (paper)"]) == high
    assert pong["der (ours)"] == ""
    assert rows["alien"]["der (ours)"] != ""
    assert len(rows_of(full[1] / "runs.csv")) == 26 * 2 * 2 + 4 * 2 + 3


def test_incomplete_sets_are_marked_and_compared_on_the_same_games_only(full):
    out = full[1]
    row = next(row for row in rows_of(out / "aggregates.csv") if (row["method"], row["source"]) == ("der", "ours"))
    assert row["runs"] == "4 of 26 games, 2 runs each"
    assert row["runs: note"] == "incomplete"
    same = {(row["method"], row["source"]): row for row in rows_of(out / "same_games_1.csv")}
    four = [normalised(game, reference_scores("spr")[game]) for game in game_names()[:4]]
    assert float(same["SPR", "paper"]["mean"]) == pytest.approx(np.mean(four))
    assert float(same["der", "ours"]["mean"]) == pytest.approx(0.3 * np.mean(four))
    assert ("spr", "ours") in same  # it has these games, among others


def test_unequal_numbers_of_runs_are_incomplete_too():
    scores = {game: np.zeros(3) for game in game_names()}
    assert Method("m", scores).complete
    assert not Method("m", scores | {"pong": np.zeros(2)}).complete
    assert Method("m", scores | {"pong": np.zeros(2)}).runs_text() == "26 games, 2 to 3 runs each"
    random = np.random.default_rng(0)
    for lacking, words in (({"pong": np.zeros(2)}, "unequally many runs"), ({}, "Human-normalised")):
        assert words in tables.aggregates([Method("m", scores | lacking)], 20, random).notes[-1]
    few = tables.aggregates([Method("m", {"pong": np.zeros(3)})], 20, random)
    assert "must not be compared with rows of 26" in few.notes[-1]


def test_every_figure_is_a_png_beside_the_page_and_inside_it(full):
    report, out = full
    drawn = sorted(path.name for path in out.glob("*.png"))
    benchmark = ["box_plot.png", "by_game.png", "improvement.png", "iqm.png", "learning_curves.png"]
    assert drawn == [*benchmark, "other_1_curves.png", "other_1_scores.png", "profiles.png"]
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(drawn)
    assert "Prediction depth: needs" in page
    assert set(report.files) == set(out.iterdir())


def test_the_page_needs_nothing_from_elsewhere(full):
    page = (full[1] / "index.html").read_text()
    assert not re.findall(r"(?:src|href)=['\"](?!data:|#)[^'\"]*", page)
    assert "http" not in re.sub(r"base64,[^']*", "", page)


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(full, tmp_path):
    runs = Path(rows_first_path(full[1]))
    write([runs], tmp_path, draws=300)
    assert (tmp_path / "index.html").read_bytes() == (full[1] / "index.html").read_bytes()


def rows_first_path(out):
    """The folder of runs that a page was made of, from the path of its first run."""
    return re.search(r"; (/[^<]*?)/(?:spr|rainbow|der)/", (out / "index.html").read_text())[1]


def test_runs_with_roms_that_look_or_play_otherwise_are_never_put_together(tmp_path):
    rom = {row["game"]: row for row in reference_table("roms")}

    def played(game, seed, whose, **changes):
        rules = RULES | {"evaluation_epsilon": 0.001, "rom": rom[game][whose]} | changes
        result(tmp_path, game=game, seed=seed, protocol=rules)

    for seed, whose in ((0, "ale_py"), (1, "atari_py")):
        for game in ("pong", "ms_pacman", "bank_heist"):  # the same file; another that plays alike; other pictures
            played(game, seed, whose)
    played("bank_heist", 2, "ale_py", noop_max=0)
    played("pong", 2, "ale_py", noop_max=0)
    found = read([tmp_path])
    assert {record.protocol for record in found.records if record.seed < 2} == {BENCHMARK}
    assert len({record.protocol for record in found.records if record.seed == 2}) == 1  # two games, one protocol
    by_rom = {(record.game, record.seed): record.method for record in found.records}
    assert {where for where, method in by_rom.items() if method != "spr"} == {("bank_heist", 1)}
    assert by_rom["bank_heist", 1] == "spr (published ROMs)"
    said = [note for note in found.notes if "ROM differs" in note]
    assert said == ["bank_heist: ale-py's ROM differs from that of published scores in its pictures"]
    ours = with_equal_games([record for record in found.records if record.protocol == BENCHMARK])
    counted = {m.name: sorted(m.scores) for m in methods_of(ours)}
    assert counted == {name: ["bank_heist", "ms_pacman", "pong"] for name in ("spr", "spr (published ROMs)")}
    assert len([record for record in ours if record.game == "bank_heist"]) == 2
    # With none of ale-py's own pictures left, equal games are no method of their own.
    ours = with_equal_games([record for record in found.records if record.seed == 1])
    assert [(m.name, sorted(m.scores)) for m in methods_of(ours)] == [
        ("spr (published ROMs)", ["bank_heist", "ms_pacman", "pong"])
    ]


def test_a_papers_variant_stands_beside_ours_with_either_roms(tmp_path):
    rom = {row["game"]: row["atari_py"] for row in reference_table("roms")}
    for game in ("pong", "bank_heist"):
        result(tmp_path, "rainbow", game, protocol=RULES | {"evaluation_epsilon": 0.001, "rom": rom[game]})
    lines = front(read([tmp_path]).records, draws=50).splitlines()
    assert [line.split(" | ")[0] for line in lines if "rainbow" in line and "game" in line] == [
        "| game",
        "| rainbow (published ROMs), ours",
        "| rainbow, paper",
    ]


def test_files_of_earlier_versions_still_count_for_what_they_are(monkeypatch):
    """They name no ROM, no precision in config.json, and fewer values: what they do not name is as it was then."""
    found = sorted((REPOSITORY / "results" / "earlier" / "spr").rglob("result.json"))
    assert len(found) > 40

    def wanted(file, **changes):
        data = json.loads(file.read_text())
        config = from_dict(data["config"]).override(changes)
        return compatibility.ExpectedRun(
            data["preset"], data["game"], data["seed"], config, "bf16", exactly=True, log_every=1
        )

    for file in found:
        assert compatibility.finished_as(file.parent, wanted(file))
        with pytest.raises(UserError, match=r"holds a finished run with replay\.n_step 10, not 11"):
            compatibility.finished_as(file.parent, wanted(file, **{"replay.n_step": 11}))
    published = REPOSITORY / "results" / "earlier" / "spr-published-roms" / "bank_heist" / "seed-0" / "result.json"
    with pytest.raises(UserError, match="a finished run with protocol rom"):
        compatibility.finished_as(published.parent, wanted(published))
    # Runs of 0.6 were played with ale-py's ROMs, though they do not say so.
    monkeypatch.setattr(compatibility, "rom_of", lambda _: {"rom": "83b8c01c72306d60dd9b753332ebd276"})
    assert compatibility.finished_as(published.parent, wanted(published))
    older = next(file for file in found if "bank_heist" in file.parts)
    with pytest.raises(UserError, match="a finished run with protocol rom"):
        compatibility.finished_as(older.parent, wanted(older))


@pytest.mark.slow
def test_the_repositorys_own_results_can_be_reported(tmp_path):
    earlier = REPOSITORY / "results" / "earlier"
    report = write([earlier], tmp_path, draws=100)
    superseded = sorted((earlier / "superseded").rglob("result.json"))
    assert [line.split(":")[0] for line in report.left_out] == [str(file.parent) for file in superseded]
    records = read([earlier]).records
    published = [record for record in records if record.path.parts[-3] == "spr-published-roms"]
    assert {record.method for record in published} == {"spr (published ROMs)"}
    assert {record.protocol for record in records} == {BENCHMARK}


def test_the_tables_of_the_readme_and_the_scores_page_are_those_of_the_report():
    found = read([REPOSITORY / "results" / "spr", REPOSITORY / "results" / "rainbow"]).records
    assert {record.protocol for record in found} == {BENCHMARK}
    made = front(found)
    begin = "<!-- front_page.md of `spr report results/spr results/rainbow` -->\n"
    text = (REPOSITORY / "docs" / "results" / "scores.md").read_text(encoding="utf-8")
    assert text.split(begin)[1].split("<!-- end -->")[0] == made
    begin = "<!-- aggregates of `spr report results/spr results/rainbow` -->\n"
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert text.split(begin)[1].split("<!-- end -->")[0].strip() in made


def test_a_front_page_names_the_games_in_which_spr_is_not_where_its_authors_code_is(tmp_path):
    """By as many runs as there are: of single runs nine in ten are expected inside, of means of three 95%."""
    spread = {row["game"]: row for row in reference_table("spr_run_spread")}
    for game, row in spread.items():
        result(tmp_path / "one", game=game, score=float(row["p5"]) - (game == "pong") + 1e-9)
        for seed, more in enumerate((-1, 0, 1)):
            middle = float(row["mean_of_3_hi"]) - 1 if game in ("hero", "qbert") else float(row["mean_100"])
            result(tmp_path / "three", game=game, seed=seed, score=middle + more + 2 * (game == "qbert"))
    one, three = (front(read([tmp_path / name]).records, draws=50).splitlines() for name in ("one", "three"))
    assert one[-1] == "Means of spr outside the range of the authors' code (90% of single runs): below pong."
    assert three[-1] == ("Means of spr outside the range of the authors' code (95% of means of three): above qbert.")
    for seed in (3, 4):  # of one game more are known, which says more of it
        result(tmp_path / "three", game="hero", seed=seed, score=float(spread["hero"]["mean_of_3_hi"]) - 1)
    assert front(read([tmp_path / "three"]).records, draws=50).splitlines()[-1] == (
        "Means of spr outside the range of the authors' code (95% of means of three, 95% of means of five: the "
        "most that a game has runs for): above hero, qbert."
    )


def test_what_was_published_of_later_agents_stands_beside_ours_where_one_was_played(full, tmp_path):
    assert not any("BBF" in column for column in rows_of(full[1] / "per_game.csv")[0])
    for game in game_names():
        result(tmp_path, "bbf", game)
    found = read([tmp_path]).records
    table = per_game(methods_of(found), 50, np.random.default_rng(0))
    breakout = dict(zip(table.columns, next(row for row in table.rows if row[0].value == "breakout"), strict=True))
    assert breakout["BBF, 14 runs"].value == 331.1
    assert breakout["SR-SPR with 16 updates per step (recalled)"].value == 25.5
    assert "BBF RR2, published" in front(found, draws=50)
    result(tmp_path, "sr_spr", "pong")
    (same,) = same_games(methods_of(read([tmp_path]).records))
    means = {row[0].value: row[2].value for row in same.rows if row[1].value == "published"}
    assert means["BBF, 14 runs"] == pytest.approx(normalised("pong", 13.7))
    assert "SR-SPR RR16, recalled" in front(read([tmp_path]).records, draws=50)
    assert "BBF" not in front(read([REPOSITORY / "results" / "spr"]).records, draws=50)


def test_what_a_front_page_has_of_published_methods_is_published_under_that_name():
    names = {row["method"] for row in reference_table("published_aggregates")} | set(IN_PAPER.values())
    assert set(METHODS) - {"simple"} <= set(PRESETS)
    assert {name for method in METHODS.values() for name in method.aggregates} <= names


def test_depth_and_ema_by_hand():
    def method(name, *scores):
        games = ("pong", "boxing", "alien")
        chance = reference_scores("random")
        return Method(name, {g: np.array([chance[g] + s]) for g, s in zip(games, scores, strict=True)})

    depths = [method("spr", 10, 10, 10), method("spr_k1", 5, 10, 30), method("spr_k2", 20, 20, 20)]
    assert figures._shares(depths[1], ["pong", "boxing", "alien"], means(depths[0])) == pytest.approx([0.5, 1, 3])
    drawn = figures.depth(depths)
    assert "3 games" in drawn.words
    assert "our spr runs" in drawn.words
    assert "paper's SPR" in figures.depth(depths[1:]).words
    assert figures.depth(depths[:2]) is None
    taus = [method("spr_ema_0.5783", 10, 10, 10), method("spr_ema_0", 30, 10, 30), method("spr_ema_0_noaug", 1, 1, 1)]
    assert [drawing.name for drawing in figures.ema(taus)] == ["ema"]  # of the other kind there is but one


def means(method):
    return {game: float(scores.mean()) for game, scores in method.scores.items()}


def test_a_changed_preset_is_another_method_and_another_budget_another_protocol(tmp_path):
    result(tmp_path / "a")
    result(tmp_path / "b", changes={"learner.depth": 3})
    result(tmp_path / "c", changes={"schedule.steps": 5_000})
    result(tmp_path / "d", preset="drq")  # prescribes its own epsilon
    result(tmp_path / "e", preset="mine")
    result(tmp_path / "f", changes={"evaluation.max_steps": 200}, seed=1)
    # Version 0.15.1 and before called this Atari 100k, and named no limit.
    result(
        tmp_path / "g", changes={"evaluation.max_steps": 200}, seed=2, protocol=RULES | {"evaluation_epsilon": 0.001}
    )
    result(tmp_path / "h", changes={"evaluation.max_steps": 300})
    found = read([tmp_path])
    said = {record.path.relative_to(tmp_path).parts[0]: (record.method, record.protocol) for record in found.records}
    assert said["a"] == ("spr", BENCHMARK)
    assert said["b"] == ("spr (depth 3)", BENCHMARK)
    assert said["c"] == ("spr", "atari, 5,000 steps, 100 games, epsilon 0.001")
    assert said["d"] == ("drq", BENCHMARK)
    assert said["e"] == ("mine (not a preset here)", BENCHMARK)
    assert said["f"] == ("spr", "atari, 100,000 steps, 100 games, epsilon 0.001, 200 steps a game at most")
    assert said["g"] == said["f"]
    assert said["h"] == ("spr", "atari, 100,000 steps, 100 games, epsilon 0.001, 300 steps a game at most")
    assert any("4 protocols, which are never put together" in note for note in found.notes)
    assert any("drq is evaluated with epsilon 0.05" in note for note in found.notes)
    write([tmp_path], tmp_path / "out", draws=50)
    assert len(rows_of(tmp_path / "out" / "other_1.csv")) == 1
    named = [row["method"] for row in rows_of(tmp_path / "out" / "aggregates.csv") if row["source"] == "ours"]
    assert named == ["spr", "spr (depth 3)", "drq", "mine (not a preset here)"]


def test_another_way_of_playing_under_the_same_name_is_not_mixed_in(tmp_path):
    result(tmp_path / "a")
    result(tmp_path / "b", seed=1, protocol=RULES | {"version": 2, "evaluation_epsilon": 0.001})
    assert [record.protocol for record in read([tmp_path]).records] == [BENCHMARK, f"{BENCHMARK}, variant 2"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"score": math.nan}, "'score' is not a finite number"),
        ({"episodes": [1.0, math.nan]}, "episodes are not all finite"),
        ({"episodes": []}, "episodes are not all finite"),
        ({"episodes": "many"}, "episodes are not all finite"),
        ({"score": 3.0}, "is not the mean of its episodes"),
        ({"seed": "0"}, "seed is not a whole number"),
        ({"game": 7}, "'game' is not a string"),
        ({"train_seconds": None}, "'train_seconds' is not a finite number"),
        ({"protocol": "atari"}, "protocol is missing"),
        ({"random_score": math.nan}, "'random_score' is not a finite number"),
        ({"random_score": "2.6"}, "'random_score' is not a finite number"),
        ({"score": 10**400}, "'score' is not a finite number"),
        ({"agents_together": 0}, "'agents_together' is less than 1"),
        ({"train_seconds": 10**400}, "'train_seconds' is not a finite number"),
        ({"config": {"learner": {"aux_weight": 10**400}}}, "aux_weight takes a number, not one of 401 digits"),
        (
            {"config": {"learner": {"aux_loss": "\x1b[31m"}}},
            "aux_loss must be a name of at most 200 printable characters",
        ),
        ({"config": {"\x1b[31m\n": 1}}, r"configuration entry '\x1b[31m\n' must be a group of values"),
        ({"seed": 2**31}, "seed is not a whole number from 0 to 2147483647"),
        ({"sha256": "0"}, "it is not as it was written: its checksum does not match"),
        ({"protocol": json.loads("[" * 200 + "]" * 200)}, "it is nested too deeply"),
        ({"game": "\ud800"}, "'game' is not a line of at most 200 printable characters"),
        ({"game": "a" * 201}, "'game' is not a line of at most 200 printable characters"),
        ({"config": {"learner": {"depth": "deep"}}}, "configuration can't be read"),
        ({"config": None}, "configuration can't be read"),
    ],
)
def test_bad_results_are_left_out_and_named_and_the_rest_is_reported(change, complaint, tmp_path, capsys):
    result(tmp_path / "good")
    bad = result(tmp_path / "bad")
    data = json.loads((bad / "result.json").read_text())
    (bad / "result.json").write_text(json.dumps(data | change))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert len(said) == 1
    assert str(bad) in said[0]
    assert complaint in said[0]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Left out" in page
    assert len(rows_of(tmp_path / "out" / "runs.csv")) == 1


def test_torn_foreign_and_missing_files(tmp_path):
    result(tmp_path / "good")
    for name, text in (("torn", '{"preset": "spr", "ga'), ("list", "[1, 2]"), ("deep", "[" * 100_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    found = read([tmp_path, tmp_path / "nowhere", tmp_path / "torn" / "result.json"])
    assert len(found.records) == 1
    assert len(found.left_out) == 5
    assert any("no such folder" in line for line in found.left_out)


def test_games_outside_the_benchmark_are_in_no_aggregate(tmp_path):
    result(tmp_path / "a")
    rules = RULES | {"name": "atari", "evaluation_epsilon": 0.001}
    result(tmp_path / "b", game="catch", protocol=rules | {"name": "catch"})
    result(tmp_path / "c", game="tetris", protocol=rules)
    write([tmp_path], tmp_path / "out", draws=50)
    row = next(row for row in rows_of(tmp_path / "out" / "aggregates.csv") if row["source"] == "ours")
    assert row["runs"].startswith("1 of 26 games")
    others = [rows_of(tmp_path / "out" / f"other_{number}.csv")[0]["game"] for number in (1, 2)]
    assert others == ["catch", "tetris"]


def test_a_report_without_any_run_of_the_benchmark(tmp_path):
    result(tmp_path, game="catch", protocol=RULES | {"name": "catch"})
    report = write([tmp_path], tmp_path / "out", draws=50)
    assert any("no run followed the protocol" in note for note in report.notes)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "no run followed the protocol" in page
    assert page.count("<figure") == 2


def test_every_protocol_has_scores_and_learning_curves_normalised_by_what_is_known(tmp_path):
    rules = RULES | {"name": "gymnasium", "evaluation_epsilon": 0.001}
    for seed, chance in ((0, 2.0), (1, 3.0)):
        catch(tmp_path, chance, seed=seed, score=10.0 - 5 * seed)
        for game, measured in (("below", -20.0), ("zero", 0.0), ("unknown", None)):
            result(tmp_path, game=game, seed=seed, score=-15.0, random_score=measured, protocol=rules)
        result(tmp_path, game="boxing", seed=seed, score=6.1, changes={"schedule.steps": 5_000})
    report = write([tmp_path], tmp_path / "out", draws=50)
    found = {row["game"]: row for n in (1, 2, 3) for row in rows_of(tmp_path / "out" / f"other_{n}.csv")}
    drawn = sorted(path.name for path in report.files if path.suffix == ".png")
    assert drawn == [f"other_{n}_{what}.png" for n in (1, 2, 3) for what in ("curves", "scores")]
    assert float(found["catch"]["random agent"]) == 2.5
    assert float(found["catch"]["relative to random"]) == (7.5 - 2.5) / 2.5
    assert float(found["catch"]["relative to random: low"]) == (5.0 - 2.5) / 2.5
    assert "human-normalised" not in found["catch"]
    assert float(found["below"]["relative to random"]) == 0.25  # better than random, though both are negative
    assert [found[game]["relative to random"] for game in ("zero", "unknown")] == ["", ""]
    assert [found[game]["random agent"] for game in ("zero", "unknown")] == ["0.0", ""]
    assert float(found["boxing"]["human-normalised"]) == pytest.approx(0.5)
    assert protocol_sections.Scale(1e-300, None).of(5.0) == 5.0  # what can't be told from 0 is not divided by
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("Relative to random, where no human score exists: (score - random) / |random|") == 2
    assert page.count("Human-normalised: (score - random) / (human - random)") == 1
    assert page.count("agent&#39;s score is 0 or was not measured: unknown, zero.") == 1


def test_curves_are_drawn_where_runs_have_points_in_common_and_missed_where_not(tmp_path):
    first, second = (catch(tmp_path, seed=seed) for seed in range(2))
    (second / "metrics.jsonl").write_text('{"step": 7, "score": 1.0}\n')
    report = write([tmp_path], tmp_path / "out", draws=50)
    assert not any("curves" in path.name for path in report.files)
    assert "Learning curves: needs metrics.jsonl" in (tmp_path / "out" / "index.html").read_text()
    (second / "metrics.jsonl").write_text("torn")
    report = write([tmp_path], tmp_path / "out", draws=50)
    assert any("curves" in path.name for path in report.files)
    assert "not in here: 1 run." in (tmp_path / "out" / "index.html").read_text()
    assert len(read([first]).records[0].curve) == 10


def test_methods_have_short_names_and_a_table_says_what_they_stand_for(tmp_path):
    result(tmp_path / "a", changes={"learner.depth": 3, "network.dueling": False})
    result(tmp_path / "b", changes=MANY)
    result(tmp_path / "c", changes=MANY | {"learner.depth": 4})
    result(tmp_path, changes=MANY | {"learner.depth": 2}, name="shallow")
    result(tmp_path, changes={"learner.depth": 2}, name="rainbow")  # would be taken for another preset
    result(tmp_path / "d", changes={"learner.depth": 1}, name="same")
    result(tmp_path / "e", changes={"learner.depth": 6}, name="same")  # one name, two methods
    result(tmp_path / "f", changes={"schedule.steps": 5_000}, name="brief")  # another protocol, not another method
    found = {
        str(record.path.relative_to(tmp_path)).removesuffix("/pong/seed-0"): record.method
        for record in read([tmp_path]).records
    }
    assert found == {
        "a/spr": "spr (dueling false, depth 3)",
        "b/spr": "spr, variant 2",
        "c/spr": "spr, variant 3",
        "shallow": "shallow",
        "rainbow": "spr (depth 2)",
        "d/same": "spr (depth 1)",
        "e/same": "spr (depth 6)",
        "f/brief": "spr",
    }
    write([tmp_path], tmp_path / "out", draws=50)
    rows = rows_of(tmp_path / "out" / "methods.csv")
    said = {
        row["field"]: (row["preset"], row["value"], row["usual value"]) for row in rows if row["method"] == "shallow"
    }
    assert said == {
        "network.hidden": ("spr", "128", "256"),
        "replay.n_step": ("spr", "5", "10"),
        "learner.depth": ("spr", "2", "5"),
        "learner.learning_rate": ("spr", "0.0005", "0.0001"),
    }
    assert {row["method"] for row in rows} == set(found.values()) - {"spr"}


def test_runs_without_a_result_are_named(tmp_path):
    result(tmp_path)
    for seed in (1, 2):
        folder = result(tmp_path, seed=seed)
        (folder / "result.json").rename(folder / "config.json")
    assert read([tmp_path]).left_out == [f"{tmp_path}/spr/pong: no result yet (unfinished or diverged): seed-1, seed-2"]


def test_incomplete_sets_have_hollow_markers_a_label_and_a_legend(monkeypatch):
    monkeypatch.setattr(figures, "drawing", lambda *parts: parts[-1])
    rng = np.random.default_rng(0)
    full = Method("full", {game: rng.normal(size=3) for game in game_names()})
    few = Method("few", {game: rng.normal(size=3) for game in game_names()[:4]})
    uneven = Method("uneven", full.scores | {"pong": np.zeros(2)})
    for draw in (figures.iqms, figures.profiles, figures.improvement):
        assert legend(draw([full, full._replace(name="other")], 50, rng))[-1] != LACKING
        for lacking, label in ((few, "4 of 26 games"), (uneven, "2 to 3 runs")):
            drawn = draw([full, lacking], 50, rng)
            assert LACKING in legend(drawn)
            assert hollow(drawn)
            said = [*legend(drawn), *(text.get_text() for text in drawn.axes[0].get_yticklabels())]
            assert any(label in text for text in said) or draw is figures.improvement
        assert not hollow(draw([full, full._replace(name="other")], 50, rng))
    boxes = figures.box_plot([full, few])
    assert "hatched: ours, lacks games or runs" in legend(boxes)
    assert "few\n(ours, 4 of 26 games)" in [text.get_text() for text in boxes.axes[0].get_yticklabels()]


def test_incomplete_sets_of_other_protocols_are_marked_too(tmp_path, monkeypatch):
    for seed in range(3):
        catch(tmp_path, seed=seed)
    catch(tmp_path, preset="rainbow")
    records = read([tmp_path]).records
    for module in (learning_curves, protocol_sections):
        monkeypatch.setattr(module, "drawing", lambda *parts: parts[-1])
    section = protocol_sections.other(1, "catch", records, 50, np.random.default_rng(0))
    for drawn in section.drawings:
        assert LACKING in legend(drawn)
        assert hollow(drawn)
    assert "rainbow (1 of 3 runs)" in legend(section.drawings[1])
    assert "rainbow\n(1 of 3 runs)" in [text.get_text() for text in section.drawings[0].axes[0].get_yticklabels()]
    assert [row[2].note for row in section.tables[0].rows] == ["", "incomplete: 1 of 3 runs"]
    whole_set = [record for record in records if record.method == "spr"]
    for drawn in protocol_sections.other(1, "catch", whole_set, 50, np.random.default_rng(0)).drawings:
        assert LACKING not in legend(drawn)
        assert not hollow(drawn)


def legend(figure):
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def hollow(figure):
    """Whether a marker of a figure's panels is hollow."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return any(line.get_markerfacecolor() == "white" and line.get_marker() not in ("", "None") for line in lines)


def test_the_same_run_twice_counts_once(tmp_path):
    result(tmp_path / "a")
    result(tmp_path / "b")
    result(tmp_path / "c", score=9.0)
    assert read([tmp_path / "a", tmp_path / "b" / ".." / "a"]).left_out == []  # one folder, named twice
    found = read([tmp_path])
    assert len(found.records) == 1
    assert "the same run is in" in found.left_out[0]
    assert "another result of the same method and seed is in" in found.left_out[1]


def test_of_two_versions_of_a_run_the_newer_one_counts(tmp_path):
    for name, version, score in (("a", "0.6.1", 1.0), ("b", "0.13.0", 2.0), ("c", "0.9.2", 3.0)):
        result(tmp_path / name, score=score, version=version)
    found = read([tmp_path])
    assert [record.about["version"] for record in found.records] == ["0.13.0"]
    assert len(found.left_out) == 2
    assert all(f"is in {tmp_path / 'b'}" in line for line in found.left_out)


def test_runs_of_different_precision_are_counted_together_and_said(tmp_path):
    result(tmp_path)
    result(tmp_path, seed=1, precision="fp32")
    result(tmp_path, seed=2, precision="fp32", game="boxing")
    assert read([tmp_path]).notes == ["spr: runs of precision bf16 and fp32 are counted together"]


@pytest.mark.parametrize("where", ["empty", "nowhere"])
def test_no_runs_at_all_is_one_line_and_nothing_is_written(where, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / where), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("spr: no finished runs: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_is_not_written_over_a_file(tmp_path, capsys):
    result(tmp_path / "a")
    (tmp_path / "out").write_text("mine")
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_names_from_files_can_not_bring_code_into_the_page(tmp_path):
    nasty = "<script>alert(1)</script>'\"&"
    result(tmp_path / "a", device=nasty, version=nasty)
    result(tmp_path / "b", protocol=RULES | {"name": nasty}, game="catch")
    for seed, game in enumerate((nasty.replace("/", ""), r"$\frac{$", "_")):
        result(tmp_path / "c", protocol=RULES | {"name": "gymnasium", "id": game}, game=game, seed=seed)
    result(tmp_path / os.fsdecode(b"\xff"), protocol=RULES | {"name": "\ud800"}, game="catch", seed=7)
    write([tmp_path], tmp_path / "out", draws=50)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script>alert" not in page
    seen = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: seen.append(tag)
    parser.feed(page)
    assert seen.count("script") == 1


def test_no_name_is_a_formula_in_a_csv_file_and_numbers_stay_numbers(tmp_path):
    formulas = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "=cmd|' /C calc'!A0"]
    for seed, formula in enumerate(formulas):
        rules = RULES | {"name": "gymnasium", "id": formula}
        folder = result(tmp_path / "a", name="b", protocol=rules, game="c", seed=seed, score=-20.0, device=formula)
        made = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(made | {"game": formula, "preset": formula}))
    catch(tmp_path / "d", changes={"network.v_min": -12.0, "learner.aux_loss": "=1+1"})
    write([tmp_path / "a", tmp_path / "d"], tmp_path / "out", draws=20)
    for file in (tmp_path / "out").glob("*.csv"):
        for row in csv.reader(file.open()):
            for cell in row:
                numbers = re.fullmatch(r"[-+.e\d ]+", cell) and not re.search(r"\d\+", cell)
                assert numbers or not cell.startswith(("=", "+", "-", "@")), cell
    rows = rows_of(tmp_path / "out" / "runs.csv")
    assert {row["game"] for row in rows} == {*(f"'{formula}" for formula in formulas), "catch"}
    assert [row["score"] for row in rows[:5]] == ["-20.0"] * 5
    assert rows[0]["episodes"] == "-21 -19"
    changes = rows_of(tmp_path / "out" / "methods.csv")
    assert {row["value"] for row in changes} == {"-12.0", "'=1+1"}


def test_a_curve_that_lost_lines_says_so_and_keeps_the_others(tmp_path):
    folder = result(tmp_path)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    whole = read([tmp_path]).records[0]
    assert (len(whole.curve), whole.lost) == (10, "")
    garbage = [
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"7\n",
        b'{"step": 1e999}\n',
        lines[2][:9],
        lines[1].replace(b"0.2", b'"0.2"'),
    ]
    for bad in garbage:
        (folder / "metrics.jsonl").write_bytes(b"".join([lines[0], bad, *lines[3:]]))
        (record,), _, notes = read([tmp_path])
        lost = 2 if bad.endswith(b"\n") else 3  # what is cut takes the line after it along
        assert notes == [f"{folder}: its learning curve lacks {lost} lines of metrics.jsonl, lost or damaged"]
        assert record.curve == (whole.curve[0], *whole.curve[1 + lost :])
    for kept, lost in ((lines[:6], "4 lines"), (lines[1:], "1 line"), ([*lines[:5], *lines[6:]], "1 line")):
        (folder / "metrics.jsonl").write_bytes(b"".join(kept))
        assert f"its learning curve lacks {lost} of" in read([tmp_path]).records[0].lost
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert read([tmp_path]).records[0].lost == (
        "its metrics.jsonl can't be read, so it has no learning curve: it is no plain file"
    )


def test_a_single_run_has_no_interval():
    assert tables._mean_cell(np.array([3.0]), 10, np.random.default_rng(0)).interval() == ""
    assert tables._mean_cell(np.array([3.0, 4.0]), 100, np.random.default_rng(0)).interval() == "3.0 to 4.0"


PROBE = """<script>
const say = {};
const table = document.querySelector("#aggregates");
const column = (n) => [...table.tBodies[0].rows].map((row) => row.cells[n].dataset.value);
const heads = [...table.tHead.rows[0].cells];
const place = heads.findIndex((head) => head.innerText.trim().startsWith("mean"));
heads[place].querySelector("button").click();
say.down = column(place); say.sort = heads[place].getAttribute("aria-sort");
heads[place].querySelector("button").click();
say.up = column(place);
heads[0].querySelector("button").click();
say.words = column(0);
say.images = [...document.images].map((image) => image.complete && image.naturalWidth);
say.filled = [...document.images].map((image) => image.getBoundingClientRect().width / image.parentElement.clientWidth);
say.figures = [...document.querySelectorAll("figure")].map((figure) => figure.getBoundingClientRect().width);
say.scroll = [...document.querySelectorAll(".wide")].map((box) => [box.scrollWidth, box.clientWidth]);
say.beyond = [...document.body.querySelectorAll(":not(.wide *)")]
  .filter((element) => element.getBoundingClientRect().right > innerWidth).map((element) => element.tagName);
say.width = [document.documentElement.scrollWidth, innerWidth];
say.rows = document.querySelectorAll("details").length;
const pre = document.createElement("pre");
pre.id = "probe"; pre.textContent = JSON.stringify(say);
parent.document.body.append(pre);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_in_a_browser(full, width, tmp_path):
    """In a frame, since a window is at least 500 pixels wide."""
    page = tmp_path / "probed.html"
    probed = (full[1] / "index.html").read_text().replace("</body>", PROBE + "</body>")
    look = f"border:0; width:{width}px; height:900px"
    page.write_text(
        f"<!doctype html><meta charset='utf-8'><iframe style='{look}' srcdoc='{html.escape(probed)}'></iframe>"
    )
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,900", "--enable-logging=stderr"]
    home = f"--user-data-dir={tmp_path / 'home'}"
    seen = subprocess.run(
        [CHROMIUM, *arguments, home, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in seen.stderr
    said = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', seen.stdout, re.S)[1].replace("&amp;", "&"))
    numbers = [float(value) for value in said["down"] if value]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 10
    assert said["sort"] == "descending"
    assert [float(value) for value in said["up"] if value] == sorted(numbers)
    assert [value == "" for value in said["down"]] == sorted(value == "" for value in said["down"])  # empty ones last
    assert said["words"][0] == "BBF RR2"
    assert said["words"][-1].startswith("SR")
    assert len(said["images"]) == 8
    assert min(said["images"]) > 300
    assert said["width"][1] == width
    assert said["width"][0] <= width  # wide tables scroll inside, the page does not
    assert not said["beyond"]
    assert any(inside > box for inside, box in said["scroll"])
    assert said["filled"] == pytest.approx([1] * 8, abs=0.01)
    page_width = min(width, 76 * 16)
    assert min(said["figures"]) > (0.9 if width == 390 else 0.45) * page_width  # two side by side where there is room
    assert said["rows"] >= 112
