"""Owns the command line: thin commands over the package, errors as one line with exit code 2."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spr import api, doctor, trained_agent
from spr.cli_parser import make_parser
from spr.common import plugins
from spr.common.errors import Fault, UserError, plural, visible
from spr.common.hardware import DEVICES, choose_device, choose_precision, out_of_memory, tune
from spr.common.version import __version__
from spr.config.config import Config, fields
from spr.config.presets import PRESETS, preset_config
from spr.envs.atari100k import game_names, reference_table
from spr.envs.registry import family, known_games, make, named_games, own_games
from spr.experiments import bench_against, benchmark, loggers
from spr.experiments.events import to_all, write_metrics
from spr.experiments.job_runner import FAILED, INTERRUPTED, JobRunner
from spr.experiments.progress import Bar, Display, StopRequest, Terminal
from spr.experiments.ray_engine import on_ray
from spr.experiments.sweep import local, sweep
from spr.experiments.sweep_overview import forecast
from spr.experiments.sweep_plan import LARGEST_FLEET, plan
from spr.experiments.train_request import TrainJob, TrainRequest, parse_seeds
from spr.runs import export, run_files

_MOST_GAMES = 1_000  # a file of unknown origin may not ask for more without --episodes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    console = Terminal()
    args = argparse.Namespace(command="")
    try:
        args = make_parser(COMMANDS).parse_args(argv)
        for module in args.plugin:
            plugins.import_named(module)
        code: int = args.run(args, console)
    except UserError as error:
        return _complain(str(error), 2)
    except Fault as fault:
        return _complain(str(fault), FAILED)
    except KeyboardInterrupt:
        return _complain(f"stopped at once{_hint(args)}", INTERRUPTED)
    except OSError as error:  # of a disk, a pipe, a network: no fault of ours that a traceback would help with
        return _complain(f"{' '.join(str(error).split())}{_hint(args)}", FAILED)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _complain(f"there is not enough memory: fewer agents at once take less{_hint(args)}", FAILED)
    return code


def _complain(line: str, code: int) -> int:
    """Print what went wrong in one line, if the terminal is still there, and return the exit code."""
    with suppress(OSError):  # a terminal that is gone
        print(f"spr: {visible(line)}", file=sys.stderr, flush=True)
    return code


def _hint(args: argparse.Namespace) -> str:
    return "; --resume continues from the last checkpoint" if args.command == "train" else ""


def _train(args: argparse.Namespace, console: Console) -> int:
    """Train one agent per game and seed, play the evaluation's games, and store everything under OUT/NAME/GAME/."""
    job = TrainJob.here(TrainRequest.from_options(vars(args)))
    tune(job.device, job.precision)
    with StopRequest() as stop, Display(console) as display, loggers.make(args.log, args.out) as logger:
        return JobRunner(job, to_all(display, write_metrics, logger), stop.check).run()


def _sweep(args: argparse.Namespace, console: Console) -> int:
    """Train every method on every game with every seed, in fleets; finished runs are skipped, others resume."""
    for name in ("runs", "agents", "together"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} takes a number of at least 1")
    if args.runs is not None and args.seeds is not None:
        raise UserError("--runs and --seeds both say which seeds: choose one")
    on_this_machine = args.engine == "local"
    if on_this_machine and args.address is not None:
        raise UserError("--address is for --engine ray: name the engine, or leave the address out")
    seeds = args.seeds or [f"0-{(args.runs or 10) - 1}"]
    request = TrainRequest.from_options(vars(args) | {"preset": args.presets[0], "seeds": seeds})
    # The driver of a cluster need not have the device that its nodes have.
    elsewhere = not on_this_machine and args.device in DEVICES[1:]
    device = torch.device(args.device) if elsewhere else choose_device(args.device)
    whole = TrainJob(request, device, choose_precision(args.precision, device))
    largest = args.agents or LARGEST_FLEET[device.type]
    jobs = plan(args.presets, whole, largest, args.together if on_this_machine else None)
    if args.dry_run:
        console.print(forecast(jobs, args.together))
        return 0
    return sweep(jobs, local(args.together) if on_this_machine else on_ray(args.together, args.address), console)


def _report(args: argparse.Namespace, console: Console) -> int:
    """Write a page with the paper's tables and figures, from runs and published scores; PNG and CSV files beside."""
    made = _part("report", "spr.report.build", "report").write(args.folders, args.out)
    for title, lines in (("left out", made.left_out), ("note", made.notes)):
        for line in lines:
            console.print(visible(f"{title}: {line}"), soft_wrap=True)
    console.print(f"{args.out / 'index.html'}, and {len(made.files) - 1} files beside", highlight=False, soft_wrap=True)
    return 0


def _evaluate(args: argparse.Namespace, console: Console) -> int:
    """Play whole games with the agent of a run, without network noise, and print its raw scores."""
    agent = trained_agent.load(args.folder, args.device)
    run, config = agent.run, agent.config
    if args.episodes is None and config.evaluation.episodes > _MOST_GAMES:
        raise UserError(
            f"{args.folder} asks for {config.evaluation.episodes:,} games: say with --episodes how many you want"
        )
    seed = None if args.seed is None else parse_seeds([str(args.seed)])[0]
    quiet = Terminal(stderr=True) if args.json else console
    if not run.sealed:
        quiet.print(f"{args.folder} is of version 0.10 or before and has no checksum: damage would go unnoticed")
    with Display(quiet) as display:
        played = api.play(agent, None, args.episodes, seed, None, display)
    scores, lengths, mean, human = played.scores, played.lengths, played.score, played.human_normalised
    steps = config.schedule.steps
    if args.json:
        described = {
            "game": run.game,
            "score": mean,
            "human_normalised": human,
            "trained_steps": run.step,
            "steps": steps,
        }
        print(json.dumps(described | {"episodes": scores, "episode_steps": lengths}))
        return 0
    normalised_text = "" if human is None else f", human-normalised {human:.3f}"
    console.print(
        f"{run.game}: mean score {mean:,.2f} over {plural(len(scores), 'game')}{normalised_text}", highlight=False
    )
    if cut := sum(length >= config.evaluation.max_steps for length in lengths):
        limit = config.evaluation.max_steps
        console.print(f"{cut} of {plural(len(scores), 'game')} cut off after {limit:,} steps", highlight=False)
    if run.step is not None and run.step < steps:
        console.print(f"an unfinished run: this agent has learnt for {run.step:,} of {steps:,} steps", highlight=False)
    return 0


def _watch(args: argparse.Namespace, console: Console) -> int:
    """Play one game, the first of the evaluation, and write it as a film with what the agent thinks of every step."""
    film, video_file = (_part("watch", f"spr.evaluation.{module}", "video") for module in ("film", "video_file"))
    for name in ("steps", "fps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} takes a number of at least 1")
    most = args.steps or film.LONGEST
    device = choose_device(args.device)
    tune(device, choose_precision("auto", device))
    with ExitStack() as opened:
        agent = opened.enter_context(closing(film.load_player(args.folder, device)))
        run = agent.run
        seed = run.seed if args.seed is None else parse_seeds([str(args.seed)])[0]
        file = args.out or (None if args.live else Path(f"{run_files.plain_name(run.game)}-seed-{seed}.mp4"))
        shows = [opened.enter_context(video_file.window(args.fps))] if args.live else []
        shows += [] if file is None else [opened.enter_context(video_file.writing(file, args.fps, args.overwrite))]
        for line in agent.notes:
            console.print(visible(line), soft_wrap=True)
        bar = opened.enter_context(Bar(console, "watching", most, "frames"))
        for moment in film.film(agent, seed, most, shows):
            bar.show(moment.step, f"score {moment.score:,.6g}")
    learnt = "" if run.step is None else f", after {run.step:,} of {run.config.schedule.steps:,} steps of learning"
    console.print(
        f"{file or run.game}: {plural(moment.step, 'frame')}, score {moment.score:,.6g}{learnt}", soft_wrap=True
    )
    return 0


def _export(args: argparse.Namespace, console: Console) -> int:
    """Write an agent with its configuration and scores: one file, or a folder with a model card, ready for a hub."""
    for file in export.export(args.folder, args.target):
        console.print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)
    return 0


def _list_games(_: argparse.Namespace, console: Console) -> int:
    """List the games: those of Atari 100k, ale-py's others, and those that plug-ins registered."""
    others = [game for game in known_games() if game not in (*game_names(), "catch")]
    groups = {
        "built in": ["catch"],
        "Atari 100k ('all')": list(game_names()),
        "other Atari games": others,
        "from plug-ins": own_games(),
    }
    for title, games in groups.items():
        if games:
            console.print(f"{title}, {len(games)}: {', '.join(games)}")
    console.print("and any Gymnasium id with images and discrete actions, or module:function that makes one")
    return 0


def _presets(args: argparse.Namespace, console: Console) -> int:
    """List the methods with the paper's aggregate scores, or print one method's whole configuration."""
    if args.name is None:
        return _list_presets(console, args.all)
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


def _list_presets(console: Console, every: bool) -> int:
    """List the methods; of the paper's figures every point, or one line each."""
    paper = {row["preset"]: row for row in reference_table("paper_variants")}
    table = Table(box=None, header_style="bold")
    for column in ("preset", "paper: mean", "median", "what it is"):
        table.add_column(column)
    for name, listed in PRESETS.items():
        if listed.figure and not every:
            continue
        mean, median = (paper[name][column] if name in paper else "" for column in ("human_mean", "human_median"))
        table.add_row(name, mean, median, listed.summary)
    console.print(table)
    figures: dict[str, str] = {}
    for name, listed in PRESETS.items():
        if listed.figure and not every:
            figures.setdefault(listed.figure, name)
    for figure, first in figures.items():
        count = sum(listed.figure == figure for listed in PRESETS.values())
        console.print(f"and {count} points of the figure '{figure}', such as {first} (--all lists them)")
    return 0


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def _bench(args: argparse.Namespace, console: Console) -> int:
    """Time one update, one action and one environment step of fleets, on a replay filled by random play."""
    return _measure(args, console) if args.against is None else _compare(args, console)


def _measure(args: argparse.Namespace, console: Console) -> int:
    """Measure this version."""
    device, config = choose_device(args.device), preset_config(args.preset)
    precision = choose_precision(args.precision, device)
    tune(device, precision)
    if any(agents < 1 for agents in args.agents):
        raise UserError("--agents takes numbers of at least 1")
    if args.profile and device.type != "cuda":
        raise UserError("--profile looks at the kernels of a GPU, and there is none here")
    games = named_games(args.games)
    if len({family(game) for game in games}) > 1:
        for game in games:
            make(game, 1, obs=config.observation).close()  # refuses an unknown one
        raise UserError("these games can't share a fleet: only Atari games can")
    asked = (args.profile, args.evaluation)
    rows = [benchmark.measure(config, games, agents, device, precision, *asked) for agents in args.agents]
    if args.json:
        print(json.dumps({"version": __version__, "torch": torch.__version__, "preset": args.preset, "rows": rows}))
        return 0
    on = games[0] if len(games) == 1 else plural(len(games), "game")
    console.print(f"{args.preset} on {on}, {rows[0]['device']}, {precision}; milliseconds, medians")
    table = Table(box=None, header_style="bold")
    for column in ("agents", "update", "per agent", "action", "environment", "step", "minutes per run", "MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        parts = ("update_ms", "update_ms_per_agent", "act_ms", "env_ms", "step_ms")
        rest = (f"{row['run_minutes']:.1f}", f"{row['memory_mib']:,.0f}")
        table.add_row(str(row["agents"]), *(f"{row[part]:.3f}" for part in parts), *rest)
    console.print(table)
    if args.profile:
        console.print(_kernel_table(rows))
    if args.evaluation:
        rates = [f"{row['evaluation_steps_per_second']:,.0f}" for row in rows]
        console.print(f"steps of games played in a second of evaluation: {', '.join(rates)}")
    return 0


def _compare(args: argparse.Namespace, console: Console) -> int:
    """Compare with an earlier version on a CPU, and print the ratios."""
    if args.device not in ("auto", "cpu"):
        raise UserError("--against compares versions on a CPU: leave --device out")
    if args.rounds < 2:
        raise UserError("--rounds takes a number of at least 2")
    cpu = torch.device("cpu")
    try:
        precisions = ["fp32", choose_precision("bf16", cpu)]
    except UserError:  # this processor has none
        precisions = ["fp32"]
    table = Table(box=None, header_style="bold")
    for column in ("case", "what", f"{args.against}, ms", "this version, ms", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column in ("case", "what") else "right")
    found = []
    with Bar(
        Terminal(stderr=True) if args.json else console,
        "comparing",
        len(wanted := bench_against.cases(precisions)),
        "cases",
    ) as bar:
        for result in bench_against.compare(args.against, wanted, args.rounds):
            found.append(result)
            bar.show(len(found), result.case.title)
            first, third = result.spread
            numbers = [f"{number:.2f}" for number in (result.before, result.now, result.ratio)]
            table.add_row(result.case.title, result.case.what, *numbers, f"{first:.2f} to {third:.2f}")
    if args.json:
        rows = [result._asdict() | {"case": result.case.title, "what": result.case.what} for result in found]
        print(json.dumps({"version": __version__, "against": args.against, "torch": torch.__version__, "rows": rows}))
        return 0
    console.print(table)
    return 0


def _kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the kernels of an update by kind, a column for each fleet size: microseconds, and their number."""
    table = Table(box=None, header_style="bold")
    table.add_column("kernels, microseconds of an update (their number)")
    for row in rows:
        table.add_column(plural(row["agents"], "agent"), justify="right")
    found = [{some["kind"]: some for some in row["kernels"]} for row in rows]
    for kind in dict.fromkeys(kind for kinds in found for kind in kinds):
        shown = [kinds.get(kind, {"microseconds": 0.0, "number": 0}) for kinds in found]
        table.add_row(kind, *(f"{some['microseconds']:,.0f} ({some['number']})" for some in shown))
    return table


def _doctor(_: argparse.Namespace, console: Console) -> int:
    """Say what works here: versions, devices, ROMs, and free memory and disk against what a run needs."""
    fine, table = doctor.examination()
    console.print(table)
    return 0 if fine else 1


def _part(command: str, module: str, extra: str) -> Any:
    """Import a part of the package that needs more than the rest, or say what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        packages = " ".join(doctor.EXTRAS[extra].values())
        raise UserError(f"'spr {command}' needs the package {error.name}: pip install {packages}") from error


COMMANDS = {
    "train": _train,
    "sweep": _sweep,
    "evaluate": _evaluate,
    "watch": _watch,
    "games": _list_games,
    "presets": _presets,
    "bench": _bench,
    "export": _export,
    "report": _report,
    "doctor": _doctor,
}
