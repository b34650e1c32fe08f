"""Owns watching an agent play: one game, step by step, drawn as a film.

Shapes: A actions, Z atoms, K steps ahead that the transition model is trained for; latents z are [1, H, W, C], and
pictures [H, W, 3].
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spr.agent.action_padding import crop_actions
from spr.agent.auxiliary_losses import cosine
from spr.agent.networks import Networks, networks_without_weights
from spr.agent.parameter_layout import Layout
from spr.agent.q_head import num_actions_of
from spr.common.errors import UnusableError, UserError
from spr.config.config import Config
from spr.envs.base import Shown, seeds_for
from spr.envs.registry import make_shown
from spr.evaluation import episodes
from spr.evaluation.canvas import Canvas, Moment
from spr.evaluation.video_file import Show
from spr.runs import compatibility, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint
from spr.training.actor import Actor

LONGEST = 5_000  # steps of a game that nobody has limited
_WINDOW = 16  # steps of the game over which the transition model normalises


class Player(NamedTuple):
    """An agent, ready to play, and its game."""

    run: Run  # its step is the one after which these weights were saved
    networks: Networks
    envs: Shown
    notes: list[str]  # files that could not be used, each with the reason

    def close(self) -> None:
        """Release the game."""
        self.envs.close()


def load_player(path: Path, device: torch.device) -> Player:
    """Read the newest agent of a run's folder, be it a checkpoint's, or an exported one, and open its game."""
    unsaved = path.is_dir() and not (path / "agent.safetensors").is_file()
    run, weights = (run_folder.describe(path), None) if unsaved else run_folder.load_run(path)
    compatibility.refuse_other_rom(run)
    steps = [step for step in checkpoint.steps_of(path) if weights is None or step > (run.step or 0)]
    if weights is None and not steps:
        raise UserError(f"{path} has neither an agent nor a checkpoint yet: there is nothing to play")
    envs = make_shown(run.game, run.config.observation, run.arguments)
    try:
        notes: list[str] = []
        for step in steps:
            try:
                run, weights = run._replace(step=step), _weights_at(path, step, run.config, envs)
                break
            except UnusableError as problem:
                notes.append(f"{checkpoint.path_of(path, step)} can't be used: {problem}")
        if weights is None:
            raise UserError(f"there is nothing to play: {notes[0]}")
        learnt = num_actions_of(run.config, {name: p.shape for name, p in weights.items()})
        if learnt != len(envs.action_names):
            raise UserError(f"this agent chooses between {learnt} actions, but {run.game} has {len(envs.action_names)}")
        networks = networks_without_weights(run.config, learnt, device)
        networks.load_state_dict({name: p.to(device) for name, p in weights.items()}, assign=True)
    except UserError:
        envs.close()
        raise
    return Player(run, networks.requires_grad_(False), envs, notes)


def _weights_at(path: Path, step: int, config: Config, envs: Shown) -> dict[str, Tensor]:
    """Return the weights in a run's checkpoint, with the game's own actions only."""
    networks = networks_without_weights(config, envs.num_actions, torch.device("cpu"))
    layout = Layout({name: p.shape for name, p in networks.named_parameters()}, networks.groups())
    row = "target" if config.learner.average > 0 else "weights"  # the average acts
    named = layout.views(checkpoint.read_row(path, step, row, layout.size))
    return crop_actions(named, networks.action_dims(), len(envs.action_names), envs.num_actions)


def play(agent: Player, seed: int, most: int = LONGEST) -> Iterator[Moment]:
    """Play the first game that `evaluation.play` plays with this seed, to its end or for so many steps.

    The same agent and seed give the same game, where the environment repeats itself.
    """
    config, networks, envs = agent.run.config, agent.networks, agent.envs
    device = networks.support.device
    stacks = Actor(config, envs.num_actions, (1, 1), device)
    foresight = Foresight(networks, config.learner.depth) if config.has_model else None
    rules = episodes.Rules(seed, config.evaluation.epsilon, most)
    exploration = episodes.Exploration(rules, 0, len(envs.action_names))
    frame, is_first, score = envs.reset(seeds_for(seed, "evaluate", 1)), True, 0.0
    for step in range(1, most + 1):
        other = exploration.at(step - 1)
        stacks.observe(torch.from_numpy(frame).to(device)[None], torch.tensor([[is_first]], device=device))
        z = networks.encoder(stacks.stack[0].to(networks.support.dtype) / 255)
        outputs = networks.head(z.flatten(1), ())[0, 0]  # [A, Z]
        q_values = networks.q_values(outputs)
        action = int(q_values.argmax()) if other is None else other
        moment = Moment(
            step=step,
            picture=envs.picture(),
            q_values=q_values.cpu().numpy(),
            action=action,
            explores=other is not None,
            distribution=outputs[action].softmax(-1).cpu().numpy() if networks.categorical else None,
            cosines=None if foresight is None else foresight(z, is_first, action),
            score=score,
        )
        envs.send(np.array([action]))
        out = envs.recv()
        frame, is_first, score = out.frame, bool(out.terminal[0] | out.truncated[0]), score + float(out.reward[0])
        yield moment._replace(score=score)
        if out.game_over[0]:
            return


class Foresight:
    """How well the transition model foresaw the present k steps ago, as the SPR loss compares.

    The latent of k steps ago is rolled forward by the actions that were taken since, projected and passed through the
    predictor; its cosine with the projection of the present latent is the measure. Both are the online networks': the
    moving average, where there is one, is not part of an agent.

    The model normalises over the batch it is given. In learning these are sequences from all over the replay; here they
    are the last steps of the game, which are rolled forward together.
    """

    def __init__(self, networks: Networks, depth: int, window: int = _WINDOW) -> None:
        """Nothing has been seen yet."""
        self._networks, self._depth = networks, depth
        self._latents: deque[Tensor] = deque(maxlen=max(window, depth))
        self._actions: deque[int] = deque(maxlen=max(window, depth))
        self._since = 0  # steps since the episode began

    def __call__(self, z: Tensor, is_first: bool, action: int) -> NDArray[np.float32]:
        """Return the cosines for k = 1..K, NaN where that reaches before the episode; note what is done now."""
        networks = self._networks
        self._since = 0 if is_first else self._since + 1
        cosines = np.full(self._depth, np.nan, np.float32)
        target = networks.project(z.flatten(1))
        ahead = torch.cat([*self._latents, z])[:-1]
        taken = torch.tensor(self._actions, dtype=torch.int64, device=z.device)
        for k in range(1, min(self._depth, self._since) + 1):
            # Row i began i steps after the first, and is k steps ahead of that now: the last row is the present.
            ahead = networks.transition(ahead, networks.transition.action_bias(taken[k - 1 :])[None])[0]
            predicted = networks.predict(networks.project(ahead[-1:].flatten(1)))
            cosines[k - 1] = float(cosine(predicted, target))
            ahead = ahead[:-1]
        self._latents.append(z)
        self._actions.append(action)
        return cosines


def film(agent: Player, seed: int, most: int, shows: Sequence[Show]) -> Iterator[Moment]:
    """Play one game and draw every step, until it is over or the window is closed."""
    run = agent.run
    learnt = "" if run.step is None else f" after {run.step:,} steps"
    support = agent.networks.support.cpu().numpy()
    canvas = Canvas(f"{run.preset} on {run.game}{learnt}", agent.envs.action_names, support)
    for moment in play(agent, seed, most):
        picture = canvas.draw(moment)
        wanted = [show(picture) for show in shows]
        yield moment
        if not all(wanted):
            return
