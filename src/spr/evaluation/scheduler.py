"""Owns the protocol's evaluation: a fixed number of whole games per agent, each counted from before its first move.

Games do not depend on each other (see `episodes`). So an agent scores the same beside any other agents, up to the
rounding of products (one agent alone is one batch). Games are played wherever a core is free: by emulators in this
process (`inprocess_backend`), or beside a GPU in processes of their own (`subprocess_backend`).
Shapes: S agents, R rows of E emulators, each row lent to one agent; L lanes of rows that act by the same parameters; A
actions; frames are [C, H, W].
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spr.common.hardware import cores
from spr.config.config import Config
from spr.envs.base import seeds_for
from spr.envs.registry import family
from spr.evaluation.batched_policy import Agents, BatchedPolicy, with_action_room
from spr.evaluation.episodes import Arrays, EmulatorBackend, Row, Rules
from spr.evaluation.inprocess_backend import InProcessBackend
from spr.evaluation.row_pool import EpisodeLog, RowPool, most_left
from spr.evaluation.subprocess_backend import SubprocessBackend

_EMULATORS = 2  # of a row in this process: few, since all of them step until the last of their games is over
_IN_A_PROCESS = 3  # emulators: they share messages, and one after another they take longer to end the last games


class EvaluationProgress(NamedTuple):
    """How far an evaluation has come, by agent and game."""

    scores: list[list[float | None]]  # raw; None where a game is not finished
    lengths: list[list[int]]  # steps of the games that are
    finished: int  # games, over all agents
    steps: int  # that were played for all games, of which what several have in common is played once


def play(config: Config, agents: Agents, epsilon: float | None = None) -> Iterator[EvaluationProgress]:
    """Play `evaluation.episodes` games per agent without network noise; the last thing yielded holds every score.

    Evaluation alternates between two halves of the rows: while one half steps, actions are selected for the other. A
    free emulator starts its agent's next game, and a free row goes to the agent with the most left to play. Agents with
    short games give up rows for very long games, which would otherwise start last (see `RowPool`). Every game that is
    started is finished and counted: to count the first that finish would favour short games.
    """
    games, params, seeds, _ = agents
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    rows = max(len(seeds), cores())  # of a half: with few agents enough for every core
    backend = _backend(config, agents, rows)
    logs = [
        EpisodeLog(seeds_for(seed, "evaluate", config.evaluation.episodes), backend.group_identical_starts)
        for seed in seeds
    ]

    def open_row(agent: int, where: tuple[int, int]) -> Row:
        rules = Rules(seeds[agent], chance, config.evaluation.max_steps)
        return backend.open(where, games[agent], rules, logs[agent].claim(backend.arrays.action.shape[-1]))

    try:
        places = backend.arrays.action.size if backend.idle_rest else 0
        pools = [RowPool(i, rows, logs, open_row, places) for i in range(2)]
        _start(pools, rows, backend, logs)
        started = dict(seat for pool in pools for seat in pool.seats.values())  # a row of every agent's
        params, action_mask = with_action_room(config, games, params, started)
        heights = [started[i].height for i in range(len(games))]
        policies = [
            BatchedPolicy(config, params, action_mask, heights, Arrays(*(array[i] for array in backend.arrays)))
            for i in range(2)
        ]
        while any(pool.seats for pool in pools):
            for pool, policy in zip(pools, policies, strict=True):
                backend.look(wait=False)
                pool.take()
                while pool.has_room and (agent := most_left(logs)) is not None:
                    pool.lend(agent)
                if ready := pool.ready:
                    policy.act(ready)
                    pool.step(ready)
            if any(pool.busy for pool in pools):
                backend.look(wait=True)
            over, steps = sum(log.over for log in logs), sum(log.steps for log in logs)
            yield EvaluationProgress([log.scores for log in logs], [log.lengths for log in logs], over, steps)
    finally:
        backend.close()


def _start(pools: Sequence["RowPool"], rows: int, backend: EmulatorBackend, logs: Sequence["EpisodeLog"]) -> None:
    """Lend the rows to the agents in turn, and wait until all have started their games."""
    for i in range(2 * rows):
        agent = i % len(logs)
        if logs[agent].unstarted:
            pools[i // rows].lend(agent)
    while any(pool.busy for pool in pools):
        backend.look(wait=True)
        for pool in pools:
            pool.take()


def _backend(config: Config, agents: Agents, rows: int) -> EmulatorBackend:
    """Choose where emulators live.

    In processes of their own no row waits for another: that is for a GPU, which chooses actions for some as fast as for
    all. A CPU does not, and has few cores for emulators beside that.
    """
    episodes = config.evaluation.episodes
    on_gpu = next(iter(agents.params.values())).device.type == "cuda"
    if on_gpu and all(family(game) == "atari" for game in agents.games):
        # Every process has three games to play before one has several at a time: first games are played by themselves,
        # and others must be left to be played in groups.
        most = len(agents.games) * episodes // (3 * 2 * rows)
        return SubprocessBackend((2, rows, max(1, min(_IN_A_PROCESS, most))), config.observation)
    return InProcessBackend((2, rows, min(_EMULATORS, episodes)), config.observation, agents.arguments)
