"""Owns the process that `bench_against` measures: a fleet of the version of `spr` that it finds, timed piece by piece.

A script by itself, since it runs with earlier versions too: since 0.17.0, whose modules had other names. It reads one
JSON object per line, and answers each by another.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_OLD = {  # modules and names of 0.17.0, by those of now
    "spr.config.presets": "spr.methods",
    "spr.envs.registry": "spr.envs",
    "spr.training.fleet": "spr.fleet",
    "spr.training.loop": "spr.training",
    "spr.training.actor": "spr.actor",
    "spr.training.update_runner": "spr.learner",
    "spr.common.hardware": "spr.hardware",
    "spr.common.plugins": "spr.plugins",
}


_OLD_NAMES = {"import_named": "load"}


def find(module: str, name: str) -> Any:
    """Return something of this version, whatever it and its module are called in it."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return getattr(import_module(_OLD[module]), _OLD_NAMES.get(name, name))


class TimedFleet:
    """A fleet past random play, and the pieces of its work that can be timed."""

    def __init__(self, preset: str, game: str, agents: int, changes: dict[str, Any], precision: str) -> None:
        """Assemble it, and play at random until it can learn."""
        import torch  # noqa: PLC0415 - after `spr`, which sets how threads wait

        device = torch.device("cpu")
        for module in [game.partition(":")[0]] if ":" in game else []:
            find("spr.common.plugins", "import_named")(module)
        find("spr.common.hardware", "tune")(device, precision)
        config = find("spr.config.presets", "preset_config")(preset).override(changes)
        start = max(256, config.horizon + config.observation.stack + config.replay.batch_size)
        config = config.override({"schedule.learning_starts": start})
        self._envs = find("spr.envs.registry", "make_each")([game] * agents, config.observation)
        matmul_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        fleet = find("spr.training.fleet", "assemble")(config, self._envs, range(agents), device, matmul_dtype)
        self._loop = find("spr.training.loop", "train")(fleet)
        next(info for info in self._loop if info.step == start)
        runner = find("spr.training.update_runner", "UpdateRunner")
        self._act = find("spr.training.actor", "ActStep")(fleet)
        self.work: dict[str, Callable[[], Any]] = {
            "update": runner(fleet.learner, fleet.state, fleet.replay, fleet.rng),
            "act": self._act_once,
            "step": lambda: next(self._loop),
        }

    def _act_once(self) -> None:
        self._act.act_async(greedy=True)
        self._act.act_wait()

    def milliseconds(self, what: str, times: int) -> float:
        """Return how long one piece of work takes, by the mean over so many."""
        began = time.perf_counter()
        for _ in range(times):
            self.work[what]()
        return (time.perf_counter() - began) / times * 1e3


def main() -> None:
    """Answer requests until there are no more."""
    import_module("spr")
    fleet: TimedFleet | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "preset" in asked:
            fleet = TimedFleet(**asked)
            answer: Any = "ready"
        else:
            assert fleet is not None
            answer = fleet.milliseconds(asked["what"], asked["times"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
