"""Custom environments, as functions that make them: MiniGrid, wrapped so that it returns images, and MinAtar.

spr train own_env:grid --env-arg size=6 --set observation.channels=3
spr train own_env:planes --env-arg game=breakout --set observation.channels=4 --set observation.stack=1
  --set observation.height=10 --set observation.width=10 --set network.encoder=minatar --set augment.shift=1
"""

from typing import Any

import gymnasium
from minatar.gym import BaseEnv
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper


def grid(size: int = 5, **more: Any) -> gymnasium.Env[Any, Any]:
    """Make an empty room of so many cells; what the agent sees of it is a picture, and nothing else."""
    env = gymnasium.make("MiniGrid-Empty-5x5-v0", size=size, **more)
    return ImgObsWrapper(RGBImgPartialObsWrapper(env))


def planes(game: str = "breakout", **more: Any) -> gymnasium.Env[Any, Any]:
    """Make a game of MinAtar: 10x10 cells, and a plane of booleans for each kind of thing in them."""
    env: gymnasium.Env[Any, Any] = BaseEnv(game, **more)
    return env
