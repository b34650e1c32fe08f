"""Owns watching an agent play: one game, step by step, drawn as a film.

Shapes: A actions, Z atoms, K steps ahead that the transition model is trained for; latents z are [1, H, W, C], and
pictures [H, W, 3].
"""

import math
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from spr.agent.auxiliary_losses import cosine
from spr.agent.networks import Networks, crop_actions, networks_without_weights, num_actions_of
from spr.agent.parameter_layout import Layout
from spr.common import atomic_files
from spr.common.errors import UnusableError, UserError
from spr.config.config import Config
from spr.envs.base import Image as Picture
from spr.envs.base import Shown, seeds_for
from spr.envs.registry import make_shown
from spr.evaluation import episodes
from spr.runs import compatibility, run_folder
from spr.runs.run_folder import Run
from spr.training import checkpoint
from spr.training.actor import Actor

LONGEST = 5_000  # steps of a game that nobody has limited
_WINDOW = 16  # steps of the game over which the transition model normalises

Show = Callable[[Picture], bool]  # whether somebody wants to see more
_Colour = tuple[int, int, int]


class Agent(NamedTuple):
    """An agent, ready to play, and its game."""

    run: Run  # its step is the one after which these weights were saved
    networks: Networks
    envs: Shown
    notes: list[str]  # files that could not be used, each with the reason

    def close(self) -> None:
        """Release the game."""
        self.envs.close()


class Moment(NamedTuple):
    """One step of a game: what there was to see, what the agent made of it, and what it did."""

    step: int  # steps played, with this one
    picture: Picture  # before the action
    q_values: NDArray[np.float32]  # [A]
    action: int
    explores: bool  # whether chance chose the action
    distribution: NDArray[np.float32] | None  # [Z] of the action's return; None where Q-values are learnt directly
    cosines: NDArray[np.float32] | None  # [K] see `Foresight`; None without a transition model
    score: float  # with what the action earned


def load(path: Path, device: torch.device) -> Agent:
    """Read the newest agent of a run's folder, be it a checkpoint's, or an exported one, and open its game."""
    unsaved = path.is_dir() and not (path / "agent.safetensors").is_file()
    run, weights = (run_folder.describe(path), None) if unsaved else run_folder.load(path)
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
    return Agent(run, networks.requires_grad_(False), envs, notes)


def _weights_at(path: Path, step: int, config: Config, envs: Shown) -> dict[str, Tensor]:
    """Return the weights in a run's checkpoint, with the game's own actions only."""
    networks = networks_without_weights(config, envs.num_actions, torch.device("cpu"))
    layout = Layout({name: p.shape for name, p in networks.named_parameters()}, networks.groups())
    row = "target" if config.learner.average > 0 else "weights"  # the average acts
    named = layout.views(checkpoint.read_row(path, step, row, layout.size))
    return crop_actions(named, networks.action_dims(), len(envs.action_names), envs.num_actions)


def play(agent: Agent, seed: int, most: int = LONGEST) -> Iterator[Moment]:
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


WIDTH, HEIGHT = 1024, 672  # multiples of 16, as video codecs want them
_MARGIN, _BOX = 16, (512, 640)  # around everything, and of the game's picture
_LEFT, _RIGHT = 552, WIDTH - _MARGIN  # of the column beside it
_NAMES, _VALUES = 124, 62  # widths: of the names before bars, of the values behind them
_HEADING, _GAP, _THIN = 24, 14, 20  # heights: of a panel's title, between panels, of a thin bar
_MOST_ACTIONS, _MOST_AHEAD = 18, 6  # bars that fit
_BACK, _TROUGH, _DIM, _TEXT = (17, 19, 24), (36, 40, 49), (138, 144, 156), (222, 226, 233)
_BAR, _CHOSEN, _RANDOM, _FORESEEN = (92, 118, 166), (255, 166, 54), (240, 92, 84), (84, 180, 140)


class Canvas:
    """Draws moments of one game as pictures of one size; what stays the same is drawn once."""

    def __init__(self, title: str, action_names: Sequence[str], support: NDArray[np.float32]) -> None:
        """Take the title, the names of the actions, and the atoms of return distributions."""
        path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
        self._large, self._font, self._small = (ImageFont.truetype(path, size) for size in (20, 15, 12))
        self._title, self._names, self._support = title, list(action_names), support
        self._spread = 0.0

    def draw(self, moment: Moment) -> Picture:
        """Draw one moment; bars of Q-values are scaled by the largest spread of the last moments."""
        image = Image.new("RGB", (WIDTH, HEIGHT), _BACK)
        _place(image, moment.picture)
        draw = ImageDraw.Draw(image)
        draw.text((_LEFT, 14), self._fit(self._title, _RIGHT - _LEFT, self._large), _TEXT, self._large)
        draw.text((_LEFT, 44), f"step {moment.step:,}", _TEXT, self._font)
        draw.text((_LEFT + _NAMES, 44), f"score {moment.score:,.6g}", _TEXT, self._font)
        top = self._draw_q_values(draw, moment, 80)
        ahead = 0 if moment.cosines is None else _HEADING + _THIN * min(len(moment.cosines), _MOST_AHEAD) + _GAP
        if moment.distribution is not None:
            top = self._draw_distribution(draw, moment.distribution, top, min(HEIGHT - _MARGIN - ahead, top + 300))
        if moment.cosines is not None:
            self._draw_cosines(draw, moment.cosines, top)
        return np.asarray(image)

    def _draw_q_values(self, draw: ImageDraw.ImageDraw, moment: Moment, top: int) -> int:
        q = moment.q_values
        least, largest = float(q.min()), float(q.max())
        self._spread = max(largest - least, 0.98 * self._spread, 1e-6)
        shown: Sequence[int] = range(len(q))
        if len(q) > _MOST_ACTIONS:
            shown = sorted({*np.argsort(-q)[: _MOST_ACTIONS - 1].tolist(), moment.action})
        chosen = _RANDOM if moment.explores else _CHOSEN
        rows = [
            (self._names[i], (q[i] - least) / self._spread, f"{q[i]:.3f}", chosen if i == moment.action else _BAR)
            for i in shown
        ]
        draw.text((_LEFT, top), "Q-values", _TEXT, self._font)
        aside = "chosen at random" if moment.explores else "bars begin at the least of them"
        draw.text((_RIGHT, top + 2), aside, _RANDOM if moment.explores else _DIM, self._small, anchor="ra")
        return self._draw_bars(draw, rows, top + _HEADING, min(26, 288 // len(rows)))

    def _draw_cosines(self, draw: ImageDraw.ImageDraw, cosines: NDArray[np.float32], top: int) -> None:
        depth = len(cosines)
        shown = sorted({round(k) for k in np.linspace(1, depth, min(depth, _MOST_AHEAD))})
        rows = []
        for k in shown:
            value = float(cosines[k - 1])
            text = "-" if math.isnan(value) else f"{value:.3f}"
            rows.append((f"{k} step{'' if k == 1 else 's'} ago", value, text, _FORESEEN))
        draw.text((_LEFT, top), "How well this was foreseen", _TEXT, self._font)
        draw.text((_RIGHT, top + 2), "cosine of latents", _DIM, self._small, anchor="ra")
        self._draw_bars(draw, rows, top + _HEADING, _THIN)

    def _draw_bars(
        self,
        draw: ImageDraw.ImageDraw,
        rows: Sequence[tuple[str, float, str, tuple[int, int, int]]],
        top: int,
        each: int,
    ) -> int:
        """Draw a row for each name, share of the full length, value and colour; return where what follows begins."""
        font = self._font if each > _THIN else self._small
        left, right = _LEFT + _NAMES, _RIGHT - _VALUES
        for i, (name, share, value, colour) in enumerate(rows):
            y = top + i * each
            middle = y + each // 2
            shade = _DIM if colour == _BAR else _TEXT
            draw.text((_LEFT, middle), self._fit(name, _NAMES - 8, font), shade, font, anchor="lm")
            draw.rectangle((left, y + 2, right, y + each - 3), _TROUGH)
            if share >= 0:  # neither NaN nor the other way
                draw.rectangle(
                    (left, y + 2, left + max(1, round(min(share, 1) * (right - left))), y + each - 3), colour
                )
            draw.text((_RIGHT, middle), value, shade, font, anchor="rm")
        return top + len(rows) * each + _GAP

    def _draw_distribution(
        self, draw: ImageDraw.ImageDraw, probabilities: NDArray[np.float32], top: int, end: int
    ) -> int:
        """Draw a column for each atom between two heights, and the mean; return where what follows begins."""
        draw.text((_LEFT, top), "Return of this action", _TEXT, self._font)
        draw.text((_RIGHT, top + 2), f"largest share {probabilities.max():.0%}", _DIM, self._small, anchor="ra")
        high, low = top + _HEADING + 2, end - 18
        draw.rectangle((_LEFT, high, _RIGHT, low), _TROUGH)
        edges = np.linspace(_LEFT, _RIGHT, len(probabilities) + 1).round().astype(int).tolist()
        gap = 1 if len(probabilities) <= 100 else 0
        for i, share in enumerate((probabilities / probabilities.max()).tolist()):
            if tall := round(share * (low - high - 4)):
                draw.rectangle((edges[i] + gap, low - tall, max(edges[i] + gap, edges[i + 1] - 1), low), _CHOSEN)
        first, last = float(self._support[0]), float(self._support[-1])
        mean = float((probabilities * self._support).sum())
        inner = (_RIGHT - _LEFT) / len(probabilities) / 2  # half a column: atoms are in the middle of theirs
        x = _LEFT + inner + (mean - first) / (last - first) * (_RIGHT - _LEFT - 2 * inner)
        draw.line((x, high, x, low), _TEXT, 2)
        for place, text, anchor in ((_LEFT, f"{first:g}", "la"), (_RIGHT, f"{last:g}", "ra")):
            draw.text((place, low + 3), text, _DIM, self._small, anchor=anchor)
        near = min(max(x, _LEFT + 70), _RIGHT - 70)
        draw.text((near, low + 3), f"mean {mean:.3f}", _TEXT, self._small, anchor="ma")
        return end + _GAP

    def _fit(self, text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
        """Cut a text that is too wide."""
        while font.getlength(text) > width:
            text = text.rstrip("…")[:-1] + "…"
        return text


def _place(image: Image.Image, picture: Picture) -> None:
    """Put the game's picture into its box as large as it can be there, by whole steps where it grows."""
    height, width = picture.shape[:2]
    scale = min(_BOX[0] / width, _BOX[1] / height)
    small = scale < 1
    scale = scale if small else math.floor(scale)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    grown = Image.fromarray(picture).resize(size, Image.Resampling.BOX if small else Image.Resampling.NEAREST)
    image.paste(grown, tuple(_MARGIN + (box - side) // 2 for box, side in zip(_BOX, size, strict=True)))


def film(agent: Agent, seed: int, most: int, shows: Sequence[Show]) -> Iterator[Moment]:
    """Play one game and show every moment of it as a picture, until it is over or somebody has seen enough."""
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


# A GIF has 256 colours: each picture chooses its own.
_PALETTE = "split[one][two];[one]palettegen=stats_mode=single[colours];[two][colours]paletteuse=new=1:dither=none"
_FORMS = {
    ".mp4": ["-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-pix_fmt", "yuv420p", "-f", "mp4"],
    ".gif": ["-filter_complex", _PALETTE, "-f", "gif"],
}


@contextmanager
def writing(path: Path, fps: int, overwrite: bool = False) -> Iterator[Show]:
    """Write a film, whole or not at all: FFmpeg takes the pictures one by one, so no film is too long for memory."""
    if path.suffix.lower() not in _FORMS:
        raise UserError(f"a film is a file such as film{' or film'.join(_FORMS)}, not {path}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise UserError(f"{path} is there already: choose another name, or replace it with --overwrite")
    if not path.parent.is_dir():
        raise UserError(f"can't write to {path}: there is no folder {path.parent}")
    try:
        import imageio_ffmpeg  # noqa: PLC0415 - an extra that most users do without

        program = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UserError("a film is written by imageio-ffmpeg, which is not here: pip install imageio-ffmpeg") from error
    pictures = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{WIDTH}x{HEIGHT}", "-r", str(fps), "-i", "pipe:0"]
    begin = [program, "-loglevel", "error", "-y", *pictures, *_FORMS[path.suffix.lower()]]
    with tempfile.TemporaryFile() as said, _taking_place_of(path) as beside:
        # Into the open file, not by its name: who is stopped while FFmpeg starts has removed that already.
        process = subprocess.Popen(
            [*begin, "-fd", "1", "fd:"], stdin=subprocess.PIPE, stdout=beside, stderr=said, start_new_session=True
        )
        assert process.stdin is not None

        def failed() -> UserError:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            return UserError(f"can't write to {path}: {lines[-1] if lines else 'FFmpeg failed'}")

        def show(picture: Picture) -> bool:
            assert process.stdin is not None
            try:
                process.stdin.write(picture.tobytes())
            except BrokenPipeError as error:
                process.wait()
                raise failed() from error
            return True

        try:
            yield show
            process.communicate()
            if process.returncode:
                raise failed()
        finally:
            process.kill()
            process.communicate()


@contextmanager
def _taking_place_of(path: Path) -> Iterator[IO[bytes]]:
    try:
        with atomic_files.replacing(path) as beside:
            yield beside
    except OSError as error:
        raise run_folder.unusable(path, error) from error


@contextmanager
def window(fps: int) -> Iterator[Show]:
    """Open a window that shows pictures as they come, no faster than that; who closes it ends the game."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError("--live needs a display, and there is none here: without it a film is written")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - it looks for a display

    figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, frameon=False)
    try:
        if figure.canvas.required_interactive_framework is None:
            raise UserError(
                "--live needs a toolkit for windows that matplotlib knows (pip install pyqt6), and a display that it "
                "can reach: one of them is missing"
            )
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        shown = axes.imshow(np.zeros((HEIGHT, WIDTH, 3), np.uint8))

        def show(picture: Picture) -> bool:
            shown.set_data(picture)
            plt.pause(1 / fps)
            return plt.fignum_exists(figure.number)

        yield show
    finally:
        plt.close(figure)
