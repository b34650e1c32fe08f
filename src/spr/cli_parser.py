"""Owns what the command line takes: the commands, their options, and what these mean."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from spr.common.errors import UserError, did_you_mean
from spr.common.version import __version__
from spr.experiments.sweep_plan import LARGEST_FLEET

Function = Callable[[argparse.Namespace, Console], int]  # carries a command out, and returns its exit code

_DEVICE_HELP = "auto, cpu, cuda or cuda:N (default: auto, the GPU if there is one)"
_PRECISION_HELP = "of matrix products while learning: fp32, tf32 or bf16 (default: auto, bf16 on a GPU, fp32 on a CPU)"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for command in self._subparsers_of(known) for option in command._option_string_actions]
            first = unknown[0]
            if not first.startswith("-") and "=" in first:
                raise UserError(f"'{first}' needs an option before it: each --set and each --env-arg takes one")
            raise UserError(f"unknown option '{first}'{did_you_mean(first, options)} (see 'spr --help')")
        return known

    def _subparsers_of(self, known: argparse.Namespace) -> list[argparse.ArgumentParser]:
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [group.choices[known.command] for group in groups]


def make_parser(functions: Mapping[str, Function]) -> argparse.ArgumentParser:
    """Make the parser of all commands; each is carried out by the function of its name."""
    parser = _Parser(prog="spr", description="Self-predictive representations: train, evaluate and time agents.")
    parser.add_argument("--version", action="version", version=f"spr {__version__}")
    groups = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = _Commands(groups, functions)

    _add_train(commands)
    _add_sweep(commands)
    evaluate = commands.add_parser("evaluate", help="play whole games with a trained agent")
    evaluate.add_argument(
        "folder", type=Path, metavar="RUN", help="a run's folder, such as runs/spr/pong/seed-0, or an exported agent"
    )
    evaluate.add_argument("--episodes", type=int, metavar="N", help="games to play (default: the run's own, 100)")
    evaluate.add_argument("--seed", type=int, metavar="N", help="seed of the games (default: the run's own)")
    evaluate.add_argument("--device", default="auto", help=_DEVICE_HELP)
    evaluate.add_argument("--json", action="store_true", help="print every score as JSON instead of a summary")

    _add_watch(commands)
    commands.add_parser("games", help="list the games")

    presets = commands.add_parser("presets", help="list the methods, or show one in full")
    presets.add_argument("name", nargs="?", help="a preset to show in full, with the meaning of every value")
    presets.add_argument("--all", action="store_true", help="list every point of the paper's figures too")

    bench_ = commands.add_parser("bench", help="time an update on this machine")
    bench_.add_argument(
        "--agents", type=int, nargs="+", default=[1], metavar="S", help="fleet sizes to time (default: 1)"
    )
    bench_.add_argument(
        "--games", nargs="+", default=["pong"], metavar="GAME", help="what the agents play in turn (default: pong)"
    )
    bench_.add_argument("--profile", action="store_true", help="show what a GPU does in an update, by kind of kernel")
    bench_.add_argument("--evaluation", action="store_true", help="also time how fast evaluation plays games")
    bench_.add_argument("--preset", default="spr", help="the method to time (default: spr)")
    bench_.add_argument("--device", default="auto", help=_DEVICE_HELP)
    bench_.add_argument("--precision", default="auto", help=_PRECISION_HELP)
    bench_.add_argument(
        "--against",
        metavar="REF",
        help="on a CPU: compare with the version of a commit or tag, both in turn; prints ratios",
    )
    bench_.add_argument("--rounds", type=int, default=7, help="rounds of such a comparison (default: 7)")
    bench_.add_argument("--json", action="store_true", help="print JSON instead of a table")

    export = commands.add_parser("export", help="write a run's agent for others")
    export.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, such as runs/spr/pong/seed-0")
    export.add_argument("target", type=Path, metavar="TARGET", help="a file such as agent.safetensors, or a folder")

    report_ = commands.add_parser("report", help="tables and figures of finished runs")
    report_.add_argument("folders", type=Path, nargs="+", metavar="RUNS", help="folders that hold runs, such as runs")
    report_.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")

    commands.add_parser("doctor", help="say what works on this machine")
    return parser


class _Commands:
    """Adds commands, each with the options that all of them have."""

    def __init__(self, groups: Any, functions: Mapping[str, Function]) -> None:
        self._groups, self._functions = groups, functions

    def add_parser(self, name: str, **about: Any) -> argparse.ArgumentParser:
        """Add one."""
        function = self._functions[name]
        parser: argparse.ArgumentParser = self._groups.add_parser(name, description=function.__doc__, **about)
        parser.set_defaults(run=function)
        parser.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="MODULE",
            help="a custom module to import first: it may register losses, encoders, presets and games",
        )
        return parser


def _add_train(commands: _Commands) -> None:
    train = commands.add_parser("train", help="train agents on games and evaluate them")
    train.add_argument(
        "games",
        nargs="+",
        metavar="GAME",
        help="catch, Atari games such as pong and ms_pacman ('spr games' lists them), Gymnasium ids (module:Name-v0), "
        "functions that make one (module:function); 'all' for Atari 100k's 26",
    )
    train.add_argument("--preset", default="spr", help="the method: one of 'spr presets' (default: spr)")
    train.add_argument(
        "--seeds",
        nargs="+",
        default=["0"],
        metavar="N",
        help="one agent per game and seed, trained as a fleet: numbers and ranges, such as 0 1 5-9 (default: 0)",
    )
    _add_run_options(train)
    train.add_argument("--overwrite", action="store_true", help="replace runs that are already in the way")
    train.add_argument("--resume", action="store_true", help="resume unfinished runs; finished ones are skipped")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    """Add what a training and a sweep are both asked for."""
    command.add_argument(
        "--name",
        help="a variant's folder under --out, for runs with --set (default: the preset's name; one preset at a time)",
    )
    command.add_argument(
        "--env-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of a Gymnasium environment, such as continuous=false",
    )
    command.add_argument("--steps", type=int, metavar="N", help="environment steps (default: the preset's, 100,000)")
    command.add_argument("--device", default="auto", help=_DEVICE_HELP)
    command.add_argument("--precision", default="auto", help=_PRECISION_HELP)
    command.add_argument("--out", type=Path, default=Path("runs"), help="folder that holds all runs (default: runs)")
    command.add_argument(
        "--checkpoint-every",
        type=int,
        default=5_000,
        metavar="N",
        help="steps between two checkpoints; 0 keeps one only when stopped (default: 5,000)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change any value of the preset, such as learner.depth=3; 'spr presets NAME' explains them all",
    )
    command.add_argument(
        "--log",
        nargs="+",
        default=[],
        metavar="NAME",
        help="also log to tensorboard, wandb or csv (default: metrics.jsonl and episodes.jsonl only)",
    )
    command.add_argument(
        "--log-every", type=int, metavar="N", help="steps between two rows of metrics (default: 100 rows in a run)"
    )


def _add_watch(commands: _Commands) -> None:
    watch_ = commands.add_parser("watch", help="play a game and write it as a film")
    watch_.add_argument(
        "folder", type=Path, metavar="RUN", help="a run's folder, also one that is still training, or an exported agent"
    )
    watch_.add_argument(
        "--out", type=Path, metavar="FILE", help="a .mp4 or .gif file (default: GAME-seed-N.mp4 here; none with --live)"
    )
    watch_.add_argument("--seed", type=int, metavar="N", help="seed of the game (default: the run's own)")
    watch_.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="the most to show of a game; each is a frame (default: 5,000)",
    )
    watch_.add_argument("--fps", type=int, default=15, metavar="N", help="frames a second (default: 15, as Atari runs)")
    watch_.add_argument("--live", action="store_true", help="open a window and show the game as it is played")
    watch_.add_argument("--overwrite", action="store_true", help="replace a film that is already there")
    watch_.add_argument("--device", default="auto", help=_DEVICE_HELP)


def _add_sweep(commands: _Commands) -> None:
    sweep_ = commands.add_parser("sweep", help="train methods x games x seeds")
    sweep_.add_argument("--presets", nargs="+", default=["spr"], metavar="NAME", help="the methods (default: spr)")
    sweep_.add_argument(
        "--games", nargs="+", required=True, metavar="GAME", help="the games, or 'all' for the 26 of Atari 100k"
    )
    sweep_.add_argument("--seeds", nargs="+", metavar="N", help="numbers and ranges, as for 'spr train' (default: 0-9)")
    sweep_.add_argument("--runs", type=int, metavar="N", help="how many of each, instead of --seeds: seeds 0 to N-1")
    _add_run_options(sweep_)
    sweep_.add_argument(
        "--agents",
        type=int,
        metavar="S",
        help=f"the most that are trained together, if they fit (default: {LARGEST_FLEET['cuda']} on a GPU, else "
        f"{LARGEST_FLEET['cpu']})",
    )
    sweep_.add_argument(
        "--together",
        type=int,
        metavar="N",
        default=1,
        help="fleets that train at a time (default: 1; on a GPU another may be evaluating meanwhile)",
    )
    sweep_.add_argument("--engine", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster")
    sweep_.add_argument("--address", help="the Ray cluster's (default: the one Ray finds, or a new one here)")
    sweep_.add_argument("--dry-run", action="store_true", help="print the plan with its expected time and memory")
