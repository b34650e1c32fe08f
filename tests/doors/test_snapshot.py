"""This version computes what the last one did, to the digits that another machine keeps; `make snapshot` renews it."""

import json
from importlib.metadata import version

import pytest
import snapshot

STORED = {name: json.loads((snapshot.FOLDER / f"{name}.json").read_text()) for name in snapshot.MADE}


def flat(value):
    """Every number of nested lists and dicts, by its path."""
    if not isinstance(value, dict | list):
        return {"": value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {f"{name}.{rest}": number for name, part in items for rest, number in flat(part).items()}


@pytest.mark.parametrize("preset", snapshot.METHODS)
def test_sixty_updates_of_every_method(preset):
    """In float64, so that another order of additions is not seen; sampling decides for certain."""
    assert flat(snapshot.learnt(preset)) == pytest.approx(flat(STORED["learnt"][preset]), rel=1e-7, abs=1e-9)


def test_the_rows_of_a_short_run(tmp_path):
    made, stored = (
        [json.loads(row) for row in text.splitlines()] for text in (snapshot.trained(tmp_path), STORED["trained"])
    )
    assert [list(row) for row in made] == [list(row) for row in stored]
    for path, number in flat(made).items():
        assert number == (None if (was := flat(stored)[path]) is None else pytest.approx(was, rel=1e-4)), path


@pytest.mark.slow
def test_the_tables_of_a_report(tmp_path):
    assert snapshot.reported(tmp_path) == STORED["reported"]


@pytest.mark.slow
def test_what_a_gpu_would_be_given():
    """Every kernel's PTX and the traced update, node for node, of the libraries that the snapshot was made with."""
    pytest.importorskip("triton", reason="needs Triton, which comes with a GPU's PyTorch or with the dev extra")
    about = {name: version(name).split("+")[0] for name in ("torch", "triton")}
    if about != STORED["gpu_path"]["versions"]:
        pytest.skip(f"the snapshot is of {STORED['gpu_path']['versions']}, these are {about}")
    assert snapshot.gpu_path() == STORED["gpu_path"]
