"""Plug-ins: what a user's own module registers works like what is built in, and no file makes anything run."""

import json
import sys

import pytest
import torch
from conftest import as_options, rewrite
from safetensors import safe_open
from safetensors.torch import save_file

import spr
from spr.agent import auxiliary_losses, encoders
from spr.cli import main
from spr.common import plugins
from spr.common.errors import UserError
from spr.config import presets
from spr.envs import registry
from spr.training import checkpoint

TINY = {
    "network.hidden": 16,
    "replay.batch_size": 4,
    "evaluation.episodes": 2,
    "schedule.learning_starts": 60,
    "learner.depth": 2,
    "replay.n_step": 2,
}
OPTIONS = ["--steps", "70", "--device", "cpu", *as_options(TINY)]
SOURCE = """
import gymnasium, numpy as np, spr
from spr.encoders import ConvEncoder

@spr.register_loss("{tag}_loss")
def loss(predicted, target, mask):
    return ((predicted - target).abs().mean(-1).T * mask).sum(-1)

@spr.register_encoder("{tag}_encoder")
def encoder(shape):
    return ConvEncoder(shape, [(8, 8, 8), (16, 5, 5)])

changes = {{"learner.aux_loss": "{tag}_loss", "network.encoder": "{tag}_encoder"}}
spr.register_preset("{tag}_preset", "all of mine", changes)

class Lights(gymnasium.Env):
    def __init__(self, side=20, fails=0):
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.fails, self.steps = fails, 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._image(), {{}}
    def step(self, action):
        self.time += 1
        self.steps += 1
        if self.steps == self.fails:
            raise ValueError("the lamp is broken")
        return self._image(), float(action == self.time % 3), self.time == 9, False, {{}}
    def _image(self):
        return np.full(self.observation_space.shape, 25 * self.time, np.uint8)

@spr.register_env("{tag}_lights")
def lights(**arguments):
    return Lights(**arguments)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch, request):
    """A folder with a module of somebody's own; afterwards nothing of it is left in this process."""
    monkeypatch.chdir(tmp_path)
    tag = f"t{abs(hash(request.node.name)) % 10**9}"
    (tmp_path / f"{tag}_module.py").write_text(SOURCE.format(tag=tag))
    known = [auxiliary_losses._KNOWN, encoders._ENCODERS, registry._own, presets._presets, plugins._named]
    before = [table.copy() for table in known]
    path = list(sys.path)
    yield tag
    forget(known, before)
    sys.path[:] = path


def forget(known, before):
    for table, entries in zip(known, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def forgotten(mine):
    """Forget what was registered since the beginning, as another process would."""
    known = [auxiliary_losses._KNOWN, encoders._ENCODERS, registry._own, presets._presets, plugins._named]
    before = [table.copy() for table in known]

    def now():
        forget(known, before)
        sys.modules.pop(f"{mine}_module", None)

    return now


@pytest.mark.slow
def test_an_own_loss_is_needed_to_train_and_for_nothing_else(mine, tmp_path, forgotten, capsys):
    loss = ["--set", f"learner.aux_loss={mine}_loss"]
    assert main(["train", "catch", "--plugin", f"{mine}_module", *OPTIONS, *loss]) == 0
    run = tmp_path / "runs" / "spr" / "catch" / "seed-0"
    assert json.loads((run / "config.json").read_text())["plugins"] == [f"{mine}_module"]
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert f"{mine}_loss" in json.loads(rows[-1])
    forgotten()
    assert main(["evaluate", str(run)]) == 0
    assert main(["export", str(run), "agent.safetensors"]) == 0
    assert main(["evaluate", "agent.safetensors"]) == 0
    assert main(["report", "runs", "--out", "report"]) == 0
    capsys.readouterr()
    assert main(["train", "catch", *OPTIONS, *loss, "--overwrite"]) == 2
    assert "learner.aux_loss must be one of spr, quadratic" in capsys.readouterr().err
    assert (run / "result.json").exists()  # nothing was replaced


@pytest.mark.slow
def test_own_games_presets_and_encoders_train_sweep_and_are_judged(mine, tmp_path, forgotten, capsys):
    plugin = ["--plugin", f"{mine}_module"]
    given = ["--env-arg", "side=24", *OPTIONS]
    game = f"{mine}_lights"
    assert main(["train", game, "--preset", f"{mine}_preset", *plugin, *given]) == 0
    run = tmp_path / "runs" / f"{mine}_preset" / game / "seed-0"
    described = json.loads((run / "config.json").read_text())
    assert described["environment"]["arguments"] == {"side": 24}
    forgotten()
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 2
    assert "if a plug-in registers it: --plugin" in capsys.readouterr().err
    assert main(["report", "runs", "--out", "report"]) == 0  # it makes no networks
    assert main(["evaluate", str(run), *plugin]) == 0
    assert main(["export", str(run), "shared/", *plugin]) == 0
    assert json.loads((tmp_path / "shared" / "config.json").read_text())["plugins"] == [f"{mine}_module"]
    assert f"spr evaluate THIS_FOLDER --plugin {mine}_module" in (tmp_path / "shared" / "README.md").read_text()
    again = ["train", game, "--preset", f"{mine}_preset", *plugin, *OPTIONS, "--resume"]
    assert main(again) == 2  # its argument is missing
    assert "a finished run with protocol arguments side=24, not none" in capsys.readouterr().err
    sweep = ["sweep", "--games", game, "--presets", f"{mine}_preset", "--seeds", "0-1", *plugin, *given]
    assert main(sweep) == 0  # seed 0 is finished, seed 1 is trained by a process of its own
    assert (tmp_path / "runs" / f"{mine}_preset" / game / "seed-1" / "result.json").exists()


@pytest.mark.slow
def test_a_function_that_makes_environments_is_a_game(mine, tmp_path):
    game = f"{mine}_module:Lights"
    assert main(["train", game, *OPTIONS]) == 0
    run = tmp_path / "runs" / "spr" / f"{mine}_module_Lights" / "seed-0"
    assert main(["evaluate", str(run)]) == 0  # in this process the module was named on the command line
    assert len(spr.evaluate(run, sys.modules[f"{mine}_module"].Lights, 2).scores) == 2
    assert main(["train", f"{mine}_module:Nothing", *OPTIONS]) == 2


@pytest.mark.slow
def test_an_environment_that_fails_ends_its_run_and_saves_all(mine, tmp_path, capsys):
    """It fails at its 66th step; what was learnt is saved, and goes on with an environment that is mended."""
    game = f"{mine}_module:Lights"
    assert main(["train", game, *OPTIONS, "--env-arg", "fails=66", "--seeds", "3", "4"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"seed 3: '{game}' raised ValueError: the lamp is broken" in said
    line = 1 + SOURCE[: SOURCE.index("raise ValueError")].count("\n")
    assert f"{mine}_module.py, line {line}" in said
    assert said.count("saved after step 66: --resume continues from there") == 2
    for seed in (3, 4):
        folder = tmp_path / "runs" / "spr" / f"{mine}_module_Lights" / f"seed-{seed}"
        assert checkpoint.steps_of(folder) == [66]
    assert main(["evaluate", str(folder)]) == 2
    assert "its run is not finished; 'spr watch' plays it as it was saved last" in capsys.readouterr().err
    assert main(["train", game, *OPTIONS, "--env-arg", "fails=66", "--seeds", "3", "4", "--resume"]) == 0


def test_an_environment_that_fails_when_it_is_judged_says_where(mine, tmp_path, capsys):
    game = f"{mine}_module:Lights"
    assert main(["train", game, *OPTIONS]) == 0
    run = tmp_path / "runs" / "spr" / f"{mine}_module_Lights" / "seed-0"
    described = json.loads((run / "config.json").read_text())
    rewrite(run / "config.json", environment=described["environment"] | {"arguments": {"fails": 5}})
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 1
    assert "raised ValueError: the lamp is broken" in capsys.readouterr().err
    for wrong in ({"fails": [5]}, {"no name": 1}, {"shape": {}}):
        rewrite(run / "config.json", environment=described["environment"] | {"arguments": wrong})
        assert main(["evaluate", str(run)]) == 2
        assert "not plain values by name" in capsys.readouterr().err


def test_an_encoder_that_nobody_has_registered_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["train", "catch", *OPTIONS], ["sweep", "--games", "catch", "--device", "cpu", "--dry-run"]):
        for name, hint in (
            ("big", "if a plug-in registers it: --plugin MODULE"),
            ("impalla", "did you mean"),
        ):
            assert main([*command, "--set", f"network.encoder={name}"]) == 2
            said = capsys.readouterr().err
            assert f"network.encoder must be one of standard, data_efficient, minatar, impala, not '{name}'" in said
            assert hint in said
    assert not list(tmp_path.iterdir())


def test_a_file_with_plug_ins_that_are_no_modules_is_refused(mine, tmp_path, capsys):  # noqa: ARG001
    assert main(["train", "catch", *OPTIONS]) == 0
    run = tmp_path / "runs" / "spr" / "catch" / "seed-0"
    for wrong in ("os", [3], ["a b"], ["x" * 1000]):
        rewrite(run / "config.json", plugins=wrong)
        assert main(["evaluate", str(run)]) == 2
        assert "its plug-ins are not modules' names" in capsys.readouterr().err


def test_no_file_makes_a_module_run(mine, tmp_path, capsys):  # noqa: ARG001
    """Neither a run's config.json nor an exported agent; whoever wants it says so."""
    assert main(["train", "catch", *OPTIONS]) == 0
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\nGame = print\n")
    run = tmp_path / "runs" / "spr" / "catch" / "seed-0"
    assert main(["export", str(run), "agent.safetensors"]) == 0
    for game in ("evil:Foo-v0", "evil:Game", "os:system"):
        rewrite(run / "config.json", game=game, plugins=["evil"])
        with safe_open("agent.safetensors", "pt") as agent:
            about = json.loads(agent.metadata()["spr"]) | {"game": game, "plugins": ["evil"]}
            weights = {name: agent.get_tensor(name) for name in agent.keys()}  # noqa: SIM118
        del about["sha256"]  # as whoever changes it would
        save_file(weights, "changed.safetensors", {"spr": json.dumps(about)})
        capsys.readouterr()
        for path in (str(run), "changed.safetensors"):
            assert main(["evaluate", path]) == 2
            module = game.partition(":")[0]
            assert f"runs only if you name it: --plugin {module}" in capsys.readouterr().err
    assert main(["report", "runs", "--out", "report"]) == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_like_it", "there is no module 'nothing_like_it', here or among what is installed"),
        ("broken.py", "a module's name, not a file's; did you mean 'broken'?"),
        ("broken", "the module 'broken' can't be imported: ZeroDivisionError: division by zero"),
        ("needy", "the module 'needy' can't be imported: ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_plug_ins_that_can_not_be_had_are_refused_in_one_line(mine, tmp_path, capsys, name, message):  # noqa: ARG001
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "needy.py").write_text("import not_installed\n")
    assert main(["presets", "--plugin", name]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert "broken.py, line 2" in said or name != "broken"


def test_names_are_given_once(mine):  # noqa: ARG001
    for register in (
        lambda: auxiliary_losses.register("rl")(torch.add),
        lambda: auxiliary_losses.register("spr")(torch.add),
        lambda: encoders.register("standard")(encoders.ConvEncoder),
        lambda: presets.register("rainbow", "", {}),
        lambda: registry.register("pong"),
        lambda: registry.register("CartPole-v1"),
    ):
        with pytest.raises(UserError, match="is there already"):
            register()
    with pytest.raises(UserError, match="unknown configuration field"):
        presets.register("mine", "", {"learner.nothing": 1})
