"""Owns export: an agent with its description and its scores, as one file or as a folder that is ready for a hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spr.common import atomic_files
from spr.common.errors import UnusableError, UserError, plural, visible
from spr.common.json_files import sealed
from spr.common.version import __version__
from spr.runs import run_files, run_folder
from spr.runs.run_folder import Run
from spr.runs.weights_file import to_bytes

_KEPT = ("score", "human_normalised", "random_score", "episodes", "protocol", "precision")


def write_agent(run: Run, weights: Mapping[str, Tensor], target: Path, scores: Mapping[str, Any] | None = None) -> None:
    """Write one file that holds an agent, what it is, and perhaps its scores; an existing one is not replaced."""
    if target.exists():
        raise UserError(f"{target} is there already: choose another name")
    words = json.loads(json.dumps(_described(run) | dict(scores or {})))
    try:
        atomic_files.replace(target, to_bytes(weights, words, words["config"]))
    except OSError as error:
        raise run_files.unusable(target, error) from error


def export(path: Path, target: Path) -> list[Path]:
    """Write a run's agent to a file, or into a folder with its configuration, its result and a model card.

    A target is a folder if there is one, or if its name does not end like that of a file of weights.
    """
    run, weights = run_folder.load_run(path)
    if not path.is_dir():
        raise UserError(f"{path} is an exported agent already: copy it")
    result: dict[str, Any] = {}
    if run_files.finished(path):
        try:
            result = run_folder.checked_result(path / "result.json")
        except UnusableError as problem:
            raise UserError(
                f"{path / 'result.json'} is damaged: {problem}; 'spr train --overwrite' makes the run again"
            ) from problem
    scores = {name: result[name] for name in _KEPT if name in result}
    if target.suffix == ".safetensors" and not target.is_dir():
        write_agent(run, weights, target, scores)
        return [target]
    texts = {"config.json": json.dumps(sealed(_described(run)), indent=1) + "\n", "README.md": card(run, result)}
    if result:
        texts["result.json"] = json.dumps(sealed(result), indent=1) + "\n"
    wanted = [target / name for name in ("agent.safetensors", *texts)]
    taken = next((file for file in wanted if file.exists()), None)
    if taken is not None:
        raise UserError(f"{taken} is there already: choose another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_agent(run, weights, wanted[0], scores)
        for name, text in texts.items():
            atomic_files.replace(target / name, text.encode())
    except OSError as error:
        raise run_files.unusable(target, error) from error
    return wanted


def _described(run: Run) -> dict[str, Any]:
    return run_folder.description(run) | ({} if run.step is None else {"step": run.step})


def card(run: Run, result: Mapping[str, Any]) -> str:
    """Return a model card in Markdown: what the agent is, how it was made, what it scored, and how to use it."""
    config, rules = run.config, run_folder.protocol(run)
    method, game = _cell(run.preset), _cell(run.game)
    needed = "".join(f" --plugin {_cell(module)}" for module in run.plugins)
    lines = [
        "---",
        "library_name: spr",
        "pipeline_tag: reinforcement-learning",
        "tags: [reinforcement-learning, deep-reinforcement-learning, spr, atari-100k]"
        if rules["name"] == "atari-100k"
        else "tags: [reinforcement-learning, deep-reinforcement-learning, spr]",
        "---",
        "",
        f"# {method} on {game}",
        "",
        f"An agent that learnt {game} by the method `{method}` of the package spr {__version__} "
        "(self-predictive representations, Schwarzer et al. 2021), "
        f"seed {run.seed}, in {run.step or config.schedule.steps:,} steps.",
        "",
    ]
    if result:
        cut = result.get("episodes_cut", 0)
        lines += [f"Mean score {result['score']:,.2f} over {plural(len(result['episodes']), 'game')}"]
        lines[-1] += f", {cut} of them cut off" if cut else ""
        human, chance = result.get("human_normalised"), result.get("random_score")
        lines[-1] += f"; human-normalised {human:.3f}" if human is not None else ""
        lines[-1] += f"; a random agent scored {chance:,.2f}" if chance is not None else ""
        lines[-1] += ". Every game is in `result.json`."
    else:
        lines += ["It was not evaluated: its run is not finished."]
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "import spr",
        "",
        'agent = spr.load("this folder")',
        "print(spr.evaluate(agent, episodes=10).score)",
        "```",
        "",
        f"or `spr evaluate THIS_FOLDER{needed}`. Loading never runs anything from these files.",
        *(["", f"It was made with custom modules: {_cell(', '.join(run.plugins))}."] if run.plugins else []),
        "",
        "## Protocol",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rules.items()),
        "",
        "## Configuration",
        "",
        "| field | value |",
        "|---|---|",
        *(
            f"| {group}.{name} | {_cell(value)} |"
            for group, values in config.to_dict().items()
            for name, value in values.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    """Write a value so that it stays in its cell."""
    return visible(" ".join(str(value).split())).replace("|", "\\|").replace("<", "&lt;")
