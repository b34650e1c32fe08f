"""What this version computes, in numbers: `make snapshot` stores it, test_snapshot.py compares.

Whoever only moves or renames code changes nothing of it. Whoever changes numbers on purpose renews it, and says so.
"""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from conftest import QUICK_RUN, ROOT, World, small

from spr.cli import main
from spr.config.presets import PRESETS

FOLDER = Path(__file__).parent / "snapshots"
# Points of the paper's figures are others with another number.
METHODS = [name for name, preset in PRESETS.items() if not preset.figure]
UPDATES = 60
MADE = ("learnt", "trained", "reported", "gpu_path")


def learnt(preset):
    """60 updates of two agents in float64: every tenth loss, and sums of the weights that no change leaves alone."""
    config = small(preset)
    world = World(config, [3, 1], torch.float64)
    losses = [world.update()["loss"].tolist() for _ in range(UPDATES)][::10]
    weights, place = world.state.weights, torch.arange(world.state.weights.shape[1], dtype=torch.float64)
    sums = {"norm": weights.norm(dim=1), "wave": (weights * torch.cos(place)).sum(1)}
    sums |= {"target": world.state.target.sum(1), "priority": world.replay.priority.double().sum(1)}
    return {"losses": losses, **{name: value.tolist() for name, value in sums.items()}}


def trained(folder):
    """The rows of metrics of a short run of catch."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", "catch", *QUICK_RUN, "--log-every", "5", "--out", str(folder)]) == 0
    return (folder / "spr" / "catch" / "seed-0" / "metrics.jsonl").read_text()


def reported(folder):
    """The checksums of a report's tables of the runs in results."""
    runs = [str(ROOT / "results" / name) for name in ("spr", "rainbow")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["report", *runs, "--out", str(folder)]) == 0
    tables = sorted(path for path in folder.rglob("*") if path.suffix in {".csv", ".md"})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tables}


def gpu_path():
    """What a GPU would be given (see gpu_path.py)."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    script = str(Path(__file__).parent / "gpu_path.py")
    return json.loads(subprocess.run([sys.executable, script], env=env, check=True, stdout=subprocess.PIPE).stdout)


def renew():
    """Store what is computed now."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = (
            {preset: learnt(preset) for preset in METHODS},
            trained(Path(folder) / "runs"),
            reported(Path(folder) / "report"),
            gpu_path(),
        )
    for name, found in zip(MADE, made, strict=True):
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    renew()
