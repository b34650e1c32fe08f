"""Draw what an update costs per agent over the size of a fleet, from the JSON of `spr bench`.

spr bench --games all --device cuda --agents 1 2 4 10 16 26 32 48 64 --json > bench.json
python docs/examples/cost_per_agent.py docs/images/cost_per_agent.png bench.json

Sizes may have been timed one after another: several files are one figure.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

FLOOR_MS = 0.1  # arithmetic and memory traffic of one agent's update on an H200 (docs/performance.md)


def main(target: Path, sources: list[Path]) -> None:
    """Read the rows and draw them."""
    benches = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    (version,) = {bench["version"] for bench in benches}
    (preset,) = {bench["preset"] for bench in benches}
    rows = sorted((row for bench in benches for row in bench["rows"]), key=lambda row: row["agents"])
    agents = [row["agents"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(agents, [row["update_ms_per_agent"] for row in rows], "o-", label="update")
    axes.plot(agents, [row["step_ms"] / row["agents"] for row in rows], "s-", label="whole step: 2 updates and acting")
    axes.axhline(FLOOR_MS, color="gray", linestyle="--", label="floor of an update")
    axes.set(xscale="log", yscale="log", xlabel="agents in the fleet", ylabel="milliseconds per agent")
    axes.set_xticks(agents, [str(size) for size in agents])
    axes.minorticks_off()
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.set_title(f"{preset}, {rows[0]['precision']}, {rows[0]['device']}, version {version}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(source) for source in sys.argv[2:]])
