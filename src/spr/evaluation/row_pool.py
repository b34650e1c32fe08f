"""Owns which environments play for which agent in an evaluation: rows of them, assigned as games end.

Shapes: R rows of E environments.
"""

from collections.abc import Callable, Iterable, Sequence

from spr.evaluation.episodes import EpisodeResult, EpisodeSpec, Row

_WORTH_STARTING = 2_000  # steps that an agent must have left to play: a row's emulators take a third as long to start
_GROUP_STEPS = 8_000  # steps that games played in a group may take: long ones share little, and would be waited for
_LONGER = 3  # an agent gives up rows for one whose games are so many times as long


def _worth_a_row(logs: Sequence["EpisodeLog"]) -> list[int]:
    """Return the agents with games to start that are worth another row, or that have no row to be started in."""
    return [i for i, log in enumerate(logs) if log.unstarted and (log.steps_left >= _WORTH_STARTING or log.rows == 0)]


def most_left(logs: Sequence["EpisodeLog"]) -> int | None:
    """Return the agent that gets a free row, or None if none is worth it."""
    return max(_worth_a_row(logs), key=lambda i: logs[i].steps_left, default=None)


class EpisodeLog:
    """The games of one agent: how many have started, how long they are, and the scores of those that are over."""

    def __init__(
        self, starts: Sequence[int], group_identical_starts: Callable[[Sequence[int]], list[list[int]]]
    ) -> None:
        self._starts = starts
        self._groups = group_identical_starts(starts)  # numbers of games that have not started
        self.scores: list[float | None] = [None] * len(starts)
        self.lengths = [0] * len(starts)
        self.over = 0
        self.steps = 0  # that were played for all its games
        self.rows = 0  # that are lent to it

    @property
    def unstarted(self) -> int:
        """How many games have not started."""
        return sum(map(len, self._groups))

    def claim(self, count: int) -> list[list[EpisodeSpec]]:
        """Return the next games, in at most so many groups that begin alike; none if all have started."""
        groups, self._groups = self._groups[:count], self._groups[count:]
        # How long games are is not known before one is over.
        size = max(1, int(_GROUP_STEPS / self.length)) if self.over else 1
        self._groups += [group[size:] for group in groups if group[size:]]
        return [[EpisodeSpec(number, self._starts[number]) for number in group[:size]] for group in groups]

    def finish(self, ended: EpisodeResult) -> None:
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


class RowPool:
    """Half of the rows: the agent that each is assigned to, and which are busy."""

    def __init__(
        self,
        number: int,
        rows: int,
        logs: Sequence[EpisodeLog],
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
        """Assign a free place to an agent, and begin to start its games there."""
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
        """Read the answers of busy rows: note games that are over, start the next ones, close rows without games."""
        for place in [place for place in self.busy if self.seats[place][1].done]:
            agent, row = self.seats[place]
            ended = row.take()
            self.busy.discard(place)
            for game in ended:
                self._logs[agent].finish(game)
            if ended and (idle := row.idle):
                self._next(place, idle)

    def _next(self, place: int, idle: list[int]) -> None:
        """Start the next games in a row's idle emulators; a row without any game is freed."""
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

    def _makes_way(self, log: EpisodeLog) -> bool:
        """Whether an agent starts no more games for now, to free its rows for an agent whose games are longer.

        It does where one of those games takes one emulator as long as all emulators need for everything that is left.
        """
        length = max((self._logs[i].length for i in _worth_a_row(self._logs)), default=0.0)
        left = sum(other.steps_left for other in self._logs)
        return length > _LONGER * log.length and length * self._places >= left
