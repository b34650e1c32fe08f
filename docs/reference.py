"""Writes docs/reference from the code: `make reference`. tests/doors/test_docs.py fails where a page is not current."""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import spr
from spr.cli import COMMANDS
from spr.cli_parser import make_parser
from spr.config.config import Config, fields
from spr.config.presets import PRESETS
from spr.experiments import events
from spr.runs.run_files import CHECKPOINT, FILES, LOGS, WANDB
from spr.training.checkpoint import KEPT

HERE = Path(__file__).parent / "reference"
GROUPS = {
    "observation": "Observations",
    "augment": "Augmentation",
    "network": "Networks",
    "replay": "Replay",
    "learner": "Learner",
    "schedule": "Schedule",
    "reset": "Resets",
    "evaluation": "Evaluation",
}


def cell(text: object) -> str:
    """Return a text as it may stand in a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def shown(value: object) -> str:
    """Return a value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield a table's lines."""
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def command_line() -> Iterator[str]:
    """Every command with its options."""
    yield "# Command line"
    yield ""
    yield "Wrong input ends with exit code 2 and one line; a failed run with 1; a stopped one with 130."
    parser = make_parser(COMMANDS)
    (groups,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in groups._choices_actions}
    for name, command in groups.choices.items():
        yield from ("", f"## spr {name}", "", f"{command.description}", "")
        rows = []
        for action in command._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            given = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
            choices = " or ".join(action.choices) if action.choices else str(given)
            names = f"`{action.option_strings[0]} {choices}`" if action.option_strings else f"`{given or action.dest}`"
            rows.append([names.replace(" `", "`"), cell(action.help)])
        assert helps[name]
        yield from table(["option", "meaning"], rows)


def configuration() -> Iterator[str]:
    """Every field with its range."""
    yield "# Configuration"
    yield ""
    yield "`--set FIELD=VALUE` changes a field on the command line, `changes={FIELD: VALUE}` in Python. Defaults are"
    yield "those of the preset `spr`; `spr presets NAME` shows another preset's values."
    default = Config()
    for group, title in GROUPS.items():
        yield from ("", f"## {title}", "")
        rows = []
        for field in fields():
            if field.name.startswith(f"{group}."):
                limits = ", ".join(f"`{name}`" for name in field.names())
                if field.kind in (int, float):
                    limits = f"{field.low:,} to {field.high:,}"
                kind = {int: "whole number", float: "number", bool: "true or false", str: "name"}[field.kind]
                rows.append([f"`{field.name}`", shown(default.value(field.name)), limits or kind, cell(field.meaning)])
        yield from table(["field", "default", "values", "meaning"], rows)


def presets() -> Iterator[str]:
    """Every preset with the fields in which it differs from `spr`."""
    yield "# Presets"
    yield ""
    yield "A preset is the default configuration with some fields changed: `spr train GAME --preset NAME`."
    for name, preset in PRESETS.items():
        if preset.figure:
            continue
        yield from ("", f"## {name}", "", cell(preset.summary) + ".", "")
        if not preset.changes:
            yield "No field differs: these are the defaults."
            continue
        yield from table(["field", "value"], [[f"`{field}`", shown(value)] for field, value in preset.changes.items()])
        for game, changes in preset.by_game.items():
            yield from ("", f"On {game}: " + ", ".join(f"`{field}` {shown(value)}" for field, value in changes.items()))
    points = [name for name, preset in PRESETS.items() if preset.figure]
    yield from ("", "## Points of the paper's figures", "", ", ".join(f"`{name}`" for name in points) + ".")


def described(name: str, thing: Any, heading: str) -> Iterator[str]:
    """Yield a function or class with its signature and docstring."""
    signature = ""
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        signature = re.sub(r"\b(collections\.abc|pathlib\._local|pathlib)\.", "", str(inspect.signature(thing)))
    yield from ("", f"{heading} {name}", "", "```python", f"{name}{signature}", "```", "")
    yield inspect.cleandoc(thing.__doc__ or "")


def python_api() -> Iterator[str]:
    """Everything that `import spr` gives."""
    yield "# Python API"
    yield ""
    yield "`import spr` gives these names; everything else may move between versions."
    for name in spr.__all__:
        thing = getattr(spr, name)
        yield from described(f"spr.{name}", thing, "##")
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            continue
        for member, value in vars(thing).items():
            function: Callable[..., Any] | None = value if inspect.isfunction(value) else None
            if isinstance(value, property):
                yield from ("", f"### {name}.{member}", "", inspect.cleandoc(value.__doc__ or ""))
            elif function is not None and not member.startswith("_"):
                yield from described(f"{name}.{member}", function, "###")
    yield from (
        "",
        "## Events",
        "",
        "`spr.train_events` yields these, and `on_event=` of `spr.train` is called with them.",
    )
    yield from ("They are in `spr.experiments.events`.", "")
    rows = [
        [f"`{kind.__name__}`", ", ".join(f"`{field}`" for field in kind._fields) or "-", cell(kind.__doc__)]
        for kind in get_args(events.Event)
    ]
    yield from table(["event", "fields", "when"], rows)


def files_of_a_run() -> Iterator[str]:
    """Every file that a run's folder may hold."""
    yield "# Files of a run"
    yield ""
    yield "A run lives in `OUT/NAME/GAME/seed-N/`. NAME is the preset's, unless `--name` gives another."
    yield ""
    rows = [[f"`{name}`", cell(meaning)] for name, meaning in FILES.items()]
    rows.append(
        [
            f"`{CHECKPOINT}STEP.safetensors`",
            f"the whole state after a step; the newest {KEPT} are kept, none after the result",
        ]
    )
    yield from table(["file", "holds"], rows)
    yield from ("", "Beside all runs:", "")
    beside = [[f"`OUT/{LOGS}/`", "what the commands of a sweep print"], [f"`OUT/{WANDB}/`", "what wandb writes"]]
    yield from table(["folder", "holds"], beside)


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "command-line": command_line,
    "configuration": configuration,
    "presets": presets,
    "python-api": python_api,
    "run-files": files_of_a_run,
}


def page(name: str) -> str:
    """Return a page's text."""
    return "\n".join(PAGES[name]()) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (HERE / f"{name}.md").write_text(page(name), encoding="utf-8")
