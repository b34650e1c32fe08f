"""Owns launching updates: random numbers first, the update captured as one CUDA graph, and the metrics' means."""

import torch
from torch import Tensor

from spr.agent.random_streams import RawNumbers, RngStreams
from spr.agent.replay import Replay
from spr.agent.schedules import new_scalars
from spr.ops.cuda_graphs import captured, compiled
from spr.training.learner import Learner, LearnerState


class UpdateRunner:
    """The updates of one fleet: called once per update, eager on a CPU, one captured CUDA graph on a GPU.

    What changes from update to update is read from device memory: so are the places of the streams of random numbers,
    which the graph advances at each replay, and `rates`, scalars that the training loop fills.
    """

    def __init__(self, learner: Learner, state: LearnerState, replay: Replay, rng: RngStreams) -> None:
        """Nothing is compiled or captured yet."""
        self.rates = new_scalars(learner.config, rng.device)
        self._learner, self._state, self._replay, self._rng = learner, state, replay, rng
        self._sums: Tensor | None = None
        self._names: list[str] = []
        # The random numbers of each agent's last update, or of the one by which it diverged.
        self.last_raw = RawNumbers(*(torch.zeros_like(part) for part in rng.empty()))
        self._updates = 0
        self._note_raw = compiled(self._note, rng.device)
        self._once = captured(self._update, rng.device)

    def __call__(self) -> None:
        """Do one update."""
        self._updates += 1
        self._once()

    def _update(self) -> None:
        raw = self._rng.sample_raw()
        self._note_raw(raw)
        metrics = self._learner.update(self._state, self._replay, self._rng, raw, self.rates)
        if self._sums is None or self._names != list(metrics):
            self._names, self._updates = list(metrics), 1
            self._sums = torch.zeros(len(metrics), self._rng.agents, device=self._rng.device)
        self._sums += torch.stack(list(metrics.values()))

    def _note(self, raw: RawNumbers) -> None:
        """Note the numbers before the update: an agent that diverges by them keeps them."""
        for last, new in zip(self.last_raw, raw, strict=True):
            last.copy_(torch.where(self._state.diverged[:, None], last, new))

    def means(self) -> dict[str, list[float]]:
        """Return the means of the metrics since the last time, by agent; nothing before the first update."""
        if self._sums is None or self._updates == 0:
            return {}
        columns = (self._sums / self._updates).tolist()
        self._sums.zero_()
        self._updates = 0
        return dict(zip(self._names, columns, strict=True))

    def sums(self) -> tuple[list[str], Tensor, int]:
        """Return the names, sums [metrics, S] and number of updates behind the next means, for a checkpoint."""
        if self._sums is None:
            return [], torch.zeros(0, self._rng.agents), 0
        return self._names, self._sums.cpu(), self._updates

    def restore(self, names: list[str], sums: Tensor, updates: int) -> None:
        """Take up what `sums` returned."""
        if names:
            self._names, self._sums, self._updates = names, sums.to(self._rng.device), updates
