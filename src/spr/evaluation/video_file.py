"""Owns where the images of a film go: a file written by FFmpeg, or a window."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from spr.common import atomic_files
from spr.common.errors import UserError
from spr.envs.base import Image as Picture
from spr.evaluation.canvas import HEIGHT, WIDTH
from spr.runs import run_files

Show = Callable[[Picture], bool]  # shows a frame; False ends the film
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
    with tempfile.TemporaryFile() as errors, _taking_place_of(path) as beside:
        # Into the open file, not by its name: who is stopped while FFmpeg starts has removed that already.
        process = subprocess.Popen(
            [*begin, "-fd", "1", "fd:"], stdin=subprocess.PIPE, stdout=beside, stderr=errors, start_new_session=True
        )
        assert process.stdin is not None

        def failed() -> UserError:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
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
        raise run_files.unusable(path, error) from error


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
