"""Owns the command line: thin commands over the package, errors as one line with exit code 2."""

import argparse
import json
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spr import __version__, bench, runs
from spr.config import Config, fields, parse_override
from spr.display import Bar, StopRequest
from spr.envs import known_games, make, rom_problem
from spr.errors import UserError, did_you_mean
from spr.evaluate import play
from spr.games import game_names, normalised, reference_table
from spr.machine import DEVICES, choose_device, choose_precision, device_name, free_memory, product_dtype, tune
from spr.presets import PRESETS, preset_config
from spr.replay import memory_needed
from spr.representations import known as known_representations
from spr.train import Fleet, Tick, assemble, train

_INTERRUPTED = 130
_PRECISION_HELP = "of matrix products while learning: fp32, tf32 or bf16 (default: auto, bf16 on a GPU, fp32 on a CPU)"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for command in self._subparsers_of(known) for option in command._option_string_actions]
            raise UserError(f"unknown option '{unknown[0]}'{did_you_mean(unknown[0], options)} (see 'spr --help')")
        return known

    def _subparsers_of(self, known: argparse.Namespace) -> list[argparse.ArgumentParser]:
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [group.choices[known.command] for group in groups]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    console = Console()
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args, console)
    except UserError as error:
        print(f"spr: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spr: stopped at once; the run's folder has no result", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="spr", description="Self-predictive representations: train, evaluate and time agents.")
    parser.add_argument("--version", action="version", version=f"spr {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("train", help="train agents on a game and evaluate them", description=_train.__doc__)
    one.add_argument("game", help="catch, an Atari game such as pong or ms_pacman, or a Gymnasium id (module:Name-v0)")
    one.add_argument("--preset", default="spr", help="the method: one of 'spr presets' (default: spr)")
    one.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="one agent per seed, trained as a fleet (default: 0)",
    )
    one.add_argument("--steps", type=int, metavar="N", help="environment steps (default: the preset's, 100,000)")
    one.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto, the GPU if there is one)")
    one.add_argument("--precision", default="auto", help=_PRECISION_HELP)
    one.add_argument("--out", type=Path, default=Path("runs"), help="folder that holds all runs (default: runs)")
    one.add_argument("--overwrite", action="store_true", help="replace runs that are already in the way")
    one.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change any value of the preset, such as learner.depth=3; 'spr presets NAME' explains them all",
    )
    one.set_defaults(run=_train)

    two = commands.add_parser("evaluate", help="play whole games with a trained agent", description=_evaluate.__doc__)
    two.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, such as runs/spr/pong/seed-0")
    two.add_argument("--episodes", type=int, metavar="N", help="games to play (default: the run's own, 100)")
    two.add_argument("--seed", type=int, metavar="N", help="seed of the games (default: the run's own)")
    two.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    two.add_argument("--json", action="store_true", help="print every score as JSON instead of a summary")
    two.set_defaults(run=_evaluate)

    three = commands.add_parser("presets", help="list the methods, or show one in full", description=_presets.__doc__)
    three.add_argument("name", nargs="?", help="a preset to show in full, with the meaning of every value")
    three.set_defaults(run=_presets)

    four = commands.add_parser("bench", help="time an update on this machine", description=_bench.__doc__)
    four.add_argument(
        "--agents", type=int, nargs="+", default=[1], metavar="S", help="fleet sizes to time (default: 1)"
    )
    four.add_argument("--game", default="pong", help="the game to step (default: pong)")
    four.add_argument("--preset", default="spr", help="the method to time (default: spr)")
    four.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    four.add_argument("--precision", default="auto", help=_PRECISION_HELP)
    four.add_argument("--json", action="store_true", help="print JSON instead of a table")
    four.set_defaults(run=_bench)

    five = commands.add_parser("doctor", help="say what works on this machine", description=_doctor.__doc__)
    five.set_defaults(run=_doctor)
    return parser


def _train(args: argparse.Namespace, console: Console) -> int:
    """Train one agent per seed on a game, play the evaluation's games, and store everything under OUT/PRESET/GAME/."""
    changes = dict(parse_override(text) for text in args.set)
    if args.steps is not None:
        changes["schedule.steps"] = args.steps
    config = preset_config(args.preset, args.game).override(changes)
    seeds = _seeds(args.seeds)
    device = choose_device(args.device)
    precision = choose_precision(args.precision, device)
    tune(device, precision)
    _refuse_too_large(config, len(seeds), device)
    paths = [runs.folder(args.out, args.preset, args.game, seed) for seed in seeds]
    runs.refuse_taken(paths, args.overwrite)
    envs = make(args.game, len(seeds))
    try:
        mine = [
            runs.Run(path, args.preset, args.game, seed, config, envs.protocol)
            for path, seed in zip(paths, seeds, strict=True)
        ]
        fleet = assemble(config, envs, seeds, device, product_dtype(precision))
        runs.create(mine)
        console.print(f"{args.preset} on {args.game}, seeds {' '.join(map(str, seeds))}, {device_name(device)}")
        steps, seconds = _learn(console, fleet, mine)
        for i, run in enumerate(mine):
            runs.save_agent(run, {name: p[i] for name, p in fleet.state.params.items()})
    finally:
        envs.close()
    if steps < config.schedule.steps:
        console.print(f"stopped after {steps:,} steps; the agent so far can be played: spr evaluate {paths[0]}")
        return _INTERRUPTED
    trained = {"train_seconds": round(seconds, 1), "precision": precision}
    _summary(console, args.out, _judge(console, fleet, mine, trained))
    return 0


def _refuse_too_large(config: Config, agents: int, device: torch.device) -> None:
    need, free = memory_needed(config, agents), free_memory(device)
    if need > free:
        raise UserError(
            f"the replay of {agents} agents takes {need / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free "
            f"on the {device.type}: train fewer seeds at once, or set a smaller replay.capacity"
        )


def _learn(console: Console, fleet: Fleet, mine: Sequence[runs.Run]) -> tuple[int, float]:
    """Train to the end, or until somebody asks to stop; return the steps made and the seconds they took."""
    began = time.monotonic()
    last: list[dict[str, Any]] = []
    with StopRequest() as stop, Bar(console, "training", fleet.config.schedule.steps, "steps") as bar:
        for tick in train(fleet):
            last = tick.rows or last
            bar.show(tick.step, _figures(tick, last))
            if tick.rows:
                for run, row in zip(mine, tick.rows, strict=True):
                    runs.log(run, row | {"seconds": round(time.monotonic() - began, 3)})
            if stop.check():
                break
    return tick.step, time.monotonic() - began


def _judge(console: Console, fleet: Fleet, mine: Sequence[runs.Run], trained: dict[str, Any]) -> list[dict[str, Any]]:
    """Play the evaluation's games and store the results; where no random score is published, measure one beside."""
    began = time.monotonic()
    config, game, params = fleet.config, mine[0].game, dict(fleet.state.params)
    episodes = _play(console, config, game, params, fleet.seeds)
    measured: dict[str, Any] = {
        **trained,
        "eval_seconds": round(time.monotonic() - began, 1),
        "agents_together": len(mine),
        "device": device_name(fleet.device),
    }
    extra: list[dict[str, Any]] = [{} for _ in mine]
    if normalised(game, 0.0) is None:
        chance = _play(console, config, game, params, fleet.seeds, epsilon=1.0)
        extra = [{"random_score": sum(scores) / len(scores)} for scores in chance]
    return [runs.save_result(run, e, measured | x) for run, e, x in zip(mine, episodes, extra, strict=True)]


def _evaluate(args: argparse.Namespace, console: Console) -> int:
    """Play whole games with the agent of a run, without network noise, and print its raw scores."""
    run, weights = runs.load(args.folder)
    changes = {} if args.episodes is None else {"evaluation.episodes": args.episodes}
    config = run.config.override(changes)
    device = choose_device(args.device)
    tune(device, choose_precision("auto", device))
    seed = run.seed if args.seed is None else _seeds([args.seed])[0]
    params = {name: tensor[None].to(device) for name, tensor in weights.items()}
    quiet = Console(stderr=True) if args.json else console
    scores = _play(quiet, config, run.game, params, [seed])[0]
    mean = sum(scores) / len(scores)
    human = normalised(run.game, mean)
    if args.json:
        print(json.dumps({"game": run.game, "score": mean, "human_normalised": human, "episodes": scores}))
        return 0
    judged = "" if human is None else f", human-normalised {human:.3f}"
    console.print(f"{run.game}: mean score {mean:,.2f} over {len(scores)} games{judged}", highlight=False)
    return 0


def _presets(args: argparse.Namespace, console: Console) -> int:
    """List the methods with the paper's aggregate scores, or print one method's whole configuration."""
    if args.name is None:
        paper = {row["preset"]: row for row in reference_table("paper_variants")}
        table = Table(box=None, header_style="bold")
        for column in ("preset", "paper: mean", "median", "what it is"):
            table.add_column(column)
        for name, listed in PRESETS.items():
            mean, median = (paper[name][column] if name in paper else "" for column in ("human_mean", "human_median"))
            table.add_row(name, mean, median, listed.summary)
        console.print(table)
        return 0
    config, default = preset_config(args.name), Config()
    preset = PRESETS[args.name]
    console.print(f"{args.name}: {preset.summary}", highlight=False)
    table = Table(box=None, header_style="bold")
    for column in ("field", "value", "in spr", "meaning"):
        table.add_column(column)
    for entry in fields():
        value, usual = config.value(entry.name), default.value(entry.name)
        table.add_row(entry.name, _shown(value), "" if value == usual else _shown(usual), entry.meaning)
    console.print(table)
    for game, changes in preset.by_game.items():
        differs = ", ".join(f"{name} {_shown(value)}" for name, value in changes.items())
        console.print(f"on {game}: {differs}", highlight=False)
    return 0


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def _bench(args: argparse.Namespace, console: Console) -> int:
    """Time one update, one action and one environment step of fleets, on a replay filled by random play."""
    device, config = choose_device(args.device), preset_config(args.preset)
    precision = choose_precision(args.precision, device)
    tune(device, precision)
    if any(agents < 1 for agents in args.agents):
        raise UserError("--agents takes numbers of at least 1")
    rows = [bench.measure(config, args.game, agents, device, precision) for agents in args.agents]
    if args.json:
        print(json.dumps({"version": __version__, "torch": torch.__version__, "preset": args.preset, "rows": rows}))
        return 0
    console.print(f"{args.preset} on {args.game}, {rows[0]['device']}, {precision}; milliseconds, medians")
    table = Table(box=None, header_style="bold")
    for column in ("agents", "update", "per agent", "action", "environment", "step", "minutes per run", "MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        parts = ("update_ms", "update_ms_per_agent", "act_ms", "env_ms", "step_ms")
        rest = (f"{row['run_minutes']:.1f}", f"{row['memory_mib']:,.0f}")
        table.add_row(str(row["agents"]), *(f"{row[part]:.3f}" for part in parts), *rest)
    console.print(table)
    return 0


def _doctor(_: argparse.Namespace, console: Console) -> int:
    """Say what works here: versions, devices, ROMs, and free memory and disk against what a run needs."""
    table = Table(box=None, header_style="bold")
    for column in ("", "what", "found"):
        table.add_column(column)
    fine = True

    def say(good: bool, what: str, found: str) -> None:
        nonlocal fine
        fine = fine and good
        table.add_row("[green]ok[/]" if good else "[red]no[/]", what, found)

    say(True, "spr", __version__)
    say(sys.version_info >= (3, 11), "Python (3.11 or newer)", platform.python_version())
    for package in ("torch", "numpy", "gymnasium", "ale-py", "safetensors"):
        say(True, package, version(package))
    missing = [game for game in game_names() if rom_problem(game) is not None]
    say(not missing, "Atari ROMs", "all 26 games" if not missing else f"missing: {', '.join(missing)}")
    say(True, "other games", f"catch, {len(known_games()) - len(game_names()) - 1} more Atari games, Gymnasium ids")
    need = memory_needed(Config(), 1)
    for name in DEVICES[1:]:
        if name == "cuda" and not torch.cuda.is_available():
            table.add_row("[yellow]--[/]", "GPU", "none that PyTorch can use; training runs on the CPU, slowly")
            continue
        device = torch.device(name)
        free = free_memory(device)
        found = f"{free / 2**30:.1f} GiB free on {device_name(device)}; a whole run takes {need / 2**30:.1f} per agent"
        say(free > need, f"memory ({name})", found)
    disk = shutil.disk_usage(Path.cwd()).free
    say(disk > 2**28, "disk", f"{disk / 2**30:.1f} GiB free here; a run's folder takes about 20 MB")
    console.print(table)
    return 0 if fine else 1


def _seeds(seeds: Sequence[int]) -> list[int]:
    if any(seed < 0 or seed >= 2**31 for seed in seeds):
        raise UserError(f"seeds must be between 0 and {2**31 - 1}")
    twice = sorted({seed for seed in seeds if list(seeds).count(seed) > 1})
    if twice:
        raise UserError(f"seed {twice[0]} is given twice: each agent of a fleet needs its own")
    return list(seeds)


def _figures(tick: Tick, rows: list[dict[str, Any]]) -> str:
    """Return the recent score (mean over the fleet) and losses of the last row."""
    scores = [score for score in tick.scores if score is not None]
    parts = [f"score {sum(scores) / len(scores):,.1f}"] if scores else []
    for name in ("rl", *known_representations()):
        values = [row[name] for row in rows if name in row]
        parts += [f"{name} {sum(values) / len(values):.2f}"] if values else []
    return "  ".join(parts)


def _play(
    console: Console,
    config: Config,
    game: str,
    params: dict[str, Tensor],
    seeds: Sequence[int],
    epsilon: float | None = None,
) -> list[list[float]]:
    title = "evaluating" if epsilon is None else "a random agent"
    total = config.evaluation.episodes * len(seeds)
    with Bar(console, title, total, "games") as bar:
        for playing in play(config, game, params, seeds, epsilon):
            bar.show(playing.finished)
    return [[score for score in games if score is not None] for games in playing.scores]


def _summary(console: Console, out: Path, results: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    reference = "human-normalised" if results[0]["human_normalised"] is not None else "random agent"
    for column in ("game", "seed", "mean score", "games", reference, "training", "evaluation"):
        table.add_column(column, justify="right")
    for result in results:
        human, chance = result["human_normalised"], result.get("random_score")
        table.add_row(
            result["game"],
            str(result["seed"]),
            f"{result['score']:,.2f}",
            str(len(result["episodes"])),
            f"{human:.3f}" if human is not None else f"{chance:,.2f}",
            f"{result['train_seconds']:,.0f} s",
            f"{result['eval_seconds']:,.0f} s",
        )
    console.print(table)
    console.print(f"stored under {out}", highlight=False)
