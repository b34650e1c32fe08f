"""Damages files of every kind and reads them by what stands behind the commands, again and again.

Each time the outcome is a refusal in a line, a line that names what is left out, or what the whole file says.

    PYTHONPATH=tests python tests/doors/fuzz.py --mutations 5000 --seed 0
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from conftest import as_options

from spr.cli import main
from spr.common.errors import UnusableError, UserError
from spr.envs.registry import make_each
from spr.evaluation import film
from spr.report import records
from spr.runs import compatibility, export, metrics_files, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint, snapshot
from spr.training.fleet import assemble
from spr.training.loop import Training

TINY = {
    "observation.height": 36,
    "observation.width": 36,
    "network.hidden": 4,
    "network.atoms": 5,
    "replay.batch_size": 2,
    "replay.n_step": 2,
    "learner.depth": 1,
    "schedule.learning_starts": 20,
    "evaluation.episodes": 1,
}
STEPS = 40
OPTIONS = [*as_options(TINY), "--steps", str(STEPS), "--checkpoint-every", "0", "--device", "cpu"]
REFUSED, SAME, SOUND = "refused", "the same", "sound"


class Subject(NamedTuple):
    """A kind of file and one of its readers."""

    file: str  # below the folder of whole files
    read: Callable[["Whole"], Any]  # returns what was understood; refuses by UserError or UnusableError
    # Whether what is understood can be compared. Lines of an unfinished run, and JSON without a checksum, as versions
    # up to 0.12 wrote it, are judged by sense alone: what remains must be fit for use.
    certain: bool = True
    unsealed: bool = False


class Whole(NamedTuple):
    """Whole files, to be damaged."""

    folder: Path  # holds run/, which is finished, begun/, which has a checkpoint, and exported.safetensors
    training: Training  # which a checkpoint would be restored into
    wanted: compatibility.ExpectedRun
    run: Run
    names: tuple[str, ...]  # what a result has


def whole(folder: Path) -> Whole:
    """Make a run, its export, and what it was before it was judged."""
    remove = checkpoint.remove
    checkpoint.remove = lambda _: None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["train", "catch", *OPTIONS, "--out", str(folder)]) == 0
    finally:
        checkpoint.remove = remove
    run = folder / "run"
    (folder / "spr" / "catch" / "seed-0").rename(run)
    shutil.copytree(run, folder / "begun")
    checkpoint.remove(run)
    for name in ("result.json", "agent.safetensors"):
        (folder / "begun" / name).unlink()
    export.export(run, folder / "exported.safetensors")
    described = run_folder.describe(run)
    envs = make_each(["catch"], described.config.observation, {})
    fleet = assemble(described.config, envs, [0], torch.device("cpu"), torch.float32)
    wanted = compatibility.ExpectedRun("spr", "catch", 0, described.config, "fp32", exactly=False, log_every=1)
    begun = described._replace(path=folder / "begun", environment=envs.protocols[0])
    return Whole(folder, Training(fleet, None), wanted, begun, tuple(run_folder.checked_result(run / "result.json")))


def _loaded(path: Path) -> Any:
    run, weights = run_folder.load_run(path)
    compatibility.refuse_other_rom(run)
    return run._replace(path=Path(), sealed=True), _plain(weights)  # the same agent without its checksum has a word


def _exported(made: Whole) -> Any:
    target = made.folder / "card"
    shutil.rmtree(target, ignore_errors=True)
    found = {file.name: file.read_bytes() for file in export.export(made.folder / "run", target)}
    return found | {"result.json": _known(made, json.loads(found["result.json"]))}


def _reported(made: Whole) -> Any:
    found = records.read([made.folder / "run"])
    if found.left_out or any(record.lost for record in found.records):
        raise UserError("; ".join([*found.left_out, *found.notes]))
    return [record._replace(path=Path()) for record in found.records]


def _begun(made: Whole) -> Any:
    return compatibility.finished_as(made.run.path, made.wanted), compatibility.begun(made.run)


def _finished(made: Whole) -> Any:
    return compatibility.finished_as(made.folder / "run", made.wanted), _known(
        made, run_folder.result(made.folder / "run")
    )


def _known(made: Whole, result: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a result without what nobody asks for, such as a checksum whose name is damaged."""
    return result and {name: result[name] for name in made.names if name in result}


def _rewound(made: Whole) -> Any:
    folder = made.run.path
    metrics_files.rewind(made.run.path, STEPS)
    once = metrics_files.logged(folder), metrics_files.last_step(folder)
    metrics_files.rewind(made.run.path, STEPS)
    assert once == (metrics_files.logged(folder), metrics_files.last_step(folder))
    assert all(isinstance(x, int | float | None) for rows in once[0] for row in rows for x in row.values())
    return once


def _restored(made: Whole) -> Any:
    def specs(about: Any) -> Any:
        snapshot.check(about)
        return snapshot.specs(made.training, STEPS, len(about["metrics"]))

    found = checkpoint.read(made.run.path, STEPS, specs)
    return found.about, _plain(found.tensors)


def _watched(made: Whole) -> Any:
    with contextlib.closing(film.load_player(made.run.path, torch.device("cpu"))) as found:
        if found.notes:
            raise UserError(found.notes[0])
        return _plain(dict(found.networks.named_parameters()))


def _plain(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in weights.items()}


def _judged(made: Whole) -> None:
    """Carry the whole command out: it succeeds, or ends with one line and code 2."""
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = main(["evaluate", str(made.folder / "run"), "--episodes", "1"])
    if code:
        line = said.getvalue().removesuffix("\n")
        assert code == 2, line
        assert line.isprintable(), line
        raise UserError(line)


AGENT, EXPORT, SAVED = "run/agent.safetensors", "exported.safetensors", f"begun/checkpoint-{STEPS:010}.safetensors"
CONFIG, BEGUN, RESULT = "run/config.json", "begun/config.json", "run/result.json"
SUBJECTS = {
    "agent: evaluate": Subject(AGENT, lambda made: _loaded(made.folder / "run")),
    "agent: export": Subject(AGENT, _exported),
    "exported agent: evaluate": Subject(EXPORT, lambda made: _loaded(made.folder / EXPORT)),
    "config.json: evaluate": Subject(CONFIG, lambda made: _loaded(made.folder / "run")),
    "config.json: export": Subject(CONFIG, _exported),
    "config.json: resume": Subject(BEGUN, _begun),
    "config.json: watch": Subject(BEGUN, _watched),
    "result.json: report": Subject(RESULT, _reported),
    "result.json: export": Subject(RESULT, _exported),
    "result.json: resume, sweep": Subject(RESULT, _finished),
    "metrics.jsonl: report": Subject("run/metrics.jsonl", _reported),
    "metrics.jsonl: resume": Subject("begun/metrics.jsonl", _rewound, certain=False),
    "episodes.jsonl: resume": Subject("begun/episodes.jsonl", _rewound, certain=False),
    "times.jsonl: resume, sweep": Subject("begun/times.jsonl", _rewound, certain=False),
    "checkpoint: resume": Subject(SAVED, _restored),
    "checkpoint: watch": Subject(SAVED, _watched),
    "config.json of 0.12: evaluate": Subject(CONFIG, _judged, certain=False, unsealed=True),
    "config.json of 0.12: export": Subject(CONFIG, _exported, certain=False, unsealed=True),
    "config.json of 0.12: resume": Subject(BEGUN, _begun, certain=False, unsealed=True),
    "config.json of 0.12: watch": Subject(BEGUN, _watched, certain=False, unsealed=True),
    "result.json of 0.12: report": Subject(RESULT, _reported, certain=False, unsealed=True),
    "result.json of 0.12: export": Subject(RESULT, _exported, certain=False, unsealed=True),
    "result.json of 0.12: resume, sweep": Subject(RESULT, _finished, certain=False, unsealed=True),
}


NASTY = [
    10**400, -(10**400), 1e308, -1, 0, 0.5, True, None, "", "\ud800", "\x1b[31m", "\u202e", r"$\frac{$", "=1+1", [], {},
    float("nan"), float("inf"), "x" * 3000, [[[[]]]], {"a": {"b": {}}},
]  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file's bytes with one thing wrong, in the first bytes (where a header lies) as often as anywhere."""
    kinds = [_flip, _cut, _insert, _double, _drop, _nest]
    kinds += [_swap if data[:1] == b"{" else _swap_in_header] * 4
    return rng.choice(kinds)(data, rng)


def _place(data: bytes, rng: random.Random) -> int:
    return rng.randrange(max(1, min(len(data), 4000) if rng.random() < 0.5 else len(data)))


def _flip(data: bytes, rng: random.Random) -> bytes:
    place = _place(data, rng)
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = _place(data, rng)
    piece = rng.choice([rng.randbytes(rng.randint(1, 9)), b"1e999", b"NaN", b'"', b"\xff", b"\n", b"}"])
    return data[:place] + piece + data[place:]


def _double(data: bytes, rng: random.Random) -> bytes:
    place, size = _place(data, rng), rng.randint(1, 200)
    return data[: place + size] + data[place:]


def _drop(data: bytes, rng: random.Random) -> bytes:
    place = _place(data, rng)
    return data[:place] + data[place + rng.randint(1, 200) :]


def _nest(data: bytes, rng: random.Random) -> bytes:
    place, deep = _place(data, rng), rng.choice([50, 900, 100_000])
    return data[:place] + b"[" * deep + b"]" * deep + data[place:]


def _swap(data: bytes, rng: random.Random) -> bytes:
    """Change a value of a JSON text, or of one of its lines, for something else; sometimes also drop its checksum."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    number = rng.randrange(len([line for line in lines if line]))
    found = json.loads(lines[number])
    groups = _groups(found)
    group = rng.choice(groups)
    key = rng.choice(list(group)) if isinstance(group, dict) else rng.randrange(len(group))
    if isinstance(group, dict) and rng.random() < 0.2:
        del group[key]
    else:
        group[key] = rng.choice([*NASTY, 7, json.loads(lines[number])])
    return b"\n".join([*lines[:number], json.dumps(found).encode(), *lines[number + 1 :]])


def _swap_in_header(data: bytes, rng: random.Random) -> bytes:
    """Change a value in the header of safetensors, which is JSON behind its length."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = _swap(data[8:end], rng)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _groups(found: Any) -> list[Any]:
    """Return every group and list that holds something."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [*([found] if inner else []), *(group for one in inner for group in _groups(one))]


def unsealed(data: bytes) -> bytes:
    """Return a JSON file without its checksum, as versions up to 0.12 wrote it: only sense is left to judge it by."""
    return json.dumps({name: value for name, value in json.loads(data).items() if name != "sha256"}).encode()


@mock.patch("os.fsync", new=str)  # thousands of files for a moment each: the disk need not have them
def fuzz(made: Whole, name: str, mutations: int, seed: int = 0) -> Counter[str]:
    """Damage a kind of file so many times; return how often it was refused, and how often it made no difference."""
    subject = SUBJECTS[name]
    file = made.folder / subject.file
    beside = {path: path.read_bytes() for path in file.parent.iterdir() if path.is_file()}
    good = unsealed(beside[file]) if subject.unsealed else beside[file]
    outcomes = Counter[str]()
    try:
        file.write_bytes(good)
        expected = subject.read(made)
        for number in range(mutations):
            rng = random.Random(f"{name} {seed} {number}")
            file.write_bytes(damaged(good, rng))
            outcomes[_outcome(subject, made, expected, f"{name}, seed {seed}, mutation {number}")] += 1
            if not subject.certain:
                for path, data in beside.items():
                    path.write_bytes(data)
    finally:
        for path, data in beside.items():
            path.write_bytes(data)
    return outcomes


def _outcome(subject: Subject, made: Whole, expected: Any, case: str) -> str:
    try:
        found = subject.read(made)
    except (UserError, UnusableError):
        return REFUSED
    except BaseException as error:
        error.add_note(case)
        raise
    assert not subject.certain or found == expected, f"{case}: something else was believed"
    return SAME if found == expected else SOUND


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=5000, help="of all kinds of files together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        files = whole(Path(place))
        names = list(SUBJECTS)
        for i, kind in enumerate(names):
            share = given.mutations // len(names) + (i < given.mutations % len(names))
            began = time.monotonic()
            counted = fuzz(files, kind, share, given.seed)
            sys.stdout.write(f"{kind:34} {dict(sorted(counted.items()))} in {time.monotonic() - began:.1f} s\n")
