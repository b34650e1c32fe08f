"""Draws the README's picture from a run of `catch`: python docs/examples/picture.py RUN docs/images/training.png."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from spr.envs.base import Envs
from spr.envs.registry import make


def main(run: Path, out: Path) -> None:
    """Show one falling ball as the agent sees it, the score while training, and what SPR's loss does meanwhile."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    learning = [row for row in rows if "cosine" in row]
    learning_starts = result["config"]["schedule"]["learning_starts"]

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (seen, score, latent) = plt.subplots(1, 3, figsize=(11, 3), layout="constrained", width_ratios=(1.35, 1, 1))
    envs = make("catch", 1)
    frames = [envs.reset([4])[0, 0]] + [_after(envs, a) for a in (2, 1)]
    strip = np.concatenate([np.pad(frame, 3, constant_values=90) for frame in frames], 1)
    seen.imshow(strip, cmap="gray", vmin=0, vmax=255)
    seen.set_title("what the agent sees: a ball, a paddle")
    seen.set_axis_off()

    score.plot(
        [row["step"] for row in rows if row["score"] is not None], [r["score"] for r in rows if r["score"] is not None]
    )
    score.axhline(result["random_score"], color="0.5", linestyle="--", linewidth=1)
    score.text(0, result["random_score"] - 1.6, "random agent (dashed)", color="0.4")
    score.text(learning_starts - 40, 0.2, "learning starts", color="0.4", ha="right")
    score.plot(result["steps"], result["score"], "o", color="C1", clip_on=False)
    score.annotate("100 games\nafterwards", (result["steps"], result["score"]), (-62, -24), textcoords="offset points")
    score.axvline(learning_starts, color="0.8", linewidth=1)
    score.set(xlabel="environment steps", ylim=(0, 10.4), title="balls caught of ten, last ten games")

    steps = [row["step"] for row in learning]
    latent.plot(steps, [row["cosine"] for row in learning], label="prediction's cosine with the future")
    latent.plot(steps, [row["spread"] for row in learning], label="spread of latents (0 is collapse)")
    latent.set(xlabel="environment steps", ylim=(0, 1.05), title="self-prediction")
    latent.legend(frameon=False, loc="center right", fontsize=8)
    figure.savefig(out, dpi=130)


def _after(envs: Envs, action: int) -> NDArray[np.uint8]:
    envs.send(np.array([action]))
    frame: NDArray[np.uint8] = envs.recv().frame[0, 0]
    return frame


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
