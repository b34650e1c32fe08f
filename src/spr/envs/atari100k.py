"""Owns the 26 games of Atari 100k: their names, published reference scores, and how a score is normalised."""

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from spr.common.errors import UserError

T = TypeVar("T", float, NDArray[np.float64])


@cache
def reference_table(name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of one of the package's reference files, such as 'atari100k_scores'."""
    text = files("spr").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def reference_scores(column: str) -> Mapping[str, float]:
    """Return the published score of every game for a column: random, human, dqn_50m, or a method's name."""
    rows = reference_table("atari100k_scores")
    if column == "game" or column not in rows[0]:
        raise UserError(f"no reference scores for '{column}'; there are {', '.join(list(rows[0])[1:])}")
    return {row["game"]: float(row[column]) for row in rows}


def game_names() -> tuple[str, ...]:
    """Return the 26 games, in the paper's order."""
    return tuple(reference_scores("random"))


def published_curves() -> dict[str, list[tuple[int, float]]]:
    """Return by game what SPR scores after some steps: means of evaluations, 49 runs of its authors' JAX version."""
    rows = reference_table("spr_learning_curve")
    steps = {column: 1_000 * int(column.removesuffix("k")) for column in rows[0] if column != "game"}
    return {row["game"]: [(step, float(row[column])) for column, step in steps.items()] for row in rows}


def ale_rom(game: str) -> str | None:
    """Return the MD5 of ale-py's ROM of one of the 26 games; None for other games."""
    return next((row["ale_py"] for row in reference_table("roms") if row["game"] == game), None)


class PublishedRom(NamedTuple):
    """The ROM of a game that published scores were made with: atari-py's."""

    md5: str
    different: str  # what an agent meets otherwise in ale-py's ROM: "pictures", "game and pictures", or nothing


def unlike_published(game: str, rom: str | None) -> str:
    """Say in what a game with this ROM (its MD5; None: ale-py's) differs from published runs; nothing: in nothing."""
    published = published_rom(game)
    return "" if published is None or rom == published.md5 else published.different


def published_rom(game: str) -> PublishedRom | None:
    """Return the ROM that published scores of a game were made with; None for a game outside the 26."""
    rows = (row for row in reference_table("roms") if row["game"] == game)
    return next((PublishedRom(row["atari_py"], row["different"]) for row in rows), None)


def normalised(game: str, score: float, by: str = "human") -> float | None:
    """Return (score - random) / (reference - random); None for a game outside the 26."""
    if game not in reference_scores("random"):
        return None
    return normalise(game, score, reference_scores(by)[game])


def normalise(game: str, score: T, reference: float) -> T:
    """Return a score, or an array of them, where random play of one of the 26 games is 0 and the reference 1."""
    random = reference_scores("random")[game]
    return (score - random) / (reference - random)
