"""Owns a trained agent in Python: how it acts, what it expects, what it sees and what it predicts.

Observations are stacks of frames [P, H, W] uint8, oldest first, or batches of them [B, P, H, W]; an `Observer` makes
them of an environment's images. What is given as an array comes back as an array, what is given as a tensor as a
tensor. Shapes: P planes (frames times channels), A actions, K steps ahead; latents are [H', W', C].
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from spr.agent.networks import Networks
from spr.agent.q_head import num_actions_of
from spr.common.errors import UserError, shown
from spr.common.hardware import choose_device
from spr.config.config import Config
from spr.envs.gymnasium_adapter import WrongError, checked_image, picture_of, to_frame
from spr.runs import run_folder
from spr.runs.export import write_agent
from spr.runs.run_folder import Run

Images = NDArray[Any] | Tensor
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Agent:
    """A trained agent; without network noise, as in evaluation."""

    def __init__(self, run: Run, weights: dict[str, Tensor], device: torch.device) -> None:
        """Take what a run is, and its weights."""
        self.run, self.device = run, device
        self.num_actions = num_actions_of(run.config, {name: p.shape for name, p in weights.items()})
        self._networks = Networks(run.config, self.num_actions).to(device)
        self._networks.load_state_dict(weights)
        self._networks.requires_grad_(False)

    @property
    def config(self) -> Config:
        """Everything that defines its method."""
        return self.run.config

    @property
    def game(self) -> str:
        """What it learnt to play."""
        return self.run.game

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters by name."""
        return dict(self._networks.named_parameters())

    def __repr__(self) -> str:
        learnt = "" if self.run.step is None else f", {self.run.step:,} steps"
        return f"Agent({self.run.preset} on {self.game}, seed {self.run.seed}{learnt}, {self.device})"

    def act(self, observation: Images) -> Any:
        """Return the best action: a whole number, or for a batch [B] of them."""
        best = self.q_values(observation).argmax(-1)
        return int(best) if best.ndim == 0 else best

    def q_values(self, observation: Images) -> Any:
        """Return what each action is worth, [A] or [B, A]."""
        return self._answer(observation, self._networks)

    def encode(self, observation: Images) -> Any:
        """Return the latents, [H', W', C] or [B, H', W', C]."""
        return self._answer(observation, self._networks.encoder)

    def predict(self, observation: Images, actions: Any) -> Any:
        """Return the latents that the transition model expects after each of K actions, [K, ...] or [B, K, ...].

        The actions are [K], or [B, K] for a batch.
        """
        if not self.config.has_model:
            raise UserError(f"an agent of '{self.run.preset}' has no transition model")
        chosen = self._chosen(observation, actions)

        def roll(x: Tensor) -> Tensor:
            networks, steps = self._networks, chosen.view(len(x), -1).T  # [K, B]
            bias = networks.transition.action_bias(steps.flatten()).unflatten(0, steps.shape)
            predicted: Tensor = networks.transition(networks.encoder(x), bias)
            return predicted.transpose(0, 1)

        return self._answer(observation, roll)

    def _chosen(self, observation: Images, actions: Any) -> Tensor:
        """Return the actions of `predict`, [K] or [B, K], if they fit."""
        chosen, seen = _tensor(actions), _tensor(observation)
        if chosen is not None and seen is not None and chosen.dtype in _WHOLE and chosen.dim() and chosen.numel():
            known = bool(chosen.min() >= 0 and chosen.max() < self.num_actions)
            if known and chosen.shape[:-1] == seen.shape[:-3]:
                return chosen.long().to(self.device)
        raise UserError(
            f"actions must be [K], or [B, K] for a batch, each a whole number from 0 to {self.num_actions - 1}"
        )

    def observer(self, env: Any = None) -> "Observer":
        """Return what turns an environment's images into this agent's observations.

        Images of bytes and of booleans speak for themselves. Of other numbers it must be known which are black and
        white: give the environment, or its observation space.
        """
        space = getattr(env, "observation_space", env)
        if space is not None and not isinstance(space, spaces.Space):
            raise UserError(f"an observer is given an environment or its observation_space, not {shown(env)}")
        return Observer(self.config, space)

    def save(self, path: str | Path) -> None:
        """Write the agent to one file, which `spr.load` and `spr evaluate` read."""
        if str(path).endswith("/") or Path(path).is_dir():
            raise UserError(f"{path} is a folder: name a file, such as agent.safetensors; 'spr export' fills a folder")
        write_agent(self.run, self.weights, Path(path))

    @torch.no_grad()
    def _answer(self, observation: Images, ask: Any) -> Any:
        obs = self.config.observation
        shape = (obs.planes, obs.height, obs.width)
        given = _tensor(observation)
        if given is None or given.dtype != torch.uint8 or given.dim() not in (3, 4) or given.shape[-3:] != shape:
            found = (
                shown(observation) if given is None else f"{tuple(given.shape)} of {given.dtype}".replace("torch.", "")
            )
            raise UserError(
                f"an observation is {obs.planes}x{obs.height}x{obs.width} numbers of type uint8, or a batch of such, "
                f"not {found}; Agent.observer() makes them"
            )
        batch = given if given.dim() == 4 else given[None]
        answer: Tensor = ask(batch.to(self.device).float() / 255)
        answer = answer if given.dim() == 4 else answer[0]
        return answer if isinstance(observation, Tensor) else answer.cpu().numpy()


class Observer:
    """Turns an environment's images, one after the other, into observations [P, H, W].

    As training does with Gymnasium's environments. What agents see of Atari games is made by their emulators, which
    pool two frames and resize them otherwise.
    """

    def __init__(self, config: Config, space: spaces.Space[Any] | None = None) -> None:
        """Nothing has been seen; the space, where it is given, says what images are."""
        self._obs, self._space = config.observation, space
        self._picture = None if space is None else picture_of("the environment", space, self._obs)
        self._stack: NDArray[np.uint8] | None = None

    def reset(self, image: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the first observation of an episode: what came before is black."""
        obs = self._obs
        return self._add(np.zeros((obs.planes, obs.height, obs.width), np.uint8), image)

    def push(self, image: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the observation that this image completes."""
        if self._stack is None:
            raise UserError("an episode begins with reset(image); push(image) is for those that follow")
        return self._add(self._stack, image)

    def _add(self, stack: NDArray[np.uint8], image: Any) -> NDArray[np.uint8]:
        if (numbers := _tensor(image)) is None or not numbers.numel():
            raise UserError(f"an image is an array of numbers, not {shown(image)}")
        pixels = numbers.detach().cpu().numpy()
        space = _space_of(pixels) if self._space is None else self._space
        picture = self._picture or picture_of("the environment", space, self._obs)
        try:
            frame = to_frame(checked_image(pixels, space), self._obs, picture)
        except WrongError as problem:
            raise UserError(f"this is {problem}") from problem
        self._stack = np.concatenate([stack[self._obs.channels :], frame])
        return self._stack.copy()


def _space_of(image: NDArray[Any]) -> spaces.Space[Any]:
    """Return the space of images like this one, if its type says which numbers are black and white."""
    if image.dtype not in (np.uint8, np.bool_):
        raise UserError(
            f"an image of {image.dtype} does not say which of its numbers are black and white: agent.observer(env) "
            "takes that from the environment's observation_space; images of uint8 or booleans need none"
        )
    return spaces.Box(0, 255 if image.dtype == np.uint8 else 1, image.shape, image.dtype.type)


def _tensor(numbers: Any) -> Tensor | None:
    """Return numbers as a tensor, or None if they are none."""
    if isinstance(numbers, Tensor):
        return numbers
    try:
        return torch.as_tensor(np.ascontiguousarray(numbers) if np.ndim(numbers) else np.asarray(numbers))
    except (RuntimeError, TypeError, ValueError):
        return None


def load(path: str | os.PathLike[str], device: str = "auto") -> Agent:
    """Read an agent from a run's folder or from an exported file; nothing in it is ever run."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"an agent is loaded from a run's folder or an exported file, not from {shown(path)}")
    run, weights = run_folder.load_run(Path(path))
    return Agent(run, weights, choose_device(device))
