"""Owns the protocol's evaluation: a fixed number of whole games per agent, each counted from before its first move.

Games do not depend on each other (see `playing`). So agents score the same in any company, up to the rounding of
products (an agent by itself is one batch), and games are played wherever and whenever a core is free: by emulators in
this process (see `here`), or beside a GPU in processes of their own (see `elsewhere`).
Shapes: S agents, R rows of E emulators, each row lent to one agent; L lanes of rows that act by the same parameters; A
actions; frames are [C, H, W].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from spr.agent.networks import crop_actions, networks_without_weights, num_actions_of, pad_actions, valid_actions
from spr.common.errors import UserError
from spr.common.hardware import cores
from spr.config.config import Config
from spr.envs.base import seeds_for
from spr.envs.gymnasium_adapter import Argument
from spr.envs.registry import family
from spr.evaluation.episodes import Arrays, Ended, Game, Home, Row, Rules
from spr.evaluation.inprocess_backend import Here
from spr.evaluation.screen_resize import Resizer
from spr.evaluation.subprocess_backend import Processes
from spr.ops.cuda_graphs import Inbox, Outbox, captured
from spr.training.actor import Actor

_EMULATORS = 2  # of a row in this process: few, since all of them step until the last of their games is over
_IN_A_PROCESS = 3  # emulators: they share messages, and one after another they take longer to end the last games
_WORTH_STARTING = 2_000  # steps that an agent must have left to play: a row's emulators take a third as long to start
_GROUP_STEPS = 8_000  # steps that games played in a group may take: long ones share little, and would be waited for
_LONGER = 3  # times as long as an agent's own must another's games be, for its rows to make way


class Playing(NamedTuple):
    """How far an evaluation has come, by agent and game."""

    scores: list[list[float | None]]  # raw; None where a game is not finished
    lengths: list[list[int]]  # steps of the games that are
    finished: int  # games, over all agents
    steps: int  # that were played for all games, of which what several have in common is played once


class Agents(NamedTuple):
    """Who plays: S agents, each at its place."""

    games: Sequence[str]
    params: dict[str, Tensor]  # [S, ...] each
    seeds: Sequence[int]
    arguments: Mapping[str, Argument] = MappingProxyType({})  # of their environments


def play(config: Config, agents: Agents, epsilon: float | None = None) -> Iterator[Playing]:
    """Play `evaluation.episodes` games per agent without network noise; the last thing yielded holds every score.

    Rows are in two halves: while the emulators of one half step, the actions of the other are selected. A free emulator
    starts its agent's next game, and a free row goes to the agent with the most left to play; so that very long games
    do not start last, and are waited for, rows of other agents make way for them (see `_Half`). Every game that is
    started is finished and counted, so short games are not favoured, as they would be if the first to finish counted.
    """
    games, params, seeds, _ = agents
    chance = config.evaluation.epsilon if epsilon is None else epsilon
    rows = max(len(seeds), cores())  # of a half: with few agents enough for every core
    home = _home(config, agents, rows)
    logs = [_EpisodeLog(seeds_for(seed, "evaluate", config.evaluation.episodes), home.alike) for seed in seeds]

    def open_row(agent: int, where: tuple[int, int]) -> Row:
        rules = Rules(seeds[agent], chance, config.evaluation.max_steps)
        return home.open(where, games[agent], rules, logs[agent].claim(home.arrays.action.shape[-1]))

    try:
        places = home.arrays.action.size if home.idle_rest else 0
        halves = [_Half(i, rows, logs, open_row, places) for i in range(2)]
        _start(halves, rows, home, logs)
        started = dict(seat for half in halves for seat in half.seats.values())  # a row of every agent's
        params, valid = _with_room(config, games, params, started)
        heights = [started[i].height for i in range(len(games))]
        choices = [
            _Choice(config, params, valid, heights, Arrays(*(array[i] for array in home.arrays))) for i in range(2)
        ]
        while any(half.seats for half in halves):
            for half, choice in zip(halves, choices, strict=True):
                home.look(wait=False)
                half.take()
                while half.has_room and (agent := _most_left(logs)) is not None:
                    half.lend(agent)
                if ready := half.ready:
                    choice.act(ready)
                    half.step(ready)
            if any(half.busy for half in halves):
                home.look(wait=True)
            over, steps = sum(log.over for log in logs), sum(log.steps for log in logs)
            yield Playing([log.scores for log in logs], [log.lengths for log in logs], over, steps)
    finally:
        home.close()


def _start(halves: Sequence["_Half"], rows: int, home: Home, logs: Sequence["_EpisodeLog"]) -> None:
    """Lend the rows to the agents in turn, and wait until all have started their games."""
    for i in range(2 * rows):
        agent = i % len(logs)
        if logs[agent].unstarted:
            halves[i // rows].lend(agent)
    while any(half.busy for half in halves):
        home.look(wait=True)
        for half in halves:
            half.take()


def _worth_a_row(logs: Sequence["_EpisodeLog"]) -> list[int]:
    """Return the agents with games to start that are worth another row, or that have no row to be started in."""
    return [i for i, log in enumerate(logs) if log.unstarted and (log.steps_left >= _WORTH_STARTING or log.rows == 0)]


def _most_left(logs: Sequence["_EpisodeLog"]) -> int | None:
    """Return the agent to whom a free row goes, if it goes to anybody."""
    return max(_worth_a_row(logs), key=lambda i: logs[i].steps_left, default=None)


def _home(config: Config, agents: Agents, rows: int) -> Home:
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
        return Processes((2, rows, max(1, min(_IN_A_PROCESS, most))), config.observation)
    return Here((2, rows, min(_EMULATORS, episodes)), config.observation, agents.arguments)


class _EpisodeLog:
    """The games of one agent: how many have started, how long they are, and the scores of those that are over."""

    def __init__(self, starts: Sequence[int], alike: Callable[[Sequence[int]], list[list[int]]]) -> None:
        self._starts = starts
        self._groups = alike(starts)  # numbers of games that have not started
        self.scores: list[float | None] = [None] * len(starts)
        self.lengths = [0] * len(starts)
        self.over = 0
        self.steps = 0  # that were played for all its games
        self.rows = 0  # that are lent to it

    @property
    def unstarted(self) -> int:
        """How many games have not started."""
        return sum(map(len, self._groups))

    def claim(self, count: int) -> list[list[Game]]:
        """Return the next games, in at most so many groups that begin alike; none if all have started."""
        groups, self._groups = self._groups[:count], self._groups[count:]
        # How long games are is not known before one is over.
        size = max(1, int(_GROUP_STEPS / self.length)) if self.over else 1
        self._groups += [group[size:] for group in groups if group[size:]]
        return [[Game(number, self._starts[number]) for number in group[:size]] for group in groups]

    def finish(self, ended: Ended) -> None:
        """Note a game that is over."""
        self.scores[ended.number], self.lengths[ended.number] = ended.score, ended.length
        self.over += 1

    @property
    def length(self) -> float:
        """How many steps a game takes to play, by those played so far; what games share counts once."""
        return self.steps / max(self.over, 1)

    @property
    def steps_left(self) -> float:
        """How many steps the games that have not started will take, if they take as many as the others."""
        return self.unstarted * self.length


class _Half:
    """Half of the rows: to whom each is lent, and which are busy."""

    def __init__(
        self,
        number: int,
        rows: int,
        logs: Sequence[_EpisodeLog],
        open_row: Callable[[int, tuple[int, int]], Row],
        places: int,
    ) -> None:
        """No row is lent yet. `places` are the emulators of both halves, or 0 if one without a game does not rest."""
        self._number, self._rows, self._logs, self._open_row = number, rows, logs, open_row
        self._places = places
        self.seats: dict[int, tuple[int, Row]] = {}  # by place: whose row it is
        self.busy: set[int] = set()  # places

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return len(self.seats) < self._rows

    @property
    def ready(self) -> dict[int, int]:
        """The places whose emulators wait for an action, and whose they are."""
        return {place: agent for place, (agent, _) in self.seats.items() if place not in self.busy}

    def lend(self, agent: int) -> None:
        """Begin to start games of an agent in a free place."""
        place = next(i for i in range(self._rows) if i not in self.seats)
        self.seats[place] = agent, self._open_row(agent, (self._number, place))
        self._logs[agent].rows += 1
        self.busy.add(place)

    def step(self, places: Iterable[int]) -> None:
        """Let emulators step, with the actions that lie in their places."""
        for place in places:
            agent, row = self.seats[place]
            row.send()
            self._logs[agent].steps += row.playing
        self.busy.update(places)

    def take(self) -> None:
        """Take in what was done meanwhile: note games that are over, start the next ones, close rows without games."""
        for place in [place for place in self.busy if self.seats[place][1].done]:
            agent, row = self.seats[place]
            ended = row.take()
            self.busy.discard(place)
            for game in ended:
                self._logs[agent].finish(game)
            if ended and (idle := row.idle):
                self._next(place, idle)

    def _next(self, place: int, idle: list[int]) -> None:
        """Start the next games of a row some of whose emulators have none left, or leave it if there are none."""
        agent, row = self.seats[place]
        log = self._logs[agent]
        groups = {} if self._makes_way(log) else dict(zip(idle, log.claim(len(idle)), strict=False))
        if groups:
            row.go_on(groups)
            self.busy.add(place)
        elif row.over:
            row.close()
            log.rows -= 1
            del self.seats[place]

    def _makes_way(self, log: _EpisodeLog) -> bool:
        """Whether an agent starts no more games for now, so that its rows get free for another's, which are longer.

        It does where one emulator would take as long for one of those as all of them together for what is left.
        """
        length = max((self._logs[i].length for i in _worth_a_row(self._logs)), default=0.0)
        left = sum(other.steps_left for other in self._logs)
        return length > _LONGER * log.length and length * self._places >= left


class _Choice:
    """The actions of half of the rows, [R, E]: what they see, and the parameters of the agent that each is lent to.

    Every row is a lane of its own, L = R, since it may be lent to anybody. An agent that plays by itself has all rows,
    so they are one lane, L = 1: no copies of its weights, and the frames of all of them in one batch, where
    those of a row are too few to fill a GPU.
    """

    def __init__(
        self,
        config: Config,
        params: dict[str, Tensor],
        valid: Tensor | None,
        heights: Sequence[int | None],
        arrays: Arrays,
    ) -> None:
        """No row has been lent yet. `heights` are those of the agents' screens, or None where frames are shown."""
        shape = arrays.action.shape
        device = next(iter(params.values())).device
        room = num_actions_of(config, {name: p.shape for name, p in params.items()})
        lanes = 1 if len(heights) == 1 else shape[0]
        actor = Actor(config, room, (lanes, shape[0] * shape[1] // lanes), device)
        self._arrays = arrays
        # What each row acts by, and where it is copied from when the row is lent to another agent.
        self._agents = {name: p for name, p in params.items() if name in actor.names}
        self._lanes = lanes
        self._lent = {name: p.new_zeros((lanes, *p.shape[1:])) for name, p in self._agents.items()}
        self._valid = valid
        self._lent_valid = None if valid is None else valid.new_zeros((lanes, room))
        self._heights = heights
        resizer = None if None in heights else Resizer(shape[0], config.observation, device)
        self._resizer = resizer
        self._whose = [-1] * shape[0]
        self._moved = np.zeros(shape[0], np.bool_)
        inbox = Inbox(device, {"frame": arrays.frame, "is_first": arrays.is_first, "moved": self._moved})

        def in_lanes(x: Tensor) -> Tensor:
            return x.reshape(lanes, -1, *x.shape[2:])

        def act() -> Tensor:
            shown, is_first = inbox["frame"], inbox["is_first"]
            frames = shown if resizer is None else resizer(shown)
            moved = inbox["moved"][:, None].expand_as(is_first)
            actor.observe(in_lanes(frames), in_lanes(is_first), in_lanes(moved))
            return actor.greedy(self._lent, noise=(), valid=self._lent_valid).view(shape)

        self._inbox, self._outbox = inbox, Outbox(device)
        self._act = captured(act, device)

    def act(self, ready: Mapping[int, int]) -> None:
        """Select actions for some places, by the agents given for them; the others keep what they have seen."""
        for place, agent in ready.items():
            if self._whose[place] != agent:
                self._lend(place, agent)
        places = list(ready)
        self._moved[:] = False
        self._moved[places] = True
        # Rows at work may write meanwhile; what they have not finished is not looked at.
        self._inbox.send_some("frame", places, self._arrays.frame)
        self._inbox.send(is_first=self._arrays.is_first, moved=self._moved)
        self._outbox.post(self._act())
        self._arrays.action[places] = self._outbox.read()[places]

    def _lend(self, place: int, agent: int) -> None:
        self._whose[place] = agent
        if self._resizer is not None and (height := self._heights[agent]) is not None:
            self._resizer.lend(place, height)
        lane = place % self._lanes
        for name, p in self._agents.items():
            self._lent[name][lane].copy_(p[agent])
        if self._valid is not None and self._lent_valid is not None:
            self._lent_valid[lane].copy_(self._valid[agent])


def _with_room(
    config: Config, games: Sequence[str], params: dict[str, Tensor], rows: Mapping[int, Row]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Give agents room for as many actions as their environments have, and return which are valid, [S, A].

    In a fleet they have it already; stored agents have their own actions only.
    """
    room = rows[0].num_actions
    learnt = num_actions_of(config, {name: p.shape for name, p in params.items()})
    own = [rows[i].own_actions or room for i in range(len(games))]
    device = next(iter(params.values())).device
    dims = networks_without_weights(config, room, device).action_dims()
    for i, (game, mine) in enumerate(zip(games, own, strict=True)):
        agent = {name: p[i] for name, p in params.items()}
        if learnt == room:  # what an agent of a fleet has no use for is zero
            again = pad_actions(crop_actions(agent, dims, mine, room), dims, mine, room)
            fits = all(bool((again[name] == agent[name]).all()) for name in dims)
        else:
            fits = learnt == mine
        if not fits:
            raise UserError(f"this agent chooses between {learnt} actions, but {game} has {mine}")
    if learnt != room:
        # One dimension more: that of the agents comes first.
        wider = {name: dim._replace(dim=dim.dim + 1) for name, dim in dims.items()}
        params = pad_actions(params, wider, learnt, room)
    return params, None if rows[0].own_actions is None else valid_actions(own, room, device)
