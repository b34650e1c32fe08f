"""Agents in files: what was damaged is refused, what is not finite too, and old files are still read."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from conftest import QUICK_RUN, rewrite
from safetensors.torch import load_file, save_file

import spr
from spr.cli import main
from spr.common.errors import UserError
from spr.runs import run_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    assert main(["train", "catch", *QUICK_RUN, "--out", str(out)]) == 0
    folder = out / "spr" / "catch" / "seed-0"
    assert main(["export", str(folder), str(out / "agent.safetensors")]) == 0
    return folder


def contents(path):
    run, weights = run_folder.load_run(path)
    return run._replace(path=None), weights


@pytest.mark.parametrize("kind", ["run", "export"])
def test_a_mutated_file_is_refused_or_the_same(run, kind, tmp_path):
    """Bits flipped, bytes set, cut and doubled, in the header as often as in the weights."""
    rng = np.random.default_rng(0)
    source = run / "agent.safetensors" if kind == "run" else run.parents[2] / "agent.safetensors"
    good = source.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    if kind == "run":
        (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    file = tmp_path / "agent.safetensors"
    target = tmp_path if kind == "run" else file
    file.write_bytes(good)
    expected, weights = contents(target)
    refused = 0
    for i in range(150):
        data = bytearray(good)
        place = int(rng.integers(0, header if i % 2 else len(good)))
        match i % 4:
            case 0 | 1:
                data[place] ^= 1 << int(rng.integers(8))
            case 2:
                data = data[:place]
            case 3:
                data[place:place] = data[place : place + 8]
        file.write_bytes(bytes(data))
        try:
            found, others = contents(target)
        except UserError:
            refused += 1
            continue
        assert found == expected
        assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert refused > 140


def test_a_configuration_that_was_changed_afterwards_is_noticed(run, tmp_path, capsys):
    for name in ("agent.safetensors", "config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    described = json.loads((tmp_path / "config.json").read_text())
    described["config"]["network"]["v_max"] = 11.0
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "its config.json can't be read: it is not as it was written" in capsys.readouterr().err
    rewrite(tmp_path / "config.json")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "its weights or its configuration are not those that were saved" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_no_agent(run, tmp_path, capsys):
    weights = load_file(run / "agent.safetensors")
    weights["head.hidden.weight"][3, 4] = torch.nan
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    rewrite(tmp_path / "config.json")
    save_file(weights, tmp_path / "agent.safetensors", {"step": "45"})  # as up to version 0.10
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "the agent's 'head.hidden.weight' holds numbers that are not finite" in capsys.readouterr().err


def test_a_file_without_a_checksum_is_read_with_a_word(run, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    save_file(load_file(run / "agent.safetensors"), tmp_path / "agent.safetensors", {"step": "45"})
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "its agent has lost its checksum" in capsys.readouterr().err
    rewrite(tmp_path / "config.json")
    assert main(["evaluate", str(tmp_path)]) == 0
    assert "has no checksum: damage would go unnoticed" in " ".join(capsys.readouterr().out.split())
    assert spr.load(tmp_path, "cpu").run.step == 45
    assert main(["evaluate", str(run)]) == 0
    assert "checksum" not in capsys.readouterr().out


class Nowhere(gymnasium.Env):
    """Its third reward is not a number."""

    observation_space = gymnasium.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((12, 12), np.uint8), {}

    def step(self, action):  # noqa: ARG002
        self.time += 1
        return np.zeros((12, 12), np.uint8), np.nan if self.time == 3 else 0.0, self.time == 9, False, {}


def test_a_score_that_is_not_a_number_is_no_result(run, tmp_path, capsys):
    gymnasium.register("Nowhere-v0", Nowhere)
    assert main(["train", "Nowhere-v0", *QUICK_RUN, "--out", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "'Nowhere-v0' gave a reward of nan, which no score can be made of" in said
    assert not list(tmp_path.rglob("result.json"))
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    rewrite(tmp_path / "config.json", game="Nowhere-v0")
    (tmp_path / "agent.safetensors").write_bytes((run / "agent.safetensors").read_bytes())
    assert main(["evaluate", str(tmp_path)]) == 1
    assert "a reward of nan" in capsys.readouterr().err
